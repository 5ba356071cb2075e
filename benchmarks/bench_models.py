"""Whole networks at T=20: `predict` beside what a user could write in plain PyTorch."""

from contextlib import contextmanager, suppress

import pytest
import torch

import bnuq_ext as bnuq
from bnuq_ext import model_cache

from . import yardsticks
from .memory import peak_extra_bytes
from .models import mlp, resnet18, resnet50
from .timing import DEVICES, FULL, compare, record, seconds_of

# Inductor warns of what it does; a benchmark is no place to stop for it.
pytestmark = pytest.mark.filterwarnings("default")

T = 20
NETWORKS = {
    "MLP 784-4x256-10": (mlp, (784,)),
    "ResNet-18 32x32": (resnet18, (3, 32, 32)),
    "ResNet-50 224x224": (resnet50, (3, 224, 224)),
}
# {network: (rows on a CPU in the short form, in the full form, rows on a GPU)}
ROWS = {
    "MLP 784-4x256-10": ((16, 64), (16, 64, 256, 1024), (16, 256, 1024)),
    "ResNet-18 32x32": ((8,), (8, 32), (1, 32, 256)),
    "ResNet-50 224x224": ((), (1, 2), (1, 32, 256)),
}
PRECISIONS = ("float32", "bfloat16")  # the second is autocast with channels_last images
# Least ratio to the loop on two CPU cores.
TARGET = {("MLP 784-4x256-10", 16): 4.0, ("MLP 784-4x256-10", 64): 2.4}
PLAIN = {
    "loop": yardsticks.loop,
    "vmap": lambda *args: yardsticks.vmapped(*args, chunk=5),
    "folded weights": yardsticks.folded_into_convolutions,
    "batched affine": yardsticks.batched,
    "torch-uncertainty": yardsticks.torch_uncertainty,
}
COMPILED = {
    "compiled loop": yardsticks.compiled_loop,
    "compiled batched": yardsticks.compiled_batched,
}


def cases() -> list:
    rows_of = {"cuda": lambda row: row[2], "cpu": lambda row: row[1] if FULL else row[0]}
    return [
        pytest.param(device, name, rows, precision, id=f"{device}-{name}-{rows}-{precision}")
        for device in DEVICES
        for name, row in ROWS.items()
        for rows in rows_of[device](row)
        for precision in PRECISIONS
        if precision == "float32" or (device == "cuda" and name.startswith("ResNet"))
    ]


def layout_of(name: str, precision: str) -> torch.memory_format:
    images = len(NETWORKS[name][1]) == 3
    last = images and precision == "bfloat16"
    return torch.channels_last if last else torch.contiguous_format


def autocast(device: str, precision: str):
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")


def prepared(device: str, name: str, precision: str = "float32"):
    """The plain network with running statistics of its own,
    and the converted one with a bank of T batches."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    plain = build().to(device, memory_format=layout_of(name, precision))
    # Statistics of smaller images than the timed ones: they only have to be plausible.
    small = (3, 64, 64) if shape == (3, 224, 224) else shape
    batches = torch.randn(T, 8, *small, device=device)
    with torch.no_grad():
        for batch in batches[:10]:
            plain(batch)
    plain.eval()
    model = bnuq.convert(plain)
    bank = bnuq.collect(model, list(batches), num_batches=T, progress=False)
    return plain, model, bank


@contextmanager
def without_tf32():
    """`torch.backends.cudnn.flags` would put its other flags to their defaults,
    cuDNN off among them."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def distance(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest output."""
    assert outputs.shape == expected.shape
    return ((outputs.float() - expected).abs().max() / expected.abs().max()).item()


def right_outputs(plain, tables, x, precision: str) -> tuple[torch.Tensor, float]:
    """The outputs of all replicas in float32, and how far from them another order
    of the arithmetic may be.

    In bfloat16 three times what the loop is off. That is as much as replicas differ: that the right
    thing is computed has the case in float32 to show.
    """
    loop = yardsticks.loop(plain, tables, x)
    with autocast(x.device.type, "float32"):
        expected = loop()
    if precision == "bfloat16":
        return expected, 3 * distance(loop(), expected)
    # Fifty layers round, and the ways in which cuDNN convolves differ more.
    tolerance = 1e-4 if x.device.type == "cpu" else 1e-3
    assert expected.std(0).mean() > 10 * tolerance * expected.abs().max(), "replicas are the same"
    return expected, tolerance


