"""Type and text of every error of batch_norm_bank and batch_norm_fitted."""

import pytest
import torch
from batch_norm_cases import make

from bnuq_ext import ops

T = 2
BANK = make("bank", (2, 3, 4, 4), T, dtype=torch.float32)
FITTED = make("normal", (2, 3, 4, 4), T, dtype=torch.float32)
SEED = torch.tensor([1, 0])
META = torch.device("meta")


def bank(**changes):
    arguments = {**BANK, "seed": SEED, "num_samples": T, **changes}
    return ops.batch_norm_bank(**arguments)


def fitted(**changes):
    arguments = {**FITTED, "seed": SEED, "stream": 0, "num_samples": T, "family": "normal"}
    return ops.batch_norm_fitted(**{**arguments, **changes})


# (changes to valid arguments, error, what the message says after "batch_norm_...: ")
COMMON = [
    ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
    (
        {"x": BANK["x"].int()},
        TypeError,
        "x must be float32, float16, bfloat16 or float64, got torch.int32",
    ),
    (
        {"x": BANK["x"].cfloat()},
        TypeError,
        "x must be float32, float16, bfloat16 or float64, got torch.complex64",
    ),
    (
        {"x": torch.ones(4, 3).to_sparse()},
        TypeError,
        "x must be a dense tensor, got torch.sparse_coo",
    ),
    (
        {"weight": torch.ones(3).to_sparse()},
        TypeError,
        "weight must be a dense tensor, got torch.sparse_coo",
    ),
    ({"x": torch.ones(3)}, ValueError, "x must have at least 2 dimensions (N, C, *), got [3]"),
    ({"x": torch.ones(3, 3)}, ValueError, "x must have a multiple of 2 rows, got [3, 3]"),
    ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
    ({"num_samples": -3}, ValueError, "num_samples must be at least 1, got -3"),
    ({"num_samples": 2.0}, TypeError, "num_samples must be an integer, got 2.0"),
    ({"num_samples": True}, TypeError, "num_samples must be an integer, got True"),
    (
        {"num_samples": torch.tensor(2.5)},
        TypeError,
        "num_samples must be an integer, got tensor(2.5000)",
    ),
    ({"num_samples": 2**70}, ValueError, f"num_samples must be below 2^63, got {2**70}"),
    ({"weight": torch.ones(4)}, ValueError, "weight must have shape [3], got [4]"),
    ({"weight": 1.0}, TypeError, "weight must be a tensor, got float"),
    (
        {"weight": torch.ones(3, dtype=torch.int64)},
        TypeError,
        "weight must be a floating-point tensor, got torch.int64",
    ),
    ({"weight": torch.ones(3, device=META)}, ValueError, "weight must be on cpu, got meta"),
    ({"bias": torch.ones(3, 1)}, ValueError, "bias must have shape [3], got [3, 1]"),
    ({"bias": torch.ones(3, device=META)}, ValueError, "bias must be on cpu, got meta"),
    ({"shared": "yes"}, TypeError, "shared must be True or False, got 'yes'"),
    ({"shared": 2}, TypeError, "shared must be True or False, got 2"),
    ({"eps": -1e-5}, ValueError, "eps must not be negative, got -1e-05"),
    ({"eps": float("nan")}, ValueError, "eps must not be negative, got nan"),
    ({"eps": float("inf")}, ValueError, "eps must be finite, got inf"),
    ({"eps": None}, TypeError, "eps must be a number, got NoneType"),
    (
        {"activation": "gelu"},
        ValueError,
        "activation must be one of none, relu, leaky_relu, got 'gelu'",
    ),
    ({"activation": "leaky_relu", "slope": 0}, ValueError, "slope must be positive, got 0"),
    (
        {"activation": "leaky_relu", "slope": float("inf")},
        ValueError,
        "slope must be finite, got inf",
    ),
    ({"activation": "leaky_relu", "slope": "1"}, TypeError, "slope must be a number, got str"),
    ({"activation": "leaky_relu", "slope": -1.0}, ValueError, "slope must be positive, got -1.0"),
    (
        {"residual": BANK["x"][:2]},
        ValueError,
        "residual must have shape [4, 3, 4, 4], got [2, 3, 4, 4]",
    ),
    (
        {"residual": BANK["x"].double()},
        TypeError,
        "residual must have the dtype of x torch.float32, got torch.float64",
    ),
    ({"residual": BANK["x"].to(META)}, ValueError, "residual must be on cpu, got meta"),
    ({"residual": 0}, TypeError, "residual must be a tensor, got int"),
    ({"seed": 0.5}, TypeError, "seed must be an integer or a tensor, got float"),
    ({"seed": SEED.int()}, TypeError, "seed must be int64, got torch.int32"),
    ({"seed": SEED.repeat(2)}, ValueError, "seed must have shape [2], got [4]"),
    ({"seed": SEED.to(META)}, ValueError, "seed must be on cpu, got meta"),
    ({"out": 3}, TypeError, "out must be a tensor, got int"),
    (
        {"out": torch.empty(2, 3, 4, 4)},
        ValueError,
        "out must have shape [4, 3, 4, 4], got [2, 3, 4, 4]",
    ),
    (
        {"out": torch.empty(4, 3, 4, 4), "shared": True},
        ValueError,
        "out must have shape [8, 3, 4, 4], got [4, 3, 4, 4]",
    ),
    (
        {"out": torch.empty(4, 3, 4, 4).half()},
        TypeError,
        "out must have the dtype of x torch.float32, got torch.float16",
    ),
    ({"out": torch.empty(4, 3, 4, 4, device=META)}, ValueError, "out must be on cpu, got meta"),
    (
        {"out": torch.empty(4, 4, 4, 3).movedim(3, 1)},
        ValueError,
        "out must have the memory format of the result, got strides (48, 1, 12, 3)",
    ),
    (
        {"out": torch.empty(4, 3, 4, 4, requires_grad=True)},
        ValueError,
        "out must be None where gradients are needed, got a tensor",
    ),
    (
        {"out": torch.empty(4, 3, 4, 4), "weight": torch.ones(3, requires_grad=True)},
        ValueError,
        "out must be None where gradients are needed, got a tensor",
    ),
]

