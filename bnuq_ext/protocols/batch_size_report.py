"""Tables, figures and remarks of the batch-size protocol."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from .. import plots
from ..experiments.store import save_figures
from ..metrics.significance import mean_and_error
from ..plots.canvas import new_figure
from .results import Estimate, Report, Table, read_table

SCORES = {
    "plug_in_accuracy": ("accuracy, plug-in BN", 4),
    "accuracy": ("accuracy, MCBN", 4),
    "plug_in_nll": ("NLL, plug-in BN", 3),
    "nll": ("NLL, MCBN", 3),
    "information_in": ("mutual information, known (nats)", 4),
    "information_out": ("foreign (nats)", 4),
    "auroc_information": ("AUROC of the mutual information", 3),
    "auroc_entropy": ("AUROC of the entropy", 3),
}
CURVES = {
    "log_likelihood": "E log p(training data)",
    "kl": "KL",
    "elbo": "ELBO",
    "nll": "validation NLL",
    "information_in": "mutual information, known",
    "information_out": "foreign",
}


def report(results: dict[str, dict], settings, folder: Path) -> Report:
    """The paper's table and figure for networks trained with each M,
    and the choice of M for one of them."""
    fits = [results[f"fit-{s}"] for s in range(settings.num_seeds)]
    sizes = sorted({int(name[1:].split("-")[0]) for name in results if name[0] == "M"})
    found = {M: [results[f"M{M}-{s}"] for s in range(settings.num_seeds)] for M in sizes}
    means = {
        M: {k: mean_and_error([r[k] for r in runs]) for k in SCORES} for M, runs in found.items()
    }
    tables = [_scores_table(means, settings), _fit_table(fits, settings), _shares_table(fits)]
    drawn = {"trained-with-M.png": draw_scores(means), "choice-of-M.png": draw_fit(fits[0])}
    figures = save_figures(folder, drawn)
    remarks = [*_of_scores(means, settings), *_of_choices(fits, settings)]
    return Report(tables, figures, remarks)


def printed() -> dict[tuple[str, int], float]:
    """The paper's accuracies on Fashion-MNIST by (network, batch size)."""
    rows = read_table("mukhoti_table1_accuracy_vs_batchsize")
    return {
        (row["architecture"], int(row["batch_size"])): float(row["test_accuracy"])
        for row in rows
        if row["dataset"] == "Fashion-MNIST"
    }


def _scores_table(means: dict[int, dict], settings) -> Table:
    columns = ["M", *(head for head, _ in SCORES.values())]
    rows = [
        [M, *(Estimate(*values[k], digits) for k, (_, digits) in SCORES.items())]
        for M, values in means.items()
    ]
    if set(means) == set(settings.batch_sizes):  # of Fashion-MNIST, as the paper's
        paper = printed()
        for network in ("VGG-16", "ResNet-50"):
            columns.append(f"paper: accuracy, {network}")
            for row in rows:
                row.append(paper.get((network, row[0])))
    title = (
        f"Trained with M and predicting with M: mean ± standard error; seeds: {settings.num_seeds}"
    )
    return Table("trained-with-M", title, columns, rows)


def _fit_table(fits: list[dict], settings) -> Table:
    rows = []
    for i, M in enumerate(fits[0]["batch_sizes"]):
        cells = [[fit[name][i] for fit in fits] for name in CURVES]
        rows.append([M, *map(_mean, CURVES, cells)])
    title = (
        f"The statistics of one network, trained with M = {settings.fit_trained_with}, at other M (fit_batch_size), "
        f"in nats: means; seeds: {len(fits)}"
    )
    return Table("choice-of-M", title, ["M", *CURVES.values()], rows)


def _shares_table(fits: list[dict]) -> Table:
    """Mutual information by batch size, a column for each number of training images."""
    columns = {}
    for runs in [*zip(*(fit["shares"] for fit in fits), strict=True), fits]:
        curves = zip(*(run["information_in"] for run in runs), strict=True)
        means = [fmean(values) for values in curves]
        columns[runs[0]["train_rows"]] = dict(zip(runs[0]["batch_sizes"], means, strict=True))
    sizes = sorted({M for column in columns.values() for M in column})
    rows = [[M, *(column.get(M) for column in columns.values())] for M in sizes]
    title = "Mutual information on known images where so many training images are at hand (nats): 0 at M = N"
    return Table("sizes-of-data", title, ["M", *(f"N = {N}" for N in columns)], rows)


def _mean(name: str, values: list[float | None]) -> float | str:
    if None in values:
        return "inf" if name == "kl" else "-inf"
    return fmean(values)


