"""What the networks of `ood` say together: tables, differences, figures."""

import base64
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import metrics, plots
from ..experiments.store import save_figures
from ..metrics.significance import SIGNS, agrees, compare, mean_and_error
from ..plots.canvas import COLORS, GREY, legend_outside, new_figure
from .results import Estimate, Report, Table, read_table

STATISTICS = {"running": None, "SBN": "lognormal", "MCBN": "bank"}
METHODS = ("one network", "dropout", "deep ensemble")
# Score -> heading, decimals, and the sign of what is better.
SCORES = {
    "error": ("error (%)", 2, -1),
    "nll": ("NLL", 3, -1),
    "ece": ("ECE", 3, -1),
    "auroc": ("AUROC of the entropy", 3, 1),
    "entropy_known": ("entropy, known", 3, 0),
    "entropy_unknown": ("entropy, unseen", 3, 0),
}
CORRUPTED = ("error", "nll", "ece")
PRINTED = ("error", "nll")  # in the paper
PAPER = {
    ("mnist", "lenet-5"): ("LeNet-5", "MNIST"),
    ("mnist-all", "lenet-5"): ("LeNet-5", "MNIST"),
    ("cifar10", "vgg-11"): ("VGG-11", "CIFAR5"),
    ("cifar10", "resnet-18"): ("ResNet-18", "CIFAR5"),
}
PAPER_METHODS = {"SBN": "one network", "Dropout": "dropout", "Deep Ensembles": "deep ensemble"}


def encode(values: Tensor) -> dict:
    """A tensor as JSON: its shape, and its values as float32 in base64."""
    array = values.detach().cpu().float().numpy().astype("<f4")
    return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode()}


def decode(value: dict) -> Tensor:
    """What `encode` was given, in float64."""
    array = np.frombuffer(base64.b64decode(value["float32"]), "<f4").reshape(value["shape"])
    return torch.from_numpy(array.astype(np.float64))


class Outcomes:
    """The predictions of one case: `probs[method, statistics]` is a list of {images: (N, K)},
    one per repetition.

    One network is repeated by every member of every ensemble, the others by run. An ensemble's
    probabilities are the mean of its members' (`bnuq_ext.ensemble`).
    """

    def __init__(self, units: list[dict]):
        self.y = torch.tensor(units[0]["y"])
        self.probs: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
        runs = defaultdict(list)
        for unit in units:
            if not unit["dropout"]:
                runs[unit["run"]].append(unit)
        for name in STATISTICS:
            members = [[_probs(unit, name) for unit in run] for run in runs.values()]
            self.probs["one network", name] = [unit for run in members for unit in run]
            self.probs["dropout", name] = [_probs(u, name) for u in units if u["dropout"]]
            self.probs["deep ensemble", name] = [_mean(run) for run in members]
        self.num_classes = members[0][0]["known"].shape[1]
        self.images = [key for key in members[0][0] if key != "unknown"]

    def scores(self, method: str, statistics: str, images: str = "known") -> dict[str, list[float]]:
        """The scores of each repetition; those of the entropy for the known images alone."""
        found = defaultdict(list)
        for probs in self.probs[method, statistics]:
            p = probs[images]
            found["error"].append(100 * (1 - metrics.accuracy(p, self.y).item()))
            found["nll"].append(metrics.nll(p, self.y).item())
            found["ece"].append(metrics.ece(p, self.y).item())
            if images == "known":
                known, unknown = entropy(p), entropy(probs["unknown"])
                found["auroc"].append(metrics.auroc(known, unknown).item())
                found["entropy_known"].append(known.mean().item())
                found["entropy_unknown"].append(unknown.mean().item())
        return dict(found)

    def corrupted_nll(self, method: str, statistics: str) -> list[float]:
        """Of each repetition the mean over all corruptions."""
        scores = [self.scores(method, statistics, images)["nll"] for images in self.images[1:]]
        return [float(np.mean(column)) for column in zip(*scores, strict=True)]

    def entropies(self, method: str, statistics: str, images: str) -> Tensor:
        """(N,) of all repetitions together."""
        return torch.cat([entropy(probs[images]) for probs in self.probs[method, statistics]])


def _probs(unit: dict, name: str) -> dict[str, Tensor]:
    return {key: decode(value) for key, value in unit["probs"][name].items()}


def _mean(members: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([m[key] for m in members]).mean(0) for key in members[0]}


def entropy(probs: Tensor) -> Tensor:
    """(N,) entropies of (N, K) probabilities, in nats."""
    return metrics.predictive_entropy(probs[None], reduction="none")