BANK_ONLY = [
    ({"mean": [0.0]}, TypeError, "mean must be a tensor, got list"),
    ({"mean": torch.ones(3)}, ValueError, "mean must have shape (B, C), got [3]"),
    ({"mean": torch.ones(0, 3)}, ValueError, "mean must hold at least 1 snapshot, got [0, 3]"),
    (
        {"mean": torch.ones(1, 3).expand(2**31, 3)},
        ValueError,
        "mean must hold fewer than 2^31 snapshots, got [2147483648, 3]",
    ),
    ({"mean": torch.ones(3, 4)}, ValueError, "x must have the 4 channels of mean, got 3"),
    ({"mean": torch.ones(3, 3, device=META)}, ValueError, "mean must be on cpu, got meta"),
    (
        {"mean": torch.ones(3, 3, dtype=torch.int64)},
        TypeError,
        "mean must be a floating-point tensor, got torch.int64",
    ),
    ({"var": torch.ones(2, 3)}, ValueError, "var must have shape [3, 3], got [2, 3]"),
    ({"var": None}, TypeError, "var must be a tensor, got NoneType"),
    ({"seed": None}, ValueError, "seed or snapshot must be given, and not both, got neither"),
    (
        {"snapshot": torch.tensor([0, 1])},
        ValueError,
        "seed or snapshot must be given, and not both, got both",
    ),
    ({"num_samples": None}, TypeError, "num_samples must be an integer, got None"),
]

SNAPSHOT = [
    ([0, 1], TypeError, "snapshot must be a tensor, got list"),
    (torch.tensor([0, 1]).int(), TypeError, "snapshot must be int64, got torch.int32"),
    (torch.tensor([[0, 1]]), ValueError, "snapshot must have 1 dimension, got [1, 2]"),
    (torch.tensor([0, 1], device=META), ValueError, "snapshot must be on cpu, got meta"),
    (torch.tensor([0, 3]), ValueError, "snapshot must lie in [0, 3), got 3"),
    (torch.tensor([-1, 0]), ValueError, "snapshot must lie in [0, 3), got -1"),
    (
        torch.tensor([], dtype=torch.int64),
        ValueError,
        "snapshot must hold at least 1 replica, got 0",
    ),
    (torch.tensor([0, 1, 2]), ValueError, "x must have a multiple of 3 rows, got [4, 3, 4, 4]"),
]

FITTED_ONLY = [
    ({"params": [0.0]}, TypeError, "params must be a tensor, got list"),
    ({"params": torch.ones(3, 3)}, ValueError, "params must have shape [4, 3], got [3, 3]"),
    ({"params": torch.ones(4, 5)}, ValueError, "x must have the 5 channels of params, got 3"),
    ({"params": torch.ones(4, 3, device=META)}, ValueError, "params must be on cpu, got meta"),
    (
        {"params": torch.ones(4, 3).long()},
        TypeError,
        "params must be a floating-point tensor, got torch.int64",
    ),
    ({"stream": 1.5}, TypeError, "stream must be an integer, got 1.5"),
    ({"stream": -1}, ValueError, "stream must lie in [0, 2^32), got -1"),
    ({"stream": 2**32}, ValueError, "stream must lie in [0, 2^32), got 4294967296"),
    ({"family": "gamma"}, ValueError, "family must be one of normal, lognormal, got 'gamma'"),
    ({"family": ["normal"]}, ValueError, "family must be one of normal, lognormal, got ['normal']"),
]


