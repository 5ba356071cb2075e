"""The report of `bnuq reproduce uci`: the paper's tables beside ours, and a figure per data set."""

import math
from pathlib import Path
from statistics import fmean, median

from .. import metrics
from ..experiments.store import save_figures
from ..metrics.significance import agrees, mean_and_error
from ..plots import uncertainty_error
from ..plots.canvas import legend_outside, new_figure
from .results import Estimate, Report, Table, read_table

PLAIN = {"MCBN": "BN", "MCDO": "DO"}
CONSTANT = {"MCBN": "CUBN", "MCDO": "CUDO"}


def report(results: dict[str, dict], settings, folder: Path) -> Report:
    groups = grouped(results)
    tables, remarks = [], []
    for table, sentences in (normalised(groups), raw(groups), root_errors(groups)):
        tables.append(table)
        remarks += sentences
    tables.append(choices(groups))
    remarks += [unfinished(groups, settings), bounded(groups, settings)]
    names = dict.fromkeys(name for name, _ in groups)
    drawn = {f"uncertainty-{name}.png": draw(name, groups) for name in names}
    return Report(tables, save_figures(folder, drawn, dpi=110), remarks)


def grouped(results: dict[str, dict]) -> dict[tuple[str, str], list[dict]]:
    """(data set, method) -> its splits in their order, data sets by name."""
    groups = {}
    for unit in results:
        name, method, split = unit.rsplit("-", 2)
        groups.setdefault((name, method), {})[int(split)] = results[unit]
    return {key: [v for _, v in sorted(splits.items())] for key, splits in sorted(groups.items())}


def over_runs(splits: list[dict], score: str) -> list[float]:
    return [run[score] for split in splits for run in split["runs"]]


def stars(p: float) -> str:
    """The paper's marks: ns, then one star below 0.05 and one more below 0.01, 0.001, 0.0001."""
    found = sum(p < level for level in (0.05, 0.01, 0.001, 0.0001))
    return "*" * found or ("ns" if p >= 0.05 else "")


def printed(table: str, **key) -> dict | None:
    """A paper's (mean, error, p), or None where it has no such row."""
    for row in read_table(table):
        if all(row[name] == value for name, value in key.items()):
            mean = float(row.get("mean_pct") or row["mean"])
            p = float(row["p_value"]) if "p_value" in row else math.nan
            return {"mean": mean, "error": float(row["standard_error"]), "p": p}
    return None


def beside(values: list[float], paper: dict | None) -> list:
    """Cells: ours, the paper's, whether they agree within two standard errors."""
    mean, error = mean_and_error(values)
    if paper is None:
        return [Estimate(mean, error), None, None]
    same = agrees(mean, error, paper["mean"], paper["error"])
    cell = None if same is None else "yes" if same else "no"
    return [Estimate(mean, error), Estimate(paper["mean"], paper["error"]), cell]


def normalised(groups: dict) -> tuple[Table, list[str]]:
    """Tables 1, 4 and 5: percent of the way from a constant variance to the best one
    of each point."""
    rows, remarks = [], []
    columns = ["data set", "score", "method", "ours [%]", "p", "below 0.05"]
    columns += ["paper [%]", "paper p", "agree"]
    for score, number in (("crps", "04_normalised_crps"), ("pll", "05_normalised_pll")):
        better = {}
        for (name, method), splits in groups.items():
            values = over_runs(splits, f"normalised_{score}")
            paper = printed(f"teye_table{number}", dataset=name, method=method)
            p = metrics.t_test(values)[1] if len(values) > 1 else math.nan
            ours, theirs, same = beside(values, paper)
            significance = [None if math.isnan(p) else p, stars(p)]
            printed_cells = [theirs, paper and paper["p"], same]
            rows.append([name, score.upper(), method, ours, *significance, *printed_cells])
            better.setdefault(method, []).append((name, fmean(values), p))
        remarks += [verdict(score.upper(), method, found) for method, found in better.items()]
    title = (
        "Normalised scores: 0 is a constant variance, 100 the best variance of each point (mean ± standard "
        "error over runs; stars as the paper's: p below 0.05, 0.01, 0.001, 0.0001)"
    )
    remarks.append(agreement("normalised scores", rows))
    return Table("normalised", title, columns, rows), remarks


def verdict(score: str, method: str, found: list[tuple[str, float, float]]) -> str:
    above = [name for name, mean, p in found if mean > 0 and p < 0.05]
    below = [name for name, mean, p in found if mean < 0 and p < 0.05]
    parts = [f"better than a constant variance (p < 0.05) on {', '.join(above) or 'none'}"]
    if below:
        parts.append(f"worse on {', '.join(below)}")
    level = [name for name, _, _ in found if name not in above + below]
    if level:
        parts.append(f"undecided on {', '.join(level)}")
    return f"{score}: {method} is {'; '.join(parts)}."


def agreement(what: str, rows: list[list]) -> str:
    """How many rows, with "agree" in the last column,
    are within two standard errors of the paper."""
    compared = [row for row in rows if row[-1] is not None]
    if not compared:
        return f"The paper has no {what} to compare with."
    apart = [f"{row[0]} {' '.join(row[1:3])}" for row in compared if row[-1] == "no"]
    text = f"{len(compared) - len(apart)} of {len(compared)} {what} agree with the paper's within two standard errors"
    return text + (f"; not: {', '.join(apart)}." if apart else ".")


