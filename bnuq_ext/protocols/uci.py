"""`bnuq reproduce uci`: MCBN and MCDO on regression tables, against a constant variance
(Teye et al. 2018)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import data, metrics
from ..data import Part
from ..ops.checks import refuse
from .results import Unit
from .uci_report import report as report
from .uci_search import (
    METHODS,
    Found,
    Regression,
    Scaled,
    check_targets,
    fit_split,
    num_train,
    plain_mean,
    replicas,
)

TITLE = "UCI regression: normalised CRPS and PLL (Teye et al. 2018, Tables 1 and 4 to 7)"
WITHOUT_DATA = "diabetes"


@dataclass(frozen=True)
class Settings(Regression):
    """The paper's protocol. QUICK uses 3 of the 5 folds, 3 batch sizes, 3 weight decays, 3 dropout
    rates, and trains a network at most 1,000 epochs and on at most 800,000 rows
    (protein: 27 epochs)."""


FULL = Settings()
QUICK = Settings(
    folds_used=3,
    batch_sizes=(32, 128, 512),
    weight_decays=(1e-2, 1e-4, 1e-6),
    dropout_rates=(0.1, 0.05, 0.005),
    max_epochs=1000,
    max_rows=800_000,
    patience=5,
)


def tables_at(data_root: str | None) -> dict[str, Path | None]:
    """name -> file of the data sets; scikit-learn's diabetes without a data root.

    Args:
        data_root: a folder with uci/*.npz, a folder of npz or csv files, or one such file.
    """
    if data_root is None:
        return {"diabetes": None}
    root = Path(data_root)
    if root.is_file():
        return {_name_of(root) or root.stem: root}
    folder = root / "uci" if (root / "uci").is_dir() else root
    found = {}
    for path in sorted(folder.glob("*")):
        name = _name_of(path)
        if name in found:
            refuse("uci", "data_root", f"hold one table {name}", [found[name].name, path.name])
        if name is not None:
            found[name] = path
    if not found:
        requirement = (
            f"hold npz files with X and y or csv files, as those of {data.array_files.UCI}"
        )
        refuse("uci", "data_root", requirement, str(folder))
    return found


def _name_of(path: Path) -> str | None:
    """The data set's name, of an npz (npz.xz too) or csv file; in UTF-8, as a path need not be."""
    parts = re.fullmatch(r"(.+)\.(npz|npz\.xz|csv)", path.name, re.IGNORECASE)
    return parts and parts[1].encode(errors="backslashreplace").decode()


def load(data_root: str | None, name: str) -> Part:
    path = tables_at(data_root)[name]
    return data.diabetes() if path is None else data.table(path)


def by_size(data_root: str | None) -> dict[str, Part]:
    """The data sets by name, the largest first: the work is then shared evenly."""
    parts = {name: load(data_root, name) for name in tables_at(data_root)}
    return dict(sorted(parts.items(), key=lambda item: -len(item[1].y)))


def check_tables(
    op: str, data_root: str | None, parts: dict[str, Part], settings: Regression
) -> None:
    """`check_targets` of these data sets; messages name their files."""
    paths = tables_at(data_root)
    for name, part in parts.items():
        check_targets(op, str(paths[name] or name), part, settings)


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    parts, least = by_size(data_root), settings.num_folds
    for name, part in parts.items():
        if (rows := num_train(len(part.y))) < least:
            path = str(tables_at(data_root)[name])
            refuse("uci", path, f"have at least {least} training rows, 80 % of all", rows)
    check_tables("uci", data_root, parts, settings)
    return [
        Unit(f"{name}-{method}-{split}", {"data": name, "method": method, "split": split})
        for name in parts
        for method in METHODS
        for split in range(1, settings.num_splits + 1)
    ]


def sources(settings: Settings, data_root: str) -> list[Path]:
    return list(tables_at(data_root).values())


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """One split of a data set with one method: the choice, the noise,
    and the scores of each seed."""
    name, method, split = (unit.arguments[key] for key in ("data", "method", "split"))
    part = load(data_root, name)
    found, scaled, networks = fit_split(part, split, method, settings)
    result = {"choice": found.choice._asdict(), "rows": len(part.y), "features": part.x.shape[1]}
    return result | scores(found, networks, scaled, settings, points=split == 1)


def scores(
    found: Found, networks: dict[int, nn.Sequential], scaled: Scaled, settings, points=False
) -> dict:
    """The noise by the CRPS of the held-out folds, and the test scores of each network.

    Args:
        networks: by the seeds of their replicas.
        points: whether the first network's predictive means,
            standard deviations and targets are wanted.
    """
    num_samples = settings.num_samples
    noise = fit_noise(found, num_samples, settings.least_noise * scaled.y_std**2)
    runs = []
    result = noise._asdict() | {"runs": runs}
    for seed, net in networks.items():
        samples = replicas(net, scaled, found.choice, num_samples, seed)
        run = run_scores(samples, scaled.test_y, noise.noise_var, noise.constant_var)
        plain = plain_mean(net, scaled)
        runs.append(run | {"plain_rmse": metrics.rmse(plain, scaled.test_y).item()})
        if points and len(runs) == 1:
            var, mean = torch.var_mean(samples, 0, correction=0)
            values = {"mean": mean, "std": (var + noise.noise_var).sqrt(), "y": scaled.test_y}
            result["points"] = {
                k: [float(f"{v:.6g}") for v in t.tolist()] for k, t in values.items()
            }
    return result


class Noise(NamedTuple):
    """What the held-out rows of the folds tell about the noise.

    Attributes:
        noise_var: beside the variance of the replicas, by CRPS, not below the bound.
        constant_var: of the same mean without replicas, by CRPS.
        held_out_pll: with `noise_var`.
        unbounded_pll: with the noise variance that CRPS alone would take;
            the same unless the bound held.
    """

    noise_var: float
    constant_var: float
    held_out_pll: float
    unbounded_pll: float


def fit_noise(found: Found, num_samples: int, least_var: float) -> Noise:
    parts = [
        replicas(net, fold, found.choice, num_samples, k)
        for k, (net, fold) in enumerate(zip(found.networks, found.folds, strict=True))
    ]
    samples, y = torch.cat(parts, 1), torch.cat([fold.test_y for fold in found.folds])
    constant = metrics.fit_constant_variance(samples.mean(0), y, score="crps")
    unbounded = metrics.fit_noise_variance(samples, y, score="crps")
    noise = max(unbounded, least_var)
    plls = [metrics.gaussian_pll(samples, y, v).item() for v in (noise, unbounded)]
    return Noise(noise, constant, *plls)


def run_scores(
    samples: Tensor, y: Tensor, noise_var: float, constant_var: float
) -> dict[str, float]:
    """Scores of (T, m) replicas beside those of the constant variance and of the best one
    of each point."""
    var, mean = torch.var_mean(samples, 0, correction=0)
    crps = {
        "crps": metrics.gaussian_crps(mean, (var + noise_var).sqrt(), y),
        "constant_crps": metrics.gaussian_crps(mean, constant_var**0.5, y),
        "best_crps": metrics.best_crps(mean, y),
    }
    pll = {
        "pll": metrics.gaussian_pll(samples, y, noise_var),
        "constant_pll": metrics.gaussian_pll(mean[None], y, constant_var),
        "best_pll": metrics.best_pll(mean, y),
    }
    return {k: v.item() for k, v in (crps | pll).items()} | {
        "normalised_crps": metrics.normalised_score(*crps.values()).item(),
        "normalised_pll": metrics.normalised_score(*pll.values()).item(),
        "rmse": metrics.rmse(mean, y).item(),
    }
