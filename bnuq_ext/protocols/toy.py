"""Regression of one input: a picture of what drawn batch-norm statistics say,
and where they say nothing."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import convert, mc_dropout, metrics, plots, predict
from ..experiments.fitting import batch_norm_chain, collect_random, train_epoch
from ..experiments.store import save_figures
from ..metrics.significance import agrees, mean_and_error
from ..plots.canvas import new_figure
from ..restore import preserved_rng
from .results import Estimate, Report, Table, Unit
from .uci import run_scores

TITLE = "Toy regression (Teye et al. 2018, Figure 1)"
WITHOUT_DATA = "its own data"
METHODS = ("MCBN", "MCDO")
EDGE, GRID = 5.0, 7.0  # inputs of the data, and of the figure
COLUMNS = {
    "rmse": ("RMSE", 3),
    "crps": ("CRPS", 3),
    "constant_crps": ("CRPS, constant", 3),
    "normalised_crps": ("CRPS, normalised (%)", 1),
    "noise_std": ("noise sd, fitted", 2),
    "std_inside": ("epistemic sd, |x| < 5", 2),
    "std_outside": ("epistemic sd, 5 < |x| < 7", 2),
}


@dataclass(frozen=True)
class Settings:
    """The paper gives three hidden layers of 30 units and 500 passes for this figure, and no more.

    Adam with rate 0.001, up to 2,000 epochs, batch size 32 and dropout 0.05 are of its regression
    protocol. The function y = x sin x is of Karpathy's demonstration, which it follows; the noise
    is added here, so that there is something to fit. Quick is the whole.
    """

    num_train: int = 100
    num_validation: int = 100
    num_test: int = 2000
    noise_std: float = 0.3
    width: int = 30
    num_layers: int = 3
    dropout: float = 0.05
    batch_size: int = 32
    epochs: int = 2000
    learning_rate: float = 0.001
    weight_decay: float = 1e-4
    num_samples: int = 500
    num_runs: int = 10
    seed: int = 0


QUICK = FULL = Settings()


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    runs = range(settings.num_runs)
    return [Unit(f"{m}-{run}", {"method": m, "run": run}) for run in runs for m in METHODS]


def sources(settings: Settings, data_root: str) -> list[Path]:
    return []


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """One network of one draw of the data: its scores, and its predictions on a grid."""
    seed = settings.seed + unit.arguments["run"]
    (x, y), (validation_x, validation_y), (test_x, test_y) = make_data(settings, seed)
    scale = Scale(x, y)
    with preserved_rng():
        torch.manual_seed(seed)
        network = make_network(unit.arguments["method"], settings)
        train(network, scale, settings)
        sample = make_sampler(network, unit.arguments["method"], scale, settings, seed)
        validation, test = sample(validation_x), sample(test_x)
        grid = torch.linspace(-GRID, GRID, 281)
        on_grid = sample(grid)
    noise_var = metrics.fit_noise_variance(validation, validation_y)
    constant_var = metrics.fit_constant_variance(validation.mean(0), validation_y)
    var, mean = torch.var_mean(on_grid, 0, correction=0)
    inside = grid.abs() <= EDGE
    return {
        "x": x.tolist(),
        "y": y.tolist(),
        "grid": grid.tolist(),
        "mean": mean.tolist(),
        "std": (var + noise_var).sqrt().tolist(),
        "constant_std": constant_var**0.5,
        "noise_std": noise_var**0.5,
        **run_scores(test, test_y, noise_var, constant_var),
        "std_inside": var[inside].mean().sqrt().item(),
        "std_outside": var[~inside].mean().sqrt().item(),
    }


def make_data(settings: Settings, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Training, validation and test part: x (N,) uniform in [-5, 5] and y = x sin x + noise."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for count in (settings.num_train, settings.num_validation, settings.num_test):
        x = EDGE * (2 * torch.rand(count, generator=generator) - 1)
        noise = settings.noise_std * torch.randn(count, generator=generator)
        parts.append((x, x * x.sin() + noise))
    return parts


class Scale:
    """Training data as the network sees it: mean 0 and standard deviation 1."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x_mean, self.x_std, self.y_mean, self.y_std = x.mean(), x.std(), y.mean(), y.std()
        self.x, self.y = self.inputs(x), ((y - self.y_mean) / self.y_std)[:, None]

    def inputs(self, x: Tensor) -> Tensor:
        return ((x - self.x_mean) / self.x_std)[:, None]

    def outputs(self, y: Tensor) -> Tensor:
        return (y * self.y_std + self.y_mean).squeeze(-1)


