"""Ninety fully connected layers, with and without batch norm: which of them train."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean

import torch
from torch import nn
from torch.nn import functional

from .. import data, metrics, plots
from ..data.idx import SOURCE
from ..data.parts import check_classes
from ..experiments.store import save_figures
from ..plots.canvas import legend_outside, new_figure
from ..restore import preserved_rng
from .results import Estimate, Report, Table, Unit, required_folder

TITLE = "Ninety fully connected layers with and without batch norm (Atanov et al. 2018, FC90)"
WITHOUT_DATA = "digits"
CLASSES = 10
SMOOTHED = 20  # steps
NORMS = {"bn": "with BN", "plain": "without BN"}
INITS = {"torch": "torch's initialisation", "kept": "variance kept"}
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
ARGUMENTS = ("norm", "activation", "init", "run")  # of a unit


@dataclass(frozen=True)
class Settings:
    """The slides name the depth, "fail" without and "success" with batch norm;
    the rest is chosen here.

    `inits`: "torch" is torch's own, which shrinks the signal from layer to layer; "kept" keeps the
    variance of the signal (He for ReLU, Glorot for tanh). Each network is trained with each rate,
    and the rate with the least training loss is shown. Quick has fewer runs, rates and steps.
    """

    num_layers: int = 90
    width: int = 64
    activations: tuple[str, ...] = ("tanh", "relu")
    inits: tuple[str, ...] = ("torch", "kept")
    learning_rates: tuple[float, ...] = (3e-3, 1e-3, 3e-4, 1e-4)
    batch_size: int = 128
    steps: int = 4000
    num_runs: int = 5
    seed: int = 0


QUICK, FULL = Settings(learning_rates=(1e-3, 1e-4), steps=800, num_runs=2), Settings()


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    return [
        Unit(unit_name(kind, run), dict(zip(ARGUMENTS, (*kind, run), strict=True)))
        for run in range(settings.num_runs)
        for kind in kinds(settings)
    ]


def kinds(settings: Settings) -> list[tuple[str, str, str]]:
    """(norm, activation, init) of the networks, in the order of the table."""
    return [(n, a, i) for a in settings.activations for i in settings.inits for n in NORMS]


def unit_name(kind: tuple[str, str, str], run: int) -> str:
    return f"{'-'.join(kind)}-{run}"


def load(data_root: str | None, seed: int) -> data.Split:
    """MNIST of the folder `mnist` in `data_root`, else scikit-learn's digits."""
    if data_root is None:
        return data.digits(num_train=1200, num_validation=297, seed=seed)
    split = data.mnist(_folder(data_root))
    check_classes("reproduce", split, CLASSES)
    return split


def _folder(data_root: str) -> Path:
    return required_folder("deep", data_root, "mnist", SOURCE)


def sources(settings: Settings, data_root: str) -> list[Path]:
    return [_folder(data_root)]


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """The rate with the least loss over the last steps of training: its losses, accuracy,
    gradients."""
    arguments = dict(unit.arguments)
    seed = settings.seed + arguments.pop("run")
    split = load(data_root, seed)
    tried = {}
    with preserved_rng():
        for rate in settings.learning_rates:
            torch.manual_seed(seed)
            network = make_network(split.train.x.shape[1], settings, **arguments)
            tried[rate] = train(network, split.train, rate, settings), network
    # A loss that is not a number is the largest.
    last = {rate: final_loss(losses) for rate, ((losses, _), _) in tried.items()}
    rate = min(last, key=lambda rate: (math.isnan(last[rate]), last[rate]))
    (losses, ratio), network = tried[rate]
    with torch.no_grad():
        probs = network.eval()(split.test.x).softmax(1)
    return {
        "learning_rate": rate,
        "losses": losses,
        "final_loss": last[rate],
        "accuracy": metrics.accuracy(probs, split.test.y).item(),
        "gradient_ratio": ratio,
    }


def make_network(
    inputs: int, settings: Settings, norm: str, activation: str, init: str
) -> nn.Sequential:
    """num_layers linear layers, all but the last with batch norm (or none) and an activation."""
    layers = []
    for _ in range(settings.num_layers - 1):
        linear = nn.Linear(inputs, settings.width, bias=norm == "plain")
        if init == "kept":
            keep_variance(linear, activation)
        layers.append(linear)
        if norm == "bn":
            layers.append(nn.BatchNorm1d(settings.width))
        layers.append(ACTIVATIONS[activation]())
        inputs = settings.width
    return nn.Sequential(*layers, nn.Linear(inputs, CLASSES))