def check(call, op, error, message):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == f"{op}: {message}"


@pytest.mark.parametrize("changes, error, message", COMMON + BANK_ONLY)
def test_bank_rejects(changes, error, message):
    check(lambda: bank(**changes), "batch_norm_bank", error, message)


@pytest.mark.parametrize("snapshot, error, message", SNAPSHOT)
def test_bank_rejects_snapshot(snapshot, error, message):
    changes = {"seed": None, "num_samples": None, "snapshot": snapshot}
    check(lambda: bank(**changes), "batch_norm_bank", error, message)


def test_bank_rejects_another_number_than_the_snapshots():
    changes = {"seed": None, "num_samples": 4, "snapshot": torch.tensor([0, 1])}
    message = "num_samples must be the length of snapshot 2, got 4"
    check(lambda: bank(**changes), "batch_norm_bank", ValueError, message)


@pytest.mark.parametrize("changes, error, message", COMMON + FITTED_ONLY)
def test_fitted_rejects(changes, error, message):
    check(lambda: fitted(**changes), "batch_norm_fitted", error, message)


@pytest.mark.parametrize("name", ["x", "residual"])
def test_out_must_not_overlap(name):
    memory = torch.zeros(5, 3, 4, 4)
    changes = {name: memory[:4], "out": memory[1:]}
    message = f"out must be {name} itself or not overlap it, got overlapping memory"
    check(lambda: bank(**changes), "batch_norm_bank", ValueError, message)
    memory = torch.zeros(8, 3, 4, 4)
    changes = {"x": memory[:4], "residual": None, "out": memory, "shared": True}
    message = "out must be x itself or not overlap it, got overlapping memory"
    check(lambda: bank(**changes), "batch_norm_bank", ValueError, message)


@pytest.mark.parametrize("name", ["x", "residual"])
def test_out_must_not_be_read_in_another_order(name):
    """It begins where the input does, but has other strides;
    or it lies in the gaps of the input."""
    other = torch.zeros(4, 3, 4, 4).transpose(2, 3)  # the result is contiguous
    memory = torch.zeros(2 * 192)
    sparse = memory.view(4, 3, 4, 4, 2)[..., 0]
    message = f"out must be {name} itself or not overlap it, got overlapping memory"
    for source, out in ((other, other.mT), (sparse, memory[192:].view(4, 3, 4, 4))):
        changes = {name: source, "out": out}
        check(lambda changes=changes: bank(**changes), "batch_norm_bank", ValueError, message)


@pytest.mark.parametrize("op, name", [("bank", n) for n in BANK] + [("fitted", n) for n in FITTED])
def test_out_takes_no_gradient(op, name):
    """Whichever tensor asks for it: what is written into `out` has no history."""
    call, tensors = (bank, BANK) if op == "bank" else (fitted, FITTED)
    changes = {name: tensors[name].clone().requires_grad_(), "out": torch.empty(4, 3, 4, 4)}
    message = "out must be None where gradients are needed, got a tensor"
    check(lambda: call(**changes), f"batch_norm_{op}", ValueError, message)
    with torch.no_grad():
        call(**changes)


def test_valid_arguments_pass():
    assert bank().shape == fitted().shape == (4, 3, 4, 4)


@pytest.mark.parametrize("snapshot", [-1, 3, 2**40])
def test_kernel_never_reads_outside_the_bank(snapshot, device):
    """Below the Python checks, a snapshot out of range is NaN."""
    x, mean, var = (BANK[name].to(device) for name in ("x", "mean", "var"))
    snapshots = torch.tensor([0, snapshot], device=device)
    y = torch.ops.bnuq.batch_norm_bank(
        x, mean, var, None, snapshots, 2, None, None, None, 1e-5, 1.0, False
    )
    assert torch.isfinite(y[:2]).all() and torch.isnan(y[2:]).all()


@pytest.mark.parametrize("name", ["x", "weight", "bias", "mean", "var"])
def test_freed_storage_is_an_error(name):
    """As a sharded model leaves it; an address of 0 would stand for no weight."""
    given = {n: torch.ones(3) for n in ("weight", "bias")} | {"x": torch.ones(4, 3)}
    given |= {"mean": torch.ones(2, 3), "var": torch.ones(2, 3)}
    given[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="must have its storage, got one that has been freed"):
        ops.batch_norm_bank(given.pop("x"), snapshot=torch.tensor([1]), **given)
