"""`bnuq reproduce sensitivity`: MCBN against the batch size M and the number of replicas T
(Teye et al. 2018)."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from ..experiments.store import save_figures
from ..metrics.significance import compare, mean_and_error
from ..ops.checks import refuse
from ..plots.canvas import COLORS, GREY, new_figure
from . import uci
from .results import Estimate, Report, Table, Unit, read_table
from .uci import sources as sources
from .uci_search import Regression, fit_split

TITLE = "UCI regression: MCBN against batch size and number of replicas (Teye et al. 2018, Tables 8 to 11)"
WITHOUT_DATA = "diabetes"
SCORES = ("crps", "pll")
PAPER = {"crps": ("08_batchsize_crps", "10_T_crps"), "pll": ("09_batchsize_pll", "11_T_pll")}


@dataclass(frozen=True)
class Settings(Regression):
    """The paper's protocol: every M is searched and trained by itself. QUICK has 2 splits with 3
    seeds, 2 of the 5 folds, 3 weight decays, and trains a network at most 1,000 epochs and on at
    most 400,000 rows: too few steps for the largest M on large tables.

    T = `num_samples` replicas for the batch sizes, `sample_counts` with M = `sampled_batch_size`.
    """

    num_splits: int = 3
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    num_samples: int = 100
    sample_counts: tuple[int, ...] = (50, 100, 250)
    sampled_batch_size: int = 128


FULL = Settings()
QUICK = Settings(
    num_splits=2,
    num_seeds=3,
    folds_used=2,
    weight_decays=(1e-2, 1e-4, 1e-6),
    max_epochs=1000,
    max_rows=400_000,
    patience=5,
)


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    """One per data set, split and batch size that a fold can fill."""
    parts, least = uci.by_size(data_root), min(settings.batch_sizes)
    units = [
        Unit(f"{name}-{M}-{split}", {"data": name, "batch_size": M, "split": split})
        for name, part in parts.items()
        for split in range(1, settings.num_splits + 1)
        for M in settings.batch_sizes
        if settings.fold_rows(len(part.y)) >= M
    ]
    if not units:
        requirement = f"hold a table whose folds have {least} rows"
        got = f"tables of {[len(part.y) for part in parts.values()]} rows"
        refuse("sensitivity", "data_root", requirement, got)
    used = {unit.arguments["data"]: parts[unit.arguments["data"]] for unit in units}
    uci.check_tables("sensitivity", data_root, used, settings)
    return units


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """The choice with one batch size, and by T the noise and the scores of each seed."""
    name, M, split = (unit.arguments[key] for key in ("data", "batch_size", "split"))
    part = uci.load(data_root, name)
    found, scaled, networks = fit_split(part, split, "MCBN", replace(settings, batch_sizes=(M,)))
    counts = {settings.num_samples}
    if settings.sampled_batch_size == M:
        counts |= set(settings.sample_counts)
    by_count = {
        str(T): uci.scores(found, networks, scaled, replace(settings, num_samples=T))
        for T in sorted(counts)
    }
    return {"choice": found.choice._asdict(), "by_count": by_count}


def report(results: dict[str, dict], settings: Settings, folder: Path) -> Report:
    sizes, counts = collected(results, settings)
    tables, remarks = [], []
    for score in SCORES:
        of_sizes, of_counts = PAPER[score]
        what = f"Normalised {score.upper()} [%] of MCBN (mean ± standard error over runs)"
        title = f"{what} by batch size, T = {settings.num_samples}; blank where M exceeds the training rows"
        columns = settings.batch_sizes
        tables.append(table(f"batch-size-{score}", title, sizes[score], columns, of_sizes))
        title = f"{what} by T, M = {settings.sampled_batch_size}"
        tables.append(table(f"T-{score}", title, counts[score], settings.sample_counts, of_counts))
        remarks += claims(score, sizes[score], counts[score], settings)
    figures = save_figures(folder, {"batch-size.png": draw(sizes, settings)}, dpi=110)
    return Report(tables, figures, remarks)


def collected(results: dict[str, dict], settings: Settings) -> tuple[dict, dict]:
    """Normalised scores of all runs: score -> data set -> M, and score -> data set -> T,
    -> values."""
    sizes, counts = ({score: {} for score in SCORES} for _ in range(2))
    for unit in sorted(results):
        name, M, _ = unit.rsplit("-", 2)
        for T, found in results[unit]["by_count"].items():
            for score in SCORES:
                values = [run[f"normalised_{score}"] for run in found["runs"]]
                if int(T) == settings.num_samples:
                    sizes[score].setdefault(name, {}).setdefault(int(M), []).extend(values)
                if int(M) == settings.sampled_batch_size and int(T) in settings.sample_counts:
                    counts[score].setdefault(name, {}).setdefault(int(T), []).extend(values)
    return sizes, counts


def table(name: str, title: str, found: dict, columns: tuple[int, ...], paper: str) -> Table:
    """Two rows a data set, ours and the paper's; a blank where the batch does not fit."""
    printed = {}
    for row in read_table(f"teye_table{paper}"):
        key = int(row.get("batch_size") or row["T"])
        printed.setdefault(row["dataset"], {})[key] = row["normalised_pct"] or None
    rows = []
    for data, by_value in found.items():
        cells = [Estimate.of(by_value[v], digits=1) if v in by_value else None for v in columns]
        rows.append([data, "ours", *cells])
        if data in printed:
            rows.append([data, "paper", *(printed[data].get(v) for v in columns)])
    return Table(name, title, ["data set", "", *map(str, columns)], rows)