def report(results: dict[str, dict], settings, folder: Path) -> Report:
    """Tables, remarks and figures of the units' results."""
    units = defaultdict(list)
    for result in results.values():
        units[result["dataset"], result["network"]].append(result)
    cases = {case: Outcomes(found) for case, found in units.items()}
    paper = _paper()
    tables = [scores_table(cases, paper), differences_table(cases), corrupted_table(cases)]
    tables.append(_paper_table())
    drawn = {
        f"{name}-{'-'.join(case)}.png": draw(outcomes)
        for case, outcomes in cases.items()
        for name, draw in (("entropy", draw_entropies), ("corrupted", draw_corrupted))
    }
    figures = save_figures(folder, drawn, dpi=150)
    remarks = [*_missing(cases, settings), *_counts(tables[1])]
    remarks += _beside_paper(cases, paper, settings)
    return Report(tables, figures, remarks)


def _row(values: dict[str, list[float]], names) -> list[str]:
    return [Estimate.of(values[name], SCORES[name][1]) for name in names]


def scores_table(cases: dict, paper: dict) -> Table:
    """Errors and likelihoods on the known classes, and how the others stand out,
    beside the paper's."""
    rows = []
    for case, outcomes in cases.items():
        for method, name in product(METHODS, STATISTICS):
            values = outcomes.scores(method, name)
            printed = paper.get((*case, method, name), {})
            beside = [
                Estimate(*p, SCORES[s][1]) if (p := printed.get(s)) else None for s in PRINTED
            ]
            rows.append([*case, method, name, len(values["nll"]), *_row(values, SCORES), *beside])
    columns = ["data", "network", "method", "statistics", "repetitions"]
    columns += [heading for heading, *_ in SCORES.values()]
    columns += [f"paper: {SCORES[score][0]}" for score in PRINTED]
    title = "Known classes, and the entropy of unseen ones (mean ± standard error over trainings)"
    return Table("ood", title, columns, rows)


def differences_table(cases: dict) -> Table:
    """Drawn statistics minus running ones, repetition by repetition."""
    names = ("error", "nll", "auroc")
    rows = []
    for case, outcomes in cases.items():
        for method, name in product(METHODS, list(STATISTICS)[1:]):
            drawn, running = (outcomes.scores(method, n) for n in (name, "running"))
            cells = [_difference(drawn[s], running[s], s) for s in names]
            if len(outcomes.images) > 1:
                means = [outcomes.corrupted_nll(method, n) for n in (name, "running")]
                cells.append(_difference(*means, "nll"))
            rows.append([*case, method, name, *cells])
    columns = ["data", "network", "method", "statistics", *(SCORES[s][0] for s in names)]
    title = (
        "Drawn minus running statistics, paired: + better, - worse, = within two standard errors"
    )
    return Table(
        "differences", title, [*columns, "NLL, mean of the corruptions"][: len(rows[0])], rows
    )


def _difference(drawn: list[float], running: list[float], score: str) -> Estimate:
    mean, error = mean_and_error([a - b for a, b in zip(drawn, running, strict=True)])
    _, digits, better = SCORES[score]
    found = compare(drawn, running, better > 0)
    mark = "" if found is None else f"{SIGNS[found]} "
    return Estimate(mean, error, digits + 1, mark)


def corrupted_table(cases: dict) -> Table:
    """The known classes' test images, corrupted."""
    rows = [
        [*case, method, name, images, *_row(outcomes.scores(method, name, images), CORRUPTED)]
        for case, outcomes in cases.items()
        for images, method, name in product(outcomes.images[1:], METHODS, STATISTICS)
    ]
    columns = ["data", "network", "method", "statistics", "corruption"]
    columns += [SCORES[score][0] for score in CORRUPTED]
    return Table("corrupted", "Corrupted images of the known classes", columns, rows)


def _paper() -> dict:
    """(data, network, method, statistics) -> {score: (mean, error)} of the printed table."""
    printed = defaultdict(dict)
    for row, case in product(read_table("atanov_table1"), PAPER):
        if (row["network"], row["data"]) != PAPER[case]:
            continue
        for score, name in product(PRINTED, ("running", "SBN")):
            column = f"{'error_pct' if score == 'error' else 'nll'}_{'sbn' if name == 'SBN' else 'no_sbn'}"
            if row[column]:
                place = (*case, PAPER_METHODS[row["method"]], name)
                printed[place][score] = float(row[column]), float(row[f"{column}_pm"])
    return dict(printed)


def _paper_table() -> Table:
    rows = read_table("atanov_table1")
    cells = [[row[column] or None for column in row] for row in rows]
    headings = ["network", "data", "method"]
    for score, statistics in product(PRINTED, ("without SBN", "with SBN")):
        heading = f"{SCORES[score][0]} {statistics}"
        headings += [heading, f"{heading} ±"]
    return Table("paper", "As printed: Atanov et al. 2019, Table 1", headings, cells)