def checked(precision, plain, model, bank, x, wanted) -> tuple[dict, dict]:
    """The yardsticks whose outputs, like those of `predict`, are right in every replica,
    and why others are missing."""
    with without_tf32():
        with suppress(ValueError):  # of a model that does not fold, which is known from then on
            bnuq.predict(model, x, likelihood="categorical", num_samples=T, strategy="folded")
        ours = bnuq.predict(
            model, x, likelihood="categorical", num_samples=T, seed=0, keep_samples=True
        )
        where = ours.snapshots.cpu()
        tables = {
            name: (bank.mean[name][where].to(x.device), bank.var[name][where].to(x.device))
            for name in bank.names
        }
        expected, tolerance = right_outputs(plain, tables, x, precision)
        assert distance(ours.samples, expected) < tolerance
        runs, skipped = {}, {}
        for name, make in wanted.items():
            try:
                run = make(plain, tables, x)
                error = distance(run(), expected)
            except Exception as reason:
                skipped[name] = yardsticks.why(reason)
                continue
            assert error < tolerance, f"{name} is off by {error}, the tolerance is {tolerance}"
            runs[name] = run
        summary = yardsticks.predictive(lambda: ours.samples.float())()
    for actual, expected in zip(
        (ours.mean, ours.variance, ours.entropy, ours.mutual_information), summary, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    return {name: yardsticks.predictive(run) for name, run in runs.items()}, skipped


# Each compilation takes 10 to 60 s, so only some cases of the full form have it.
COMPILED_CASES = {
    *(("cpu", "MLP 784-4x256-10", rows) for rows in (16, 256)),
    ("cpu", "ResNet-18 32x32", 8),
    *(("cuda", name, rows[2][1]) for name, rows in ROWS.items()),
}
# vmap takes twice the time of all the others.
WITHOUT_VMAP = {("cpu", "ResNet-18 32x32", 32), ("cpu", "ResNet-50 224x224", 2)}


def wanted_yardsticks(device: str, name: str, rows: int) -> dict:
    wanted = dict(PLAIN)
    if (device, name, rows) in WITHOUT_VMAP:
        del wanted["vmap"]
    if not FULL and name.startswith("ResNet"):
        # The short form has seconds for it: the two best only, and a package that is installed.
        del wanted["vmap"], wanted["batched affine"]
    if FULL and (device, name, rows) in COMPILED_CASES:
        wanted |= COMPILED
    if device == "cuda":
        wanted["Triton affine"] = yardsticks.triton_batched
    return wanted


def label(device: str, name: str, rows: int) -> str:
    return f"{name}, {rows} rows, T={T}" + (", CUDA" if device == "cuda" else "")


def target(device: str, name: str, rows: int) -> dict[str, float]:
    """Least ratios to the yardsticks: on a CPU predict is never slower than the loop."""
    return {"loop": TARGET.get((name, rows), 1.0)} if device == "cpu" else {}


def ways_of(model) -> list[str]:
    """How `predict` has sent the replicas through the model; folding may have failed."""
    if model in model_cache._CHAIN_CACHES:
        return ["chain"]
    return sorted({plan.way for plan in model_cache._CACHES[model].plans.values()})


@pytest.mark.parametrize("device,name,rows,precision", cases())
@torch.no_grad()
def test_predict(benchmark, device, name, rows, precision):
    plain, model, bank = prepared(device, name, precision)
    x = torch.randn(rows, *NETWORKS[name][1], device=device)
    x = x.contiguous(memory_format=layout_of(name, precision))

    def ours():
        return bnuq.predict(model, x, likelihood="categorical", num_samples=T, seed=0)

    # About eight minutes for all cases of the full form on two cores.
    slow = name.startswith("ResNet") and device == "cpu"
    seconds = (20 if slow else 8) if FULL else 4
    with autocast(device, precision):
        wanted = wanted_yardsticks(device, name, rows)
        if precision == "bfloat16":
            del wanted["vmap"]  # takes no images of one dtype and statistics of another
        runs, skipped = checked(precision, plain, model, bank, x, wanted)
        # Long samples: the first call of each finds the caches full of another case's weights.
        cases_in_turn = {"ours": ours, **runs}
        times = compare(cases_in_turn, rounds=25, sample_ms=20, seconds=seconds, device=device)
        benchmark.pedantic(ours, rounds=1)
    case = label(device, name, rows) + (", bfloat16" if precision == "bfloat16" else "")
    aim, ways = target(device, name, rows), ways_of(model)
    record(benchmark, case, times, skipped=skipped, target=aim, ways=ways)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name,rows", [("MLP 784-4x256-10", 256)] + [("ResNet-18 32x32", 2)] * FULL, ids=str
)
@torch.no_grad()
def test_memory(benchmark, device, name, rows):
    _, model, _ = prepared(device, name)
    x = torch.randn(rows, *NETWORKS[name][1], device=device)

    def predict(num_samples):
        return bnuq.predict(
            model, x, likelihood="categorical", num_samples=num_samples, seed=0, chunk=10
        )

    predict(10)  # proves that the model folds
    sizes = {f"T={n}": peak_extra_bytes(lambda n=n: predict(n), device) / 1e6 for n in (20, 200)}
    seconds = seconds_of(lambda: benchmark.pedantic(predict, (200,), rounds=1), device)
    benchmark.extra_info.update(
        case=label(device, name, rows).replace(f"T={T}", "T=200 by tens"),
        ours_ms=1e3 * seconds,
        memory_mb=sizes,
        # The numbers of the snapshots grow with T: 8 bytes a replica.
        target={"memory": 1.01},
    )