def claims(score: str, sizes: dict, counts: dict, settings: Settings) -> list[str]:
    """Whether M of at most 16 is worse than larger ones, and whether more replicas are better, by more
    than two standard errors of the runs' differences."""
    pairs = {}
    for name, by_size in sizes.items():
        small = [v for M, v in by_size.items() if M <= 16]
        large = [v for M, v in by_size.items() if M > 16]
        if small and large:
            pairs[name] = max(large, key=fmean), max(small, key=fmean)
    first, last = min(settings.sample_counts), max(settings.sample_counts)
    both = {n: (v[last], v[first]) for n, v in counts.items() if {first, last} <= v.keys()}
    return [
        f"{score.upper()}: the best M of at most 16 is worse than the best larger one {_where(pairs)}",
        f"{score.upper()}: T = {last} is better than T = {first} {_where(both)}",
    ]


def _where(pairs: dict[str, tuple[list[float], list[float]]]) -> str:
    """On which data sets, of those with several runs, the first of two scores is better."""
    signs = {name: compare(*two, more_is_better=True) for name, two in pairs.items()}
    known = {name: sign for name, sign in signs.items() if sign is not None}
    found = [name for name, sign in known.items() if sign == "better"]
    names = ", ".join(found) or "none"
    return f"by more than two standard errors on {len(found)} of {len(known)} data sets ({names})."


def draw(sizes: dict, settings: Settings):
    """Normalised scores against the batch size, a curve a data set."""
    from matplotlib.ticker import SymmetricalLogLocator

    figure = new_figure(9.2, 3.8)
    axes = figure.subplots(1, len(SCORES))
    for ax, score in zip(axes, SCORES, strict=True):
        for number, (name, by_size) in enumerate(sorted(sizes[score].items())):
            batch_sizes = sorted(by_size)
            means, errors = zip(*(mean_and_error(by_size[M]) for M in batch_sizes), strict=True)
            style = {"marker": "o", "markersize": 4, "color": COLORS[number % len(COLORS)]}
            ax.errorbar(
                batch_sizes, means, np.nan_to_num(errors), label=name, linewidth=1.2, **style
            )
        ax.axhline(0, color=GREY, linewidth=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xticks(settings.batch_sizes, map(str, settings.batch_sizes))
        label = f"normalised {score.upper()} [%]"
        if max(map(abs, ax.dataLim.intervaly)) > 10:
            ax.set_yscale("symlog", linthresh=10)
            locator = SymmetricalLogLocator(base=10, linthresh=10, subs=(1, 2, 5))
            ax.yaxis.set_major_locator(locator)
            ax.yaxis.set_major_formatter("{x:g}")
            label += ", logarithmic beyond ±10"
        ax.set(xlabel="batch size M", ylabel=label)
    axes[-1].legend(frameon=False, fontsize="small", ncols=2)
    return figure
