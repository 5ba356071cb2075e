"""What the runs of `bbb` show: the printed tables, pruning, the figures; beside the numbers of A.
Singh's report."""

from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from .. import data, plots, posterior_summary, prune
from ..environment import environment
from ..plots.canvas import COLORS
from .bbb import PRIORS, Settings, State, error, make_network
from .store import save_figures, write_json

CUTS = (0.0, 0.25, 0.5, 0.75, 0.95)
RANKINGS = {"magnitude": "naive", "snr": "SNR"}
# The report's, on MNIST: test error in % by pruned fraction (its table 1),
# seconds an epoch by hidden units (P100).
REPORTED = {
    "magnitude": dict(zip(CUTS, (2.03, 2.41, 5.33, 30.67, 63.11), strict=True)),
    "snr": dict(zip(CUTS, (2.03, 2.59, 5.89, 41.05, 82.50), strict=True)),
}
REPORTED_SECONDS = {400: 23, 1200: 47}
REPORTED_ERROR = 1.69
REPORTED_SAMPLES = 2
# The network of the report's whole pruning table.
REPORTED_PRUNED = "report: MNIST, mixture, scaling 126"
# Test images of each digit; Fashion-MNIST, as large, has 1,000 of each class.
MNIST_COUNTS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
# By prior, so that one has the same in the figures of every run.
PRIOR_COLORS = dict(zip(PRIORS, COLORS, strict=False))


def is_comparable(split: data.Split, settings: Settings) -> bool:
    """Whether the report's numbers may stand beside: of MNIST, by its test labels,
    with its units and samples."""
    mnist = torch.bincount(split.test.y).tolist() == MNIST_COUNTS
    known = settings.hidden in REPORTED_SECONDS and settings.num_samples == REPORTED_SAMPLES
    return mnist and known


def pruned_errors(
    network, test: data.Part, settings: Settings, number: int
) -> dict[str, dict[str, float]]:
    """Test error by ranking and pruned fraction, all by draw `number`;
    the network is left unpruned."""
    result = {}
    for by in RANKINGS:
        result[by] = {}
        for cut in CUTS:
            prune(network, cut, by=by)
            result[by][str(cut)] = error(network, test, settings, number)
    prune(network, 0.0)
    return result


def summarise(state: State, split: data.Split, settings: Settings) -> dict:
    """Of one prior: the epoch with the least validation error, its errors, the median
    times, the pruned errors."""
    log, best = state.log, state.log[state.best_epoch - 1]
    return {
        "epochs": len(log),
        "best_epoch": state.best_epoch,
        "validation_error": best["validation_error"],
        "test_error": best["test_error"],
        "final_test_error": log[-1]["test_error"],
        # Medians: the first epoch of a process starts torch's threads, and its optimiser.
        "seconds_per_epoch": median(e["seconds"] for e in log),
        "test_seconds_per_epoch": median(e["test_seconds"] for e in log),
        "pruned": pruned_errors(state.load_best(), split.test, settings, state.best_epoch - 1),
        "log": log,
    }


def write(folder, split: data.Split, states: dict[str, State], settings: Settings) -> dict:
    """Draw the figures, write results.json (the summaries, the settings, the machine)
    and return it."""
    results = {
        "runs": {name: summarise(state, split, settings) for name, state in states.items()},
        "images": [len(part.x) for part in split],
        "pixels": split.train.x.shape[1],
        "comparable": is_comparable(split, settings),
        "settings": asdict(settings),
        "threads": torch.get_num_threads(),
        "environment": environment(),
        "figures": figures(folder, split, states, settings),
    }
    write_json(Path(folder) / "results.json", results)
    return results