def draw_scores(means: dict[int, dict]):
    """Figure 1 of the paper, and its table beside it."""
    figure = new_figure(9.6, 3.6)
    left, right = figure.subplots(1, 2)

    def curve(name: str) -> list[float]:
        return [values[name][0] for values in means.values()]

    sizes = list(means)
    curves = {"known": curve("information_in"), "foreign": curve("information_out")}
    plots.against_batch_size(sizes, curves, ylabel="mutual information [nats]", ax=left)
    left.set_ylim(bottom=0)
    curves = {"MCBN": curve("accuracy"), "plug-in BN": curve("plug_in_accuracy")}
    plots.against_batch_size(sizes, curves, ylabel="test accuracy", ax=right)
    for ax in (left, right):
        ax.set_xlabel("batch size M of training and statistics")
    return figure


def draw_fit(fit: dict):
    """ELBO, validation NLL and mutual information against M for one network, of the first seed."""
    figure = new_figure(13.2, 4.0)
    figure.suptitle("the first seed's network alone", fontsize="medium")
    axes = figure.subplots(1, 3)
    sizes, N = fit["batch_sizes"], fit["train_rows"]
    marks = {N: "= N"} if N in sizes else {}
    bounds = {"ELBO": fit["elbo"], "E log p(training data)": fit["log_likelihood"]}
    bounds["-KL"] = [None if v is None else -v for v in fit["kl"]]
    panels = (
        (bounds, "nats, the whole training data"),
        ({"validation": fit["nll"]}, "negative log-likelihood [nats]"),
        (
            {"known": fit["information_in"], "foreign": fit["information_out"]},
            "mutual information [nats]",
        ),
    )
    for ax, (curves, ylabel) in zip(axes, panels, strict=True):
        plots.against_batch_size(sizes, curves, ylabel=ylabel, marks=marks, ax=ax)
    for ax, best in ((axes[0], fit["best_by_elbo"]), (axes[1], fit["best_by_nll"])):
        ax.axvline(best, color="black", linewidth=1, linestyle=":", label=f"best: M = {best}")
        ax.legend(frameon=False, fontsize="small")
    axes[1].axhline(
        fit["plug_in_nll"], color="grey", linestyle="--", linewidth=1, label="plug-in BN"
    )
    axes[1].legend(frameon=False, fontsize="small")
    axes[2].set_ylim(bottom=0)
    _keep_optimum_in_sight(axes[0], fit)
    return figure


def _keep_optimum_in_sight(ax, fit: dict) -> None:
    """The smallest batches may be worse by orders of magnitude: they are cut off."""
    elbo = [v for v in fit["elbo"] if v is not None]
    top, best = max(0.0, *fit["log_likelihood"]), max(elbo)
    low = max(min(elbo), best - 1.5 * (top - best))
    ax.set_ylim(low - 0.08 * (top - low), top + 0.08 * (top - low))


def _of_scores(means: dict[int, dict], settings) -> list[str]:
    small, large = min(means), max(means)
    texts = []
    for place, name in (("known", "information_in"), ("foreign", "information_out")):
        first, last = means[small][name][0], means[large][name][0]
        texts.append(
            f"Mutual information on {place} images: {first:.4f} nats at M = {small}, {last:.4f} at M = {large}, "
            f"{first / last:.0f} times less. The paper says that it nearly vanishes at 1024 and 2048 (a figure, no "
            "numbers)."
        )
    at = [Estimate(*means[M]["auroc_information"], 3) for M in (small, large)]
    texts.append(
        "The paper says that it can then no longer tell foreign images from known ones. Its AUROC, which goes by rank "
        f"and not by size, is {at[0]} at M = {small} and {at[1]} at M = {large}."
    )
    accuracies = [values["accuracy"][0] for values in means.values()]
    texts.append(
        f"The accuracy of MCBN lies between {min(accuracies):.4f} and {max(accuracies):.4f}."
    )
    if set(means) == set(settings.batch_sizes):
        other = ", with another network than here" if settings.network != "vgg16" else ""
        texts.append(
            "The paper's accuracies lie between 0.9427 and 0.9486 (VGG-16), 0.9343 and 0.9396 (ResNet-50), one run "
            f"each{other}; they hardly depend on M."
        )
    return texts


def _of_choices(fits: list[dict], settings) -> list[str]:
    by_elbo, by_nll = ([fit[k] for fit in fits] for k in ("best_by_elbo", "best_by_nll"))
    texts = [
        f"The ELBO is greatest at M = {_list(by_elbo)} and the validation NLL least at M = {_list(by_nll)}, one "
        f"number a seed, for a network trained with M = {settings.fit_trained_with}. The paper proposes the "
        "choice by the ELBO and does not try it."
    ]
    if settings.fit_whole:
        whole = {
            v for fit in fits for k in ("information_in", "information_out") for v in fit[k][-1:]
        }
        texts.append(
            f"At M = N = {fits[0]['train_rows']} the mutual information is {', '.join(map(repr, sorted(whole)))}, the KL "
            "infinite."
        )
    return texts


def _list(values: list[int]) -> str:
    return " and ".join(map(str, values))