def make_network(method: str, settings: Settings) -> nn.Sequential:
    """(Linear, BatchNorm1d, ReLU) or (Linear, ReLU, Dropout), three times, and a Linear."""
    widths = [settings.width] * settings.num_layers
    if method == "MCBN":
        return batch_norm_chain(1, widths, 1)
    layers = []
    for i, o in pairwise((1, *widths)):
        layers += [nn.Linear(i, o), nn.ReLU(), nn.Dropout(settings.dropout)]
    return nn.Sequential(*layers, nn.Linear(settings.width, 1))


def train(network: nn.Module, scale: Scale, settings: Settings) -> None:
    """Adam on the squared error."""
    network.train()
    rate, decay = settings.learning_rate, settings.weight_decay
    optimizer = torch.optim.Adam(network.parameters(), rate, weight_decay=decay, fused=True)
    for _ in range(settings.epochs):
        train_epoch(network, optimizer, functional.mse_loss, scale.x, scale.y, settings.batch_size)
    network.eval()


def make_sampler(network: nn.Module, method: str, scale: Scale, settings: Settings, seed: int):
    """A function from x (N,) to the outputs (T, N) of the replicas, in the unit of y."""
    options = {"likelihood": "gaussian", "num_samples": settings.num_samples, "seed": seed}
    predicted_by = mc_dropout
    if method == "MCBN":
        network, predicted_by = convert(network), predict
        collect_random(network, scale.x, settings.num_samples, settings.batch_size)

    def sample(x: Tensor) -> Tensor:
        pred = predicted_by(network, scale.inputs(x), keep_samples=True, **options)
        return scale.outputs(pred.samples)

    return sample


def report(results: dict[str, dict], settings: Settings, folder: Path) -> Report:
    """A row of means over the runs for each method, and the picture of the first run."""
    found = {m: [results[f"{m}-{run}"] for run in range(settings.num_runs)] for m in METHODS}
    rows = [[m, *(_cell(found[m], name) for name in COLUMNS)] for m in METHODS]
    title = (
        f"Held-out points in [-5, 5]: mean ± standard error over {settings.num_runs} draws of data"
    )
    table = Table("toy", title, ["method", *(head for head, _ in COLUMNS.values())], rows)
    figures = save_figures(folder, {"toy.png": draw({m: found[m][0] for m in METHODS})})
    return Report([table], figures, remarks(found, settings))


def _cell(runs: list[dict], name: str) -> str:
    return Estimate.of([run[name] for run in runs], COLUMNS[name][1])


def draw(first: dict[str, dict]):
    """A panel for each method, on one scale."""
    figure = new_figure(5.2 * len(first), 4.2)
    panels = figure.subplots(1, len(first), sharey=True)
    for ax, (method, run) in zip(panels, first.items(), strict=True):
        data, std = (run["x"], run["y"]), run["constant_std"]
        band = run["grid"], run["mean"], run["std"]
        plots.regression_band(*band, data=data, constant_std=std, ax=ax)
        ax.set_title(f"{method}, y = x sin x + noise")
    return figure


def remarks(found: dict[str, list[dict]], settings: Settings) -> list[str]:
    text = ["The paper prints no number for this figure."]
    for method, runs in found.items():
        inside, outside = (
            fmean(r[f"std_{place}"] for r in runs) for place in ("inside", "outside")
        )
        mean, error = mean_and_error([run["normalised_crps"] for run in runs])
        same = agrees(mean, error)
        against = "no different from" if same else "better than" if mean > 0 else "worse than"
        sure = "one run, which has no standard error" if same is None else "two standard errors"
        text.append(
            f"{method}: the drawn spread is {outside / inside:.1f} times as wide outside the data as inside; "
            f"inside, where the noise is the same everywhere, the uncertainty is {against} a constant one by "
            f"CRPS, at {sure}."
        )
    low = {
        method: sum(run["noise_std"] < 0.1 * settings.noise_std for run in runs)
        for method, runs in found.items()
    }
    counts = " and ".join(f"{n} of {settings.num_runs} runs of {m}" for m, n in low.items())
    cause = ": the replicas alone spread too wide already" if any(low.values()) else ""
    text.append(
        f"The noise has standard deviation {settings.noise_std}. In {counts} the fitted one is below a tenth of "
        f"that{cause}."
    )
    return text