def text(results: dict) -> str:
    """The report for a terminal."""
    settings, runs = results["settings"], results["runs"]
    train, validation, test = results["images"]
    h = settings["hidden"]
    lines = [
        f"{results['pixels']}-{h}-{h}-10 on {train} images ({validation} to validate, {test} to test), SGD "
        f"{settings['learning_rate']:g}, batch {settings['batch_size']}, {settings['num_samples']} samples a "
        f"step, KL weights {settings['scheme']}, scaling {settings['scaling']}, seed {settings['seed']}.",
        f"Errors: of the mean prediction of {settings['test_samples'] + 1} networks, "
        f"{settings['test_samples']} samples and the posterior mean. Best: the least validation error.",
        "",
        f"{'prior':<16} {'epochs':>7} {'best':>5} {'validation':>11} {'test':>7} {'last test':>10} "
        f"{'s an epoch':>11}",
    ]
    for name, run in runs.items():
        lines.append(
            f"{name:<16} {run['epochs']:>7} {run['best_epoch']:>5} {run['validation_error']:>11.2%} "
            f"{run['test_error']:>7.2%} {run['final_test_error']:>10.2%} {run['seconds_per_epoch']:>11.2f}"
        )
    comparable = results["comparable"]
    if comparable:
        lines.append(reported_line(h))
    beside = f" ({REPORTED_PRUNED})" if comparable else ""
    for name, run in runs.items():
        lines += [
            "",
            f"Pruned by global rank, {name}, test error [%]{beside}",
            *pruning_lines(run["pruned"], reported=comparable),
        ]
    return "\n".join(lines)


def reported_line(hidden: int) -> str:
    """What the report says of a network with 400 or 1200 hidden units."""
    return (
        f"{'report (MNIST)':<16} {600:>7} {'':>5} {'':>11} {REPORTED_ERROR / 100:>7.2%} {'':>10} "
        f"{REPORTED_SECONDS[hidden]:>11} on a P100; error with the Gaussian prior"
    )


def pruning_lines(pruned: dict[str, dict[str, float]], reported: bool) -> list[str]:
    """Errors by pruned fraction; `reported`: the report's beside them."""
    beside = f"   {'report: naive':>13} {'SNR':>8}" if reported else ""
    lines = [f"{'pruned':>7} {'naive':>8} {'SNR':>8}{beside}"]
    for cut in CUTS:
        ours = " ".join(f"{100 * pruned[by][str(cut)]:>8.2f}" for by in RANKINGS)
        naive, snr = (REPORTED[by][cut] for by in RANKINGS)
        theirs = f"   {naive:>13.2f} {snr:>8.2f}" if reported else ""
        lines.append(f"{cut:>7.0%} {ours}{theirs}")
    return lines


def figures(folder, split: data.Split, states: dict[str, State], settings: Settings) -> list[str]:
    """Draw the figures into `folder` as PNG files and return their names."""
    initial = make_network(settings, split.train.x.shape[1], PRIORS["gaussian"])
    networks = {name: state.load_best() for name, state in states.items()}
    drawn = {
        "test_error.png": error_figure(states, split, settings),
        "weights.png": plots.weight_histograms(
            {f"prior {name}": means(network) for name, network in networks.items()},
            initial=means(initial),
            colors={f"prior {name}": PRIOR_COLORS[name] for name in networks},
        ).figure,
    }
    for name, network in networks.items():
        drawn[f"snr-{name}.png"] = plots.signal_to_noise(posterior_summary(network).snr).figure
    return save_figures(folder, drawn)


def error_figure(states: dict[str, State], split: data.Split, settings: Settings):
    label = f"report, Gaussian prior, 600 epochs: {REPORTED_ERROR} %"
    ax = plots.error_over_epochs(
        {name: [100 * e["test_error"] for e in state.log] for name, state in states.items()},
        best={name: state.best_epoch for name, state in states.items()},
        levels={label: REPORTED_ERROR} if is_comparable(split, settings) else None,
        colors=PRIOR_COLORS,
    )
    ax.set_xlabel("epoch (dots: least validation error)")
    return ax.figure


def means(network) -> torch.Tensor:
    """The posterior means of all weights, without biases: (W,)."""
    layers = (m for m in network if hasattr(m, "weight_mu"))
    return torch.cat([m.weight_mu.detach().flatten() for m in layers])