def _missing(cases: dict, settings) -> list[str]:
    asked = {(data, network) for data, network, _ in settings.cases}
    return [
        f"Not run, since its folder is missing: {' with '.join(case)}."
        for case in sorted(asked - cases.keys())
    ]


def _counts(differences: Table) -> list[str]:
    """How often drawn statistics are better and worse than running ones."""
    remarks = []
    for name in list(STATISTICS)[1:]:
        cells = [cell for row in differences.rows if row[3] == name for cell in row[4:]]
        marks = [sum(cell.startswith(f"{mark} ") for cell in cells) for mark in "+-="]
        remarks.append(
            f"{name} against running statistics, over all methods and scores of the second table: better in "
            f"{marks[0]}, worse in {marks[1]}, within two standard errors in {marks[2]} of {len(cells)}."
        )
    return remarks


def _beside_paper(cases: dict, paper: dict, settings) -> list[str]:
    remarks = []
    for case, outcomes in cases.items():
        words = []
        for method, name in product(METHODS, STATISTICS):
            values = outcomes.scores(method, name)
            for score, printed in paper.get((*case, method, name), {}).items():
                ours = mean_and_error(values[score])
                same = {True: "within", False: "outside", None: "not to be told, one repetition"}
                words.append(
                    f"{method}, {name}, {SCORES[score][0]}: {same[agrees(*ours, *printed)]}"
                )
        if words:
            remarks.append(
                f"{' with '.join(case)} against the paper, two standard errors: {'; '.join(words)}. "
                + _conditions(case, settings)
            )
    return remarks


def _conditions(case: tuple[str, str], settings) -> str:
    epochs = {(data, network): epochs for data, network, epochs in settings.cases}[case]
    images = "all" if settings.num_train is None else f"the first {settings.num_train}"
    classes = (
        f"The paper's MNIST has ten classes, this one {settings.num_known}. "
        if case[0] == "mnist"
        else ""
    )
    return (
        f"{classes}Trained here for {epochs} epoch{'s' * (epochs > 1)} on {images} of the training images of the known classes; "
        "what the paper's ± means it does not say (taken as a standard error)."
    )


def draw_entropies(outcomes: Outcomes):
    """Entropy CDFs, a panel per method: unseen classes solid, known ones dashed."""
    figure = new_figure(10.5, 4.0)
    panels = figure.subplots(1, len(METHODS), sharex=True, sharey=True)
    for method, ax in zip(METHODS, panels, strict=True):
        curves, styles = {}, {}
        # The first is the widest: curves that coincide are all to be seen.
        for name, color, width in zip(STATISTICS, COLORS, (3.5, 2.0, 0.9), strict=False):
            for images, kind in (("unknown", "unseen"), ("known", "known")):
                label = f"{name}, {kind}"
                curves[label] = outcomes.entropies(method, name, images).numpy()
                line = "-" if kind == "unseen" else "--"
                styles[label] = {"color": color, "linestyle": line, "linewidth": width}
        plots.entropy_cdf(curves, num_classes=outcomes.num_classes, styles=styles, ax=ax)
        ax.set_title(method, fontsize="medium")
        ax.set_ylabel("fraction of images at or below" if ax is panels[0] else "")
    legend_outside(panels, "upper")
    return figure


def draw_corrupted(outcomes: Outcomes):
    """NLL on clean and corrupted images of the known classes, a panel per method."""
    figure = new_figure(10.5, 4.0)
    panels = figure.subplots(1, len(METHODS), sharey=True)
    places = np.arange(len(outcomes.images))
    for method, ax in zip(METHODS, panels, strict=True):
        for shift, name, color in zip((-0.15, 0, 0.15), STATISTICS, COLORS, strict=False):
            scores = [
                mean_and_error(outcomes.scores(method, name, i)["nll"]) for i in outcomes.images
            ]
            means, errors = np.array(scores).T
            bars = {"yerr": np.nan_to_num(errors), "capsize": 2, "fmt": "o", "markersize": 4}
            ax.errorbar(places + shift, means, **bars, color=color, label=name)
        ax.axhline(np.log(outcomes.num_classes), color=GREY, linewidth=0.8)
        labels = ["clean", *outcomes.images[1:]]
        ax.set_xticks(places, labels, rotation=45, ha="right", rotation_mode="anchor")
        ax.set_title(method, fontsize="medium")
    panels[0].set(ylabel="NLL [nats], mean ± standard error")
    panels[0].set_ylim(bottom=-0.03 * panels[0].get_ylim()[1])
    note = {"color": GREY, "fontsize": "small", "va": "bottom"}
    panels[0].text(-0.3, np.log(outcomes.num_classes), f"log {outcomes.num_classes}", **note)
    legend_outside(panels, "upper")
    return figure
