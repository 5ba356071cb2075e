"""Training the grid of `bnuq reproduce uci --quick`, and T = 500 predictions over the test sets."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from bnuq_ext import collect, convert, predict
from bnuq_ext.protocols.stacked import Network, Stack, Training, plain_network
from bnuq_ext.protocols.uci import QUICK
from bnuq_ext.protocols.uci_search import METHODS, ROWS, stacks
from bnuq_ext.restore import one_thread

from .timing import FULL, compare, record

# name: rows of a fold's training part, rows of a test part, features
SETS = {
    "boston": (324, 101, 13),
    "concrete": (660, 206, 8),
    "energy": (492, 154, 8),
    "power": (6124, 1914, 4),
    "protein": (29268, 9146, 9),
    "wine": (1024, 320, 11),
}
SHARE = 390  # of the rows that a network of the grid sees at most, one in so many


def in_turn(works: list):
    def run():
        for work in works:
            work()

    return run


def data_of(name: str):
    """As many rows for one epoch as a share of a network's training sees,
    in whole batches of every size."""
    rows, _, features = SETS[name]
    batch_size = max(size for size, _ in grid_networks(name))
    count = round(QUICK.epochs(rows) * rows / SHARE / batch_size) * batch_size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, features, generator=generator)
    return x, x.sum(1) + torch.randn(len(x), generator=generator)


def width(name: str) -> int:
    return QUICK.width(SETS[name][0])


def grid_networks(name: str) -> list[tuple[int, list[Network]]]:
    """(batch size, networks) of each stack of the quick grid, both methods."""
    rows = SETS[name][0]
    return [
        (
            part[0].batch_size,
            [Network(f, c.weight_decay, c.dropout) for c in part for f in range(QUICK.folds_used)],
        )
        for method in METHODS
        for part in stacks(method, QUICK, rows, width(name))
    ]


def stacked(name: str):
    """An epoch of every network, stack after stack."""
    x, y = data_of(name)
    trainings = []
    for batch_size, networks in grid_networks(name):
        stack, S = Stack(networks, x.shape[1], width(name)), len(networks)
        trainings.append(Training(stack, x.repeat(S, 1, 1), y.repeat(S, 1), batch_size))

    return in_turn([partial(training.run, 1) for training in trainings])


def plain_epoch(network: Network, x, y, batch_size: int, hidden: int):
    """An epoch of one network by autograd and the fused Adam."""
    model = plain_network(x.shape[1], hidden, network.dropout).train()
    weights = [m.weight for m in model if isinstance(m, nn.Linear)]
    others = [p for p in model.parameters() if all(p is not w for w in weights)]
    groups = [{"params": weights, "weight_decay": network.weight_decay}, {"params": others}]
    optimizer = torch.optim.Adam(groups, 1e-3, fused=True)
    rng = np.random.default_rng(network.seed)

    def epoch():
        order = torch.from_numpy(rng.permutation(len(x)))
        for rows in order[: len(x) // batch_size * batch_size].split(batch_size):
            optimizer.zero_grad()
            (0.5 * (model(x[rows]).squeeze(1) - y[rows]).square().mean()).backward()
            optimizer.step()

    return epoch


def one_after_another(name: str):
    x, y = data_of(name)
    epochs = [
        plain_epoch(network, x, y, batch_size, width(name))
        for batch_size, networks in grid_networks(name)
        for network in networks
    ]
    return in_turn(epochs)


GRIDS = {name: [name] for name in (SETS if FULL else ["boston"])}
if FULL:
    GRIDS["all six sets"] = list(SETS)


@pytest.mark.parametrize("label", GRIDS)
def test_training_the_quick_grid(benchmark, label):
    """A share of the work of the grid of one split;
    stopping early saves both sides the same epochs."""
    names = GRIDS[label]
    with one_thread():
        makes = {"ours": stacked, "one after another": one_after_another}
        cases = {key: in_turn([make(name) for name in names]) for key, make in makes.items()}
        times = compare(cases, rounds=5, sample_ms=50, seconds=20 if FULL else 3)
        count = sum(len(networks) for name in names for _, networks in grid_networks(name))
        text = f"1/{SHARE} of training the quick grid, {count} networks, {label}"
        record(benchmark, text, times, target={"one after another": 5.0})
        benchmark.pedantic(cases["ours"], rounds=3)


@pytest.mark.parametrize("name", ["boston", "power"] + ["protein"] * FULL)
def test_predictions(benchmark, name):
    """500 replicas over a test part; the aim is a second, 1.5 on protein."""
    _, rows, features = SETS[name]
    torch.manual_seed(0)
    model = convert(plain_network(features, width(name)).eval())
    collect(model, torch.randn(500, 32, features).unbind(), 500, progress=False)
    x = torch.randn(rows, features)
    options = {"likelihood": "gaussian", "num_samples": 500, "seed": 0, "keep_samples": True}
    cases = {
        "ours": lambda: predict(model, [*x.split(ROWS)], **options),
        "one after another": lambda: predict(model, x, strategy="loop", **options),
    }
    folded, looped = (case().samples for case in cases.values())
    torch.testing.assert_close(folded, looped, rtol=1e-4, atol=1e-5)
    times = compare(cases, rounds=7, seconds=15 if FULL else 3)
    record(benchmark, f"500 predictions of {rows} rows, {name}", times)
    benchmark.pedantic(cases["ours"], rounds=3)
