"""What the regression protocols train: splits, folds, the grid by cross-validated error,
the networks chosen."""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import collect, convert, mc_dropout, predict
from ..data import Part
from ..data.parts import take
from ..ops.checks import refuse
from .stacked import Network, Stack, Training, networks_at_once

METHODS = ("MCBN", "MCDO")
ROWS = 2048  # predicted together, so that a layer of a few replicas stays in the cache


@dataclass(frozen=True)
class Regression:
    """The networks and their choice (Teye et al. 2018, section 4.3, and the authors' code).

    `max_rows` bounds the epochs by the rows that a network sees. `least_noise` is the least noise
    variance over that of the training targets: the authors search tau in a range per data set, and
    the loosest that is known, tau <= 100 for energy, is 1e-4 of its targets' variance.
    It stands for all sets.
    """

    num_splits: int = 5
    num_seeds: int = 5
    num_folds: int = 5
    folds_used: int = 5
    batch_sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    weight_decays: tuple[float, ...] = tuple(10.0**-k for k in range(1, 16))
    dropout_rates: tuple[float, ...] = (0.2, 0.1, 0.05, 0.01, 0.005, 0.001)
    dropout_batch_size: int = 32
    max_epochs: int = 2000
    max_rows: int | None = None
    check_every: int = 20
    patience: int = 10
    num_samples: int = 500
    least_noise: float = 1e-4
    hidden: int = 50
    hidden_large: int = 100
    large_from: int = 20_000

    def width(self, num_rows: int) -> int:
        """H: the paper gives protein alone the wider network."""
        return self.hidden_large if num_rows >= self.large_from else self.hidden

    def epochs(self, num_rows: int) -> int:
        """At most, for so many training rows."""
        most = self.max_epochs if self.max_rows is None else self.max_rows // num_rows
        return max(1, min(self.max_epochs, most))

    def checks(self, num_rows: int) -> int:
        """Epochs between two looks at the validation error."""
        return max(1, min(self.check_every, self.epochs(num_rows) // 10))

    def fold_rows(self, num_rows: int) -> int:
        """Rows that a network of the cross-validation is trained on, of so many in the set."""
        n = num_train(num_rows)
        return n - n // self.num_folds


def num_train(num_rows: int) -> int:
    """Training rows of a split, of so many in the set."""
    return num_rows - round(0.2 * num_rows)


class Scaled(NamedTuple):
    """A training and a test part, normalised by mean and standard deviation of the training part.

    Attributes:
        x, y: (n, Q), (n,) float32.
        test_x: (m, Q) float32.
        test_y: (m,) float64 in the unit of the data.
        y_mean, y_std: f y_std + y_mean is in the unit of the data.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    y_mean: float
    y_std: float


def scale(train: Part, test: Part) -> Scaled:
    std, mean = torch.std_mean(train.x, 0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    y_std, y_mean = (v.item() for v in torch.std_mean(train.y, correction=0))
    x, test_x = (((part.x - mean) / std).float() for part in (train, test))
    return Scaled(x, ((train.y - y_mean) / y_std).float(), test_x, test.y, y_mean, y_std)


def split_of(part: Part, split: int) -> tuple[Part, Part]:
    """(train, test) of the paper's split 1, 2, ...:
    80 % and 20 % of the rows as its code shuffles them."""
    rows = np.arange(len(part.y))
    np.random.RandomState(split).shuffle(rows)
    cut = len(rows) - num_train(len(rows))
    return take(part, rows[cut:]), take(part, rows[:cut])


def rows_of_folds(num_rows: int, settings: Regression) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows (trained on, held out) of the first `folds_used` of the folds; all of one size,
    the rest of the rows is always trained on."""
    rows = np.random.RandomState(1).permutation(num_rows)
    size = num_rows // settings.num_folds
    held_out = [slice(k * size, (k + 1) * size) for k in range(settings.folds_used)]
    return [(np.delete(rows, h), rows[h]) for h in held_out]


def folds_of(train: Part, settings: Regression) -> list[Scaled]:
    rows = rows_of_folds(len(train.y), settings)
    return [scale(take(train, trained), take(train, held_out)) for trained, held_out in rows]


def check_targets(op: str, name: str, part: Part, settings: Regression) -> None:
    """Raises for rows of one target alone that a network would be trained on."""
    for split in range(1, settings.num_splits + 1):
        y = split_of(part, split)[0].y
        parts = {f"split {split}": y}
        for fold, (trained, _) in enumerate(rows_of_folds(len(y), settings), 1):
            parts[f"fold {fold} of split {split}"] = y[trained]
        for where, targets in parts.items():
            # Of equal values the difference is exactly 0, and the deviation need not be.
            if not (targets - targets[0]).std(correction=0) > 0:
                requirement = "have a target of more than one value in the training rows of "
                refuse(op, name, requirement + where, targets[0].item())


class Choice(NamedTuple):
    """A point of the grid with what cross-validation found: epochs and mean RMSE,
    in the data's unit."""

    batch_size: int
    weight_decay: float
    dropout: float | None
    epochs: int = 0
    rmse: float = math.inf


class Found(NamedTuple):
    """The best choice, its network of each fold at the best epoch, and the folds."""

    choice: Choice
    networks: list[nn.Sequential]
    folds: list[Scaled]


def grid(method: str, settings: Regression, num_rows: int) -> list[list[Choice]]:
    """The choices of a method, those of one batch size together; none above the rows of a fold.

    Where a fold is smaller than every batch size, MCBN has batches of half of it,
    and MCDO of all of it.
    """
    if method == "MCDO":
        M = min(settings.dropout_batch_size, num_rows)
        pairs = itertools.product(settings.weight_decays, settings.dropout_rates)
        return [[Choice(M, wd, rate) for wd, rate in pairs]]
    sizes = [M for M in settings.batch_sizes if M <= num_rows] or [num_rows // 2]
    return [[Choice(M, wd, None) for wd in settings.weight_decays] for M in sizes]


def stacks(method: str, settings: Regression, num_rows: int, hidden: int) -> list[list[Choice]]:
    """The grid in parts that are trained together, each of a size that a core's cache holds."""
    parts = []
    for choices in grid(method, settings, num_rows):
        most = max(1, networks_at_once(choices[0].batch_size, hidden) // settings.folds_used)
        parts += [choices[i : i + most] for i in range(0, len(choices), most)]
    return parts


def search(train: Part, method: str, settings: Regression, hidden: int, seed: int) -> Found:
    """The grid by the mean RMSE over the folds of the network without noise, at its best epoch.

    Args:
        train: the training part of a split, in the data's unit.
        method: one of METHODS.
        hidden: units of a hidden layer.
        seed: of the networks; fold k has seed + k, whatever the choice.
    """
    folds = folds_of(train, settings)
    best = None
    for choices in stacks(method, settings, len(folds[0].y), hidden):
        tried, stack = cross_validate(choices, folds, settings, hidden, seed)
        c = min(range(len(tried)), key=lambda i: tried[i].rmse)
        if best is None or tried[c].rmse < best.choice.rmse:
            F = len(folds)
            networks = [stack.network(c * F + f, folds[f].x) for f in range(F)]
            best = Found(tried[c], networks, folds)
    return best


def cross_validate(
    choices: list[Choice], folds: list[Scaled], settings: Regression, hidden: int, seed: int
) -> tuple[list[Choice], Stack]:
    """Trains each choice of one batch size on each fold; all in one stack.

    A choice is given up after `patience` looks without a better mean RMSE.

    Returns:
        the choices with their epochs and RMSE, and the stack at each choice's best epoch: network
        c F + f is that of choice c and fold f.
    """
    C, F, n = len(choices), len(folds), len(folds[0].y)
    networks = [Network(seed + f, c.weight_decay, c.dropout) for c in choices for f in range(F)]
    stack = Stack(networks, folds[0].x.shape[1], hidden)
    x, y, test_x = (
        torch.stack([getattr(fold, name) for fold in folds] * C) for name in ("x", "y", "test_x")
    )
    training = Training(stack, x, y, choices[0].batch_size)
    best, flat = torch.full((C,), math.inf, dtype=torch.float64), stack.flat.clone()
    epochs, alive = torch.zeros(C, dtype=torch.int64), torch.ones(C, dtype=torch.bool)
    every = settings.checks(n)
    for epoch in range(every, settings.epochs(n) + 1, every):
        training.run(every)
        rmse = _rmse(stack.predict(test_x, x).view(C, F, -1), folds)
        better = alive & (rmse < best)
        best, epochs = torch.where(better, rmse, best), torch.where(better, epoch, epochs)
        for name, part in stack.views(flat).items():
            rows = better.repeat_interleave(F)
            part[rows] = stack.parameters[name][rows]
        alive &= epoch - epochs < settings.patience * every
        if not alive.any():
            break
    stack.flat.copy_(flat)
    found = zip(choices, epochs.tolist(), best.tolist(), strict=True)
    return [c._replace(epochs=max(e, 1), rmse=r) for c, e, r in found], stack


def _rmse(outputs: Tensor, folds: list[Scaled]) -> Tensor:
    """(C,) mean over the folds of the root mean squared error, from (C, F, m)
    normalised outputs."""
    errors = [
        (outputs[:, f].double() * fold.y_std + fold.y_mean - fold.test_y).square().mean(1).sqrt()
        for f, fold in enumerate(folds)
    ]
    return torch.stack(errors).mean(0)


def train_final(data: Scaled, choice: Choice, hidden: int, seeds: range) -> list[nn.Sequential]:
    """Networks of a choice, one a seed, trained on all of a training part."""
    networks = [Network(seed, choice.weight_decay, choice.dropout) for seed in seeds]
    stack, S = Stack(networks, data.x.shape[1], hidden), len(seeds)
    x, y = data.x.repeat(S, 1, 1), data.y.repeat(S, 1)
    Training(stack, x, y, choice.batch_size).run(choice.epochs)
    return [stack.network(s, data.x) for s in range(S)]


def fit_split(
    part: Part, split: int, method: str, settings: Regression
) -> tuple[Found, Scaled, dict[int, nn.Sequential]]:
    """The search on a split's training part, its scaled parts,
    and the networks of the choice by their seeds."""
    train, test = split_of(part, split)
    hidden, first = settings.width(len(part.y)), 1000 * split
    found, scaled = search(train, method, settings, hidden, first), scale(train, test)
    seeds = range(first + 500, first + 500 + settings.num_seeds)
    networks = train_final(scaled, found.choice, hidden, seeds)
    return found, scaled, dict(zip(seeds, networks, strict=True))


def replicas(
    net: nn.Sequential, data: Scaled, choice: Choice, num_samples: int, seed: int
) -> Tensor:
    """(T, m) outputs of a network's replicas for the test part, float64 in the data's unit.

    MCBN: each replica has the statistics of a batch of M training rows, drawn without replacement;
    no query is among them. MCDO: each has its own masks.
    """
    options = {"likelihood": "gaussian", "num_samples": num_samples, "seed": seed}
    if choice.dropout is not None:
        pred = mc_dropout(net, data.test_x, keep_samples=True, **options)
    else:
        model, rng = convert(net), np.random.default_rng(seed)
        batches = [
            data.x[rng.choice(len(data.y), choice.batch_size, replace=False, shuffle=False)]
            for _ in range(num_samples)
        ]
        collect(model, batches, num_samples, progress=False)
        pred = predict(model, [*data.test_x.split(ROWS)], keep_samples=True, **options)
    return pred.samples.squeeze(2).double() * data.y_std + data.y_mean


def plain_mean(net: nn.Sequential, data: Scaled) -> Tensor:
    """(m,) outputs of the network without noise, float64 in the data's unit."""
    with torch.no_grad():
        return net(data.test_x).squeeze(1).double() * data.y_std + data.y_mean
