"""What the runs of `digits` show: means over seeds, paired comparisons, the printed table,
the figures."""

import math
from dataclasses import asdict
from pathlib import Path

from .. import plots
from ..environment import environment
from ..metrics.significance import SIGNS, compare, mean_and_error
from .digits import PLUG_IN, ROWS, SAMPLERS, TEMPERATURE, Settings
from .store import save_figures, write_json

# Whether more is better.
SCORES = {"accuracy": True, "nll": False, "ece": False}
UNSEEN_COMPARED = {"accuracy": True, "nll": False, "auroc_entropy": True}  # MI has no plug-in
UNSEEN = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "entropy_seen": "H seen",
    "entropy_unseen": "H unseen",
    "auroc_entropy": "AUROC H",
    "auroc_information": "AUROC MI",
}
TITLES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}


def estimate(values: list[float]) -> dict[str, float | None]:
    """Mean over seeds and its standard error, the 1/(n-1) deviation over sqrt(n);
    None for one seed."""
    mean, error = mean_and_error(values)
    return {"mean": mean, "error": None if math.isnan(error) else error}


def summarise(units: dict, settings: Settings) -> dict:
    """The table, the block of unseen classes, and the samplers compared with both plug-ins.

    Returns:
        dict: "noisy"[std][row][score] and "unseen"[row][score] with mean and error over seeds;
        "compared"[baseline][row][score][std] and "unseen_compared"[baseline][row][score] with the
        words of `compare`.
    """
    seeds = range(settings.num_seeds)
    noisy, unseen = ([units[f"{name}-{s}"] for s in seeds] for name in ("noisy", "unseen"))
    temperature = estimate([unit["temperature"] for unit in noisy])
    stds = [str(std) for std in settings.noise_stds]
    return {"temperature": temperature} | _of_noise(noisy, stds) | _of_unseen_classes(unseen)


def _of_noise(units: list[dict], stds: list[str]) -> dict:
    def column(std, row, score):
        return [unit[std][row][score] for unit in units]

    def compared(row, baseline):
        return {
            k: {s: compare(column(s, row, k), column(s, baseline, k), more) for s in stds}
            for k, more in SCORES.items()
        }

    return {
        "noisy": {
            std: {row: {k: estimate(column(std, row, k)) for k in SCORES} for row in ROWS}
            for std in stds
        },
        "compared": _with_plug_ins(compared),
    }


def _of_unseen_classes(units: list[dict]) -> dict:
    def column(row, score):
        return [unit[row][score] for unit in units]

    def compared(row, baseline):
        return {
            k: compare(column(row, k), column(baseline, k), more)
            for k, more in UNSEEN_COMPARED.items()
        }

    return {
        "unseen": {row: {k: estimate(column(row, k)) for k in UNSEEN} for row in ROWS},
        "unseen_compared": _with_plug_ins(compared),
    }


def _with_plug_ins(compared) -> dict[str, dict[str, dict]]:
    """`compared(row, baseline)` of each sampler and both plug-ins."""
    return {
        baseline: {row: compared(row, baseline) for row in SAMPLERS}
        for baseline in (PLUG_IN, TEMPERATURE)
    }


def _cell(value: dict[str, float | None]) -> str:
    error = "" if value["error"] is None else f" ± {value['error']:.3f}"
    return f"{value['mean']:.3f}{error}"


def _table(rows: dict[str, list[str]], header: list[str]) -> list[str]:
    width = max(len(name) for name in rows)
    lines = [" " * width + "".join(f"  {title:>13}" for title in header)]
    return lines + [
        f"{name:<{width}}" + "".join(f"  {cell:>13}" for cell in cells)
        for name, cells in rows.items()
    ]


def comparisons(summary: dict) -> list[str]:
    """A line per sampler and score with a sign for each baseline and noise."""
    stds = list(summary["noisy"])
    blocks = [f"{baseline:<{6 * len(stds)}}" for baseline in summary["compared"]]
    noise = "".join(f"{std:>6}" for std in stds)
    lines = [
        f"{'against':<24}" + "  ".join(blocks),
        f"{'noise':<22}" + "  ".join([noise] * len(blocks)),
    ]
    for row in SAMPLERS:
        for score in SCORES:
            signs = [
                "".join(f"{SIGNS[rows[row][score][std]]:>6}" for std in stds)
                for rows in summary["compared"].values()
            ]
            lines.append(f"{row:<12}{TITLES[score]:<10}" + "  ".join(signs))
    return [line.rstrip() for line in lines]


