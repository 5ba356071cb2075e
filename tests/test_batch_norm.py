"""Values of batch_norm_bank and batch_norm_fitted against the float64 reference."""

import math

import pytest
import torch
from batch_norm_cases import FIRST, KEY, OPS, call, expect, make
from conftest import NANS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bnuq_ext import ops, reference

LAYOUTS = [
    ((4, 3), False),
    ((1, 600), False),
    ((4, 7, 5), False),
    ((2, 5, 4, 4), False),
    ((2, 5, 4, 4), True),
    ((2, 4, 3, 3, 3), False),
    ((2, 4, 3, 3, 3), True),
    ((1, 2, 130, 140), False),  # a plane longer than the kernels' blocks
    ((7000, 3), False),  # rows longer than a block, which ends in the middle of one
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("shape, channels_last", LAYOUTS, ids=str)
def test_matches_reference(op, shape, channels_last, shared, device, dtype, assert_close):
    tensors = make(
        op, shape, 5, shared=shared, channels_last=channels_last, dtype=dtype, device=device
    )
    for activation in ("none", "relu", "leaky_relu"):
        options = {"activation": activation, "slope": 0.2, "shared": shared, "eps": 1e-3}
        y = call(op, tensors, 5, **options)
        assert_close(y, expect(op, tensors, 5, **options), scale=5)
        assert y.dtype == dtype
        assert y.stride() == torch.empty_like(y, memory_format=_format(tensors["x"])).stride()


def _format(x):
    return torch.contiguous_format if x.is_contiguous() else torch.preserve_format


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("absent", ["weight", "bias", "residual"])
def test_optional_arguments(op, absent, device, assert_close):
    tensors = make(op, (3, 4, 5), 6, device=device)
    del tensors[absent]
    assert_close(call(op, tensors, 6), expect(op, tensors, 6))


def test_snapshot_overrides_the_seed(device, assert_close):
    t = make("bank", (2, 3, 4), 4, device=device)
    snapshot = torch.tensor([2, 2, 0, 1], device=device)
    y = ops.batch_norm_bank(t["x"], t["mean"], t["var"], snapshot=snapshot)
    x, mean, var = (t[name].cpu() for name in ("x", "mean", "var"))
    assert_close(y, reference.batch_norm(x, mean[snapshot.cpu()], var[snapshot.cpu()]))


def test_seed_draws_the_same_snapshots_as_the_op_of_that_name(device):
    t = make("bank", (2, 3), 9, device=device)
    seed = ops.new_seed(KEY, FIRST, device)
    snapshot = ops.snapshot_indices(seed, 3, 9)
    drawn = ops.batch_norm_bank(t["x"], t["mean"], t["var"], seed, num_samples=9)
    assert torch.equal(drawn, ops.batch_norm_bank(t["x"], t["mean"], t["var"], snapshot=snapshot))


@pytest.mark.parametrize("training_dtype", [torch.float32, torch.bfloat16])
def test_is_torchs_batch_norm(training_dtype, device):
    t = make("bank", (4, 8, 6, 6), 1, dtype=training_dtype, device=device)
    x, mean, var = t["x"], t["mean"][:1], t["var"][:1]
    y = ops.batch_norm_bank(x, mean, var, snapshot=torch.zeros(1, dtype=torch.long, device=device),
                            weight=t["weight"], bias=t["bias"])  # fmt: skip
    expected = torch.nn.functional.batch_norm(x, mean[0], var[0], t["weight"], t["bias"])
    torch.testing.assert_close(y, expected)


def test_parameters_of_other_dtypes(device, assert_close):
    t = make("bank", (4, 3), 2, dtype=torch.float32, device=device)
    low = {n: v if n in ("x", "residual") else v.half() for n, v in t.items()}
    assert_close(call("bank", low, 2), expect("bank", low, 2), scale=5)
    wide = {n: v if n in ("x", "residual") else v.double() for n, v in t.items()}
    assert_close(call("bank", wide, 2), expect("bank", wide, 2), scale=5)


@pytest.mark.parametrize("op", ["normal", "lognormal"])
def test_chunks_of_replicas_give_the_same_bits(op, device):
    t = make(op, (3, 17), 10, shared=True, dtype=torch.float32, device=device)

    def run(first, count):
        seed = ops.new_seed(KEY, first, device)
        return ops.batch_norm_fitted(t["x"], t["params"], seed, 1, count, op, shared=True)

    assert torch.equal(torch.cat([run(0, 1), run(1, 6), run(7, 3)]), run(0, 10))


def test_normal_spread_is_held_above_an_eighth(device):
    """Spread 1 with std 10 falls below zero in half of the draws."""
    C, T = 1000, 8
    params = torch.tensor([[0.0], [0.0], [1.0], [10.0]], device=device).repeat(1, C)
    x = torch.ones(1, C, device=device)
    y = ops.batch_norm_fitted(x, params, ops.new_seed(0, 0, device), 0, T, "normal", eps=0.0,
                              shared=True)  # fmt: skip
    at_bound = (y == 8).sum().item()
    assert y.max() == 8
    assert abs(at_bound / (T * C) - 0.4652) < 5 * (0.25 / (T * C)) ** 0.5  # P(1 + 10 z < 1/8)


@pytest.mark.parametrize("op", ["bank", "normal"])
def test_channel_without_variance_is_constant(op, device):
    t = make(op, (3, 4), 5, dtype=torch.float32, device=device)
    if op == "bank":
        t["var"].zero_()
        t["mean"].copy_(torch.full_like(t["mean"], 0.5))
    else:
        t["params"][1:].zero_()
        t["params"][0].fill_(0.5)
    t["x"].fill_(0.5)
    del t["residual"]
    y = call(op, t, 5)
    assert torch.equal(y, t["bias"].expand_as(y))


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
def test_nan_and_infinity_pass_as_in_torch(activation, device, dtype):
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], device=device, dtype=dtype)
    zero, one = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    snapshot = torch.zeros(1, dtype=torch.long, device=device)
    y = ops.batch_norm_bank(x, zero, one, snapshot=snapshot, eps=0.0, activation=activation)
    torch.testing.assert_close(y, reference.activate(x, activation), equal_nan=True)