def keep_variance(linear: nn.Linear, activation: str) -> None:
    """He's initialisation for ReLU, Glorot's for tanh; biases 0."""
    if activation == "relu":
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    else:
        nn.init.xavier_normal_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def train(
    network: nn.Sequential, part: data.Part, rate: float, settings: Settings
) -> tuple[list[float], float]:
    """Adam; the loss of every step, and the `gradient_ratio` before the first."""
    network.train()
    optimizer = torch.optim.Adam(network.parameters(), rate, fused=True)
    losses = []
    for _ in range(settings.steps):
        rows = torch.randint(len(part.x), (settings.batch_size,))
        loss = functional.cross_entropy(network(part.x[rows]), part.y[rows])
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            ratio = gradient_ratio(network)
        optimizer.step()
        losses.append(loss.item())
    return losses, ratio


def gradient_ratio(network: nn.Sequential) -> float:
    """Norm of the gradient by the second layer's weights over that by the last hidden layer's."""
    hidden = [m.weight.grad for m in network if isinstance(m, nn.Linear)][1:-1]
    first, last = (grad.double().norm().item() for grad in (hidden[0], hidden[-1]))
    return first / last if last else math.nan


def final_loss(losses: list[float]) -> float:
    """Mean of the last tenth of the steps."""
    return fmean(losses[-max(len(losses) // 10, 1) :])


def report(results: dict[str, dict], settings: Settings, folder: Path) -> Report:
    """A row for each kind of network, and the training losses of the first run."""
    found = {
        kind: [results[unit_name(kind, run)] for run in range(settings.num_runs)]
        for kind in kinds(settings)
    }
    columns = ["activation", "initialisation", "batch norm", "training loss", "test accuracy"]
    columns += ["gradient norm, second layer over last hidden layer", "learning rate"]
    rows = [row(key, runs) for key, runs in found.items()]
    title = f"The last tenth of {settings.steps} steps: mean ± standard error over {settings.num_runs} runs"
    figures = save_figures(folder, {"deep.png": draw(found, settings)})
    return Report([Table("deep", title, columns, rows)], figures, remarks(found, settings))


def row(key: tuple[str, str, str], runs: list[dict]) -> list:
    norm, activation, init = key
    rates = ", ".join(f"{rate:g}" for rate in sorted({r["learning_rate"] for r in runs}))
    loss = Estimate.of(r["final_loss"] for r in runs)
    accuracy = Estimate.of(r["accuracy"] for r in runs)
    return [activation, INITS[init], NORMS[norm], loss, accuracy, mean_ratio(runs), rates]


def draw(found: dict, settings: Settings):
    """A panel for each activation."""
    figure = new_figure(4.6 * len(settings.activations), 3.8)
    ylabel = "training loss, first run (nats)"
    panels = figure.subplots(1, len(settings.activations), sharey=True, squeeze=False)[0]
    for ax, activation in zip(panels, settings.activations, strict=True):
        curves = {
            f"{NORMS[norm]}, {INITS[init]}": smoothed(runs[0]["losses"])
            for (norm, kind, init), runs in found.items()
            if kind == activation
        }
        levels = {f"chance, log {CLASSES}": math.log(CLASSES)}
        plots.error_over_epochs(curves, levels=levels, ylabel=ylabel, ax=ax)
        ax.set(
            xlabel=f"step (means over {SMOOTHED})",
            title=f"{settings.num_layers} layers, {activation}",
        )
        ax.label_outer()
    legend_outside(panels, "lower", ncols=2)
    return figure


def smoothed(losses: list[float]) -> list[float]:
    """Mean of each loss and the ones before it, `SMOOTHED` at the most."""
    return [fmean(losses[max(0, i - SMOOTHED) : i]) for i in range(1, len(losses) + 1)]


def remarks(found: dict, settings: Settings) -> list[str]:
    """Which networks train: those whose loss ends below nine tenths of chance in every run."""
    trained = {True: [], False: []}
    for (norm, activation, init), runs in found.items():
        good = all(run["final_loss"] < 0.9 * math.log(CLASSES) for run in runs)
        trained[good].append(f"{activation}, {INITS[init]}, {NORMS[norm]}")
    text = [
        "The slides say that the network fails without and succeeds with batch norm.",
        "All runs end below nine tenths of the loss of chance: " + listed(trained[True]),
        "Not all do: " + listed(trained[False]),
    ]
    for activation in settings.activations:
        runs = [r for key, some in found.items() if key[:2] == ("bn", activation) for r in some]
        factor = mean_ratio(runs) ** (1 / (settings.num_layers - 3))
        theory = "; for wide layers theory has 1.21 (Yang et al. 2019)" * (activation == "relu")
        text.append(
            f"Before the first step of {activation} with batch norm the gradient grows by a factor of {factor:.2f} a "
            f"layer on its way back{theory}."
        )
    return text


def listed(names: list[str]) -> str:
    return ("; ".join(names) or "none") + "."


def mean_ratio(runs: list[dict]) -> float:
    """Geometric mean of the runs' gradient ratios; 0 where a gradient is 0 or not a number."""
    ratios = [run["gradient_ratio"] for run in runs]
    return geometric_mean(ratios) if all(ratio > 0 for ratio in ratios) else 0.0