def losses(summary: dict) -> list[str]:
    """Where a sampler does not win: sentences from the comparisons. A level accuracy is no loss."""
    lines = []
    for baseline, rows in summary["compared"].items():
        for row, by_score in rows.items():
            for score, found in by_score.items():
                places = {word: [s for s in found if found[s] == word] for word in _lost(score)}
                said = [f"{word} at noise {', '.join(at)}" for word, at in places.items() if at]
                if said:
                    lines.append(f"{row} against {baseline}, {TITLES[score]}: {'; '.join(said)}.")
    for baseline, rows in summary["unseen_compared"].items():
        for row, found in rows.items():
            said = [f"{UNSEEN[k]} {word}" for k, word in found.items() if word in _lost(k)]
            if said:
                lines.append(f"{row} against {baseline}, unseen classes: {', '.join(said)}.")
    return lines


def _lost(score: str) -> tuple[str, ...]:
    return ("worse",) if score == "accuracy" else ("worse", "level")


def text(summary: dict, settings: Settings) -> str:
    """The report for a terminal."""
    lines = [
        f"Digits: {settings.num_train} training images, batch {settings.train_batch_size}, "
        f"seeds: {settings.num_seeds}, replicas: {settings.num_samples}; mean ± standard error.",
        f"Fitted temperature {_cell(summary['temperature'])}.",
    ]
    for std, rows in summary["noisy"].items():
        cells = {row: [_cell(found[k]) for k in SCORES] for row, found in rows.items()}
        lines += ["", f"Pixel noise {std}", *_table(cells, list(TITLES.values()))]
    alone = settings.num_seeds == 1
    if not alone:
        said = "+ better, - worse, = within two standard errors"
        lines += ["", f"Paired over {settings.num_seeds} seeds: {said}", *comparisons(summary)]
    cells = {row: [_cell(found[k]) for k in UNSEEN] for row, found in summary["unseen"].items()}
    known = settings.known_classes
    lines += [
        "",
        f"Unseen classes: trained on 0 to {known - 1}, shown {known} to 9 (entropy H, mutual information MI "
        "in nats; AUROC of telling them apart)",
        *_table(cells, list(UNSEEN.values())),
        "",
    ]
    if alone:
        lines.append("One seed: nothing to compare.")
    else:
        lines.append("Where sampling does not win:")
        lines += [f"  {line}" for line in losses(summary) or ["nowhere in this table."]]
    return "\n".join(lines)


def write(folder, units: dict, settings: Settings) -> dict:
    """Draw the figures, write results.json (the summary, the settings, the machine)
    and return it."""
    results = {
        **summarise(units, settings),
        "curve": units["curve"],
        "settings": asdict(settings),
        "environment": environment(),
        "figures": figures(units, settings, folder),
    }
    write_json(Path(folder) / "results.json", results)
    return results


def figures(units: dict, settings: Settings, folder) -> list[str]:
    """Draw the three figures into `folder` as PNG files and return their names."""
    drawn = {
        "verdict.png": verdict_figure(units["verdict"]),
        "batch_size.png": curve_figure(units["curve"], settings),
        "entropy_cdf.png": entropy_figure(units["entropies"], settings),
    }
    return save_figures(folder, drawn)


def verdict_figure(unit: dict):
    known = {"clean": unit["clean"], "truth": unit["truth"]}
    return plots.verdict(unit["image"], unit["plug_in"], unit["replicas"], **known).figure


def curve_figure(curve: dict, settings: Settings):
    names = {"clean": "clean images", "noisy": f"noise {settings.curve_noise_std}"}
    return plots.information_and_nll(
        settings.curve_batch_sizes,
        {title: curve[key]["mutual_information"] for key, title in names.items()},
        {title: curve[key]["nll"] for key, title in names.items()},
        levels={title: curve[key]["plug_in_nll"] for key, title in names.items()},
        marks={settings.train_batch_size: "training", settings.num_train: "= N"},
    ).figure


def entropy_figure(unit: dict, settings: Settings):
    known = settings.known_classes
    titles = {
        "seen": f"classes 0–{known - 1}, trained on",
        "unseen": f"classes {known}–9, never seen",
    }
    colors = {"seen": plots.BLUE, "unseen": plots.ORANGE}
    curves, styles = {}, {}
    for name, title in titles.items():
        for row, line in ((PLUG_IN, "--"), ("MCBN (bank)", "-")):
            label = f"{title}: {row}"
            curves[label] = unit[name][row]
            styles[label] = {"color": colors[name], "linestyle": line}
    return plots.entropy_cdf(curves, num_classes=known, styles=styles).figure