def raw(groups: dict) -> tuple[Table, list[str]]:
    """Table 6, with the constant variances that the paper does not print."""
    rows = []
    columns = ["data set", "score", "method", "ours", "constant variance", "paper", "agree"]
    for score in ("crps", "pll"):
        for (name, method), splits in groups.items():
            key = {"dataset": name, "metric": score.upper(), "method": method}
            paper = printed("teye_table06_raw_crps_pll", **key)
            ours, theirs, same = beside(over_runs(splits, score), paper)
            constant = Estimate.of(over_runs(splits, f"constant_{score}"))
            rows.append([name, score.upper(), method, ours, constant, theirs, same])
    title = "CRPS (smaller is better, unit of the target) and PLL (larger is better, nats) of the test rows"
    return Table("raw", title, columns, rows), [agreement("raw scores", rows)]


def root_errors(groups: dict) -> tuple[Table, list[str]]:
    """Table 7."""
    rows, columns = [], ["data set", "score", "method", "ours", "paper", "agree"]
    for (name, method), splits in groups.items():
        for label, score in ((method, "rmse"), (PLAIN[method], "plain_rmse")):
            paper = printed("teye_table07_rmse", dataset=name, method=label)
            rows.append([name, "RMSE", label, *beside(over_runs(splits, score), paper)])
    title = "RMSE of the predictive mean, and of the network without noise (unit of the target)"
    return Table("rmse", title, columns, rows), [agreement("RMSE", rows)]


def choices(groups: dict) -> Table:
    """What cross-validation chose on the training part of each split."""
    columns = ["data set", "method", "split", "batch size", "weight decay", "dropout", "epochs"]
    columns += ["CV RMSE", "noise std", "constant std", "CV PLL", "CV PLL without a bound"]
    rows = []
    for (name, method), splits in groups.items():
        for number, split in enumerate(splits, 1):
            c = split["choice"]
            cells = [c[k] for k in ("batch_size", "weight_decay", "dropout", "epochs", "rmse")]
            deviations = [split[k] ** 0.5 for k in ("noise_var", "constant_var")]
            plls = [split[k] for k in ("held_out_pll", "unbounded_pll")]
            rows.append([name, method, number, *cells, *deviations, *plls])
    return Table("choices", "Chosen by cross-validation within the training part", columns, rows)


def unfinished(groups: dict, settings) -> str:
    """Where the best epoch was the last one looked at: more training would have been better."""

    def is_last(split: dict) -> bool:
        rows = settings.fold_rows(split["rows"])
        return split["choice"]["epochs"] + settings.checks(rows) > settings.epochs(rows)

    where, _ = searches(groups, is_last)
    return f"The best epoch was the last one allowed in {where}."


def bounded(groups: dict, settings) -> str:
    """Where the fit of the noise by CRPS ended at its bound,
    and the held-out PLL with the bound and without."""
    where, held = searches(groups, lambda split: split["held_out_pll"] != split["unbounded_pll"])
    text = (
        f"The noise variance ended at its bound, {settings.least_noise:g} of the training targets' "
        f"variance, in {where}."
    )
    if not held:
        return text
    with_bound, without = (median(s[k] for s in held) for k in ("held_out_pll", "unbounded_pll"))
    return (
        f"{text} Median PLL of the held-out rows of these: {with_bound:.2f}, "
        f"without the bound {without:.0f}."
    )


def searches(groups: dict, condition) -> tuple[str, list[dict]]:
    """In how many searches a condition holds, "2 of 60 searches: energy MCBN (2)", and those."""
    by_group = {key: [s for s in splits if condition(s)] for key, splits in groups.items()}
    found = [split for splits in by_group.values() for split in splits]
    text = f"{len(found)} of {sum(map(len, groups.values()))} searches"
    names = [f"{name} {method} ({len(s)})" for (name, method), s in by_group.items() if s]
    return (f"{text}: {', '.join(names)}" if names else text), found


def draw(name: str, groups: dict):
    """Uncertainty against error for the first seed of the first split."""
    figure = new_figure(9.2, 3.9)
    methods = [method for (data, method) in groups if data == name]
    axes = figure.subplots(1, len(methods), squeeze=False, sharey=True)[0]
    tops = []
    for ax, method in zip(axes, methods, strict=True):
        split = groups[name, method][0]
        uncertainty_error(**split["points"], constant_std=split["constant_var"] ** 0.5, ax=ax)
        tops.append(ax.get_ylim()[1])
        title = f"{name}, {method} (dashed: {CONSTANT[method]}, its constant variance)"
        ax.set_title(title, fontsize="medium")
        ax.set_ylabel("absolute error [unit of the target]" if ax is axes[0] else "")
    axes[0].set_ylim(0, max(tops))  # the axis is shared, so each has set it for all
    # Inside it would hide errors.
    scale = axes[0].get_legend().markerscale
    legend_outside(axes, "lower", ncols=3, fontsize="small", markerscale=scale)
    return figure