def test_every_half_survives(device):
    """x = mean 0 + 1 * x: all 65536 bit patterns through the conversions and back."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    snapshot = torch.zeros(1, dtype=torch.long, device=device)
    zero, one = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype).view(-1, 4).to(device)
        # Four elements a replica are too few for the conversions by eight or sixteen.
        short = {"mean": zero[:, :1], "var": one[:, :1], "snapshot": snapshot.expand(2**14)}
        wide = {"mean": zero, "var": one, "snapshot": snapshot}
        for values, options in ((x, wide), (x.view(4, 4, -1), wide), (x.view(-1, 1, 4), short)):
            y = ops.batch_norm_bank(values, eps=0.0, **options)
            torch.testing.assert_close(y, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(3, 20), (2, 2, 5), (2, 2, 40)], ids=str)
def test_nan_of_any_payload_stays_nan(shape, device, dtype):
    """Rounding carries out of 0x7fffffff, which is the NaN that a GPU makes."""
    x, C = torch.ones(shape, device=device, dtype=dtype), shape[1]
    zero, one = torch.zeros(1, C, device=device), torch.ones(1, C, device=device)
    snapshot = torch.zeros(1, dtype=torch.long, device=device)
    for bias in NANS.to(device):
        y = ops.batch_norm_bank(x, zero, one, snapshot=snapshot, bias=bias.expand(C))
        assert y.isnan().all()


@pytest.mark.parametrize("family", ["normal", "lognormal"])
def test_nan_of_a_fitted_distribution_stays_visible(family, device, dtype):
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    x, seed = torch.ones(2, 3, device=device, dtype=dtype), ops.new_seed(0, device=device)
    for row in range(4):
        params = torch.ones(4, 3, device=device, dtype=acc)
        params[row, 1] = math.nan
        params.requires_grad_()
        y = ops.batch_norm_fitted(x, params, seed, 0, 5, family, shared=True)
        assert y[:, 1].isnan().all() and y[:, [0, 2]].isfinite().all()
        (grad,) = torch.autograd.grad(y.sum(), params)
        assert grad[2:, 1].isnan().all() and grad[:, [0, 2]].isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_traces_with_fake_tensors():
    """Which have neither values nor an address to check."""
    x, mean, var, snapshot = torch.randn(6, 3), torch.randn(5, 3), torch.rand(5, 3), torch.arange(2)

    def function(x, snapshot):
        return ops.batch_norm_bank(x, mean, var, snapshot=snapshot, shared=True)

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(x, snapshot)
        assert torch.equal(graph(x, snapshot), function(x, snapshot))
    with FakeTensorMode() as fake:
        x, mean, var, snapshot = map(fake.from_tensor, (x, mean, var, snapshot))
        out = torch.empty(12, 3)
        assert ops.batch_norm_bank(x, mean, var, snapshot=snapshot, shared=True, out=out) is out


# whole rows; rows that end in the middle of a vector, planes that do; planes shorter than one;
# replicas that are
@pytest.mark.parametrize(
    "T, shape",
    [(1, (1000, 64)), (1, (500, 3)), (1, (20, 64, 47)), (1, (100, 64, 9)), (9000, (9000, 1, 7))],
    ids=str,
)
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
def test_rounds_to_nearest_even(T, shape, activation, device):
    """Sums of two values of a type, rounded as torch rounds them; ties, subnormals and overflow."""
    generator = torch.Generator().manual_seed(0)
    snapshot = torch.zeros(T, dtype=torch.long, device=device)
    zero, one = torch.zeros(1, shape[1], device=device), torch.ones(1, shape[1], device=device)
    options = {"snapshot": snapshot, "eps": 0.0, "activation": activation}
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.randint(-(2**15), 2**15, (2, *shape), generator=generator)
        x, residual = bits.to(torch.int16).view(dtype).to(device)
        y = ops.batch_norm_bank(x, zero, one, residual=residual, **options)
        expected = reference.activate(x.float() + residual.float(), activation).to(dtype)
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@st.composite
def problems(draw):
    dim = draw(st.integers(2, 5))
    shape = [draw(st.integers(0, 5)), draw(st.integers(0, 40))]
    shape += [draw(st.integers(0, 9)) for _ in range(dim - 2)]
    options = {
        "shared": draw(st.booleans()),
        "activation": draw(st.sampled_from(["none", "relu", "leaky_relu"])),
        "eps": draw(st.sampled_from([1e-5, 1e-2, 1.0])),
    }
    absent = draw(st.sets(st.sampled_from(["weight", "bias", "residual"])))
    return (
        draw(st.sampled_from(OPS)), tuple(shape), draw(st.integers(1, 7)),
        draw(st.booleans()) and dim > 3, options, absent,
    )  # fmt: skip


@settings(max_examples=300)
@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_shape(problem, dtype):
    op, shape, T, channels_last, options, absent = problem
    tensors = make(op, shape, T, shared=options["shared"], channels_last=channels_last, dtype=dtype)
    for name in absent:
        del tensors[name]
    y = call(op, tensors, T, **options)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 8e-2}[dtype]
    expected = expect(op, tensors, T, **options)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
