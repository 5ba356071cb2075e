"""Gradients of batch_norm_bank and batch_norm_fitted."""

import math

import pytest
import torch
from batch_norm_cases import OPS, call, expect, make

from bnuq_ext import ops

SHAPES = [((3, 4), False), ((2, 3, 5), False), ((2, 3, 2, 4), False), ((2, 3, 2, 4), True)]


def leaves(tensors, dtype=None):
    return {n: v.detach().clone().to(dtype or v.dtype).requires_grad_() for n, v in tensors.items()}


def away_from_the_kink(op, tensors, T, **options):
    """Moves the residual so that nothing is within 0.05 of zero before the activation."""
    shared = options["shared"]
    z = expect(op, tensors, T, activation="none", shared=shared)
    z = z.view(T, -1, *z.shape[1:]) if shared else z[None]
    near = (z.abs() < 0.05).any(0)
    tensors["residual"] = tensors["residual"] + 0.2 * near.to(tensors["residual"])
    z = expect(op, tensors, T, activation="none", shared=shared)
    return z.abs().min() > 0.01


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("shape, channels_last", SHAPES, ids=str)
def test_gradcheck(op, shape, channels_last, activation, shared, device):
    """Every input: x, residual, mean and var or params, weight, bias."""
    options = {"activation": activation, "shared": shared, "eps": 1e-2}
    T = 2 if shared else 4
    tensors = make(op, shape, T, shared=shared, channels_last=channels_last, device=device)
    for _ in range(20):
        if activation == "none" or away_from_the_kink(op, tensors, T, **options):
            break
    else:
        pytest.fail("no case without a kink")
    names, values = zip(*leaves(tensors).items(), strict=True)

    def function(*args):
        return call(op, dict(zip(names, args, strict=True)), T, **options)

    assert torch.autograd.gradcheck(function, values, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("shape, channels_last", [((70, 130), False), ((3, 70, 7), False), ((3, 5, 13, 11), False),
                                                  ((3, 5, 13, 11), True)], ids=str)  # fmt: skip
def test_matches_reference(op, shape, channels_last, shared, device, dtype):
    """Against autograd of the float64 reference; a gradient is a sum of up to 400 terms."""
    T, options = 4, {"shared": shared, "activation": "leaky_relu", "slope": 0.3}
    tensors = make(
        op, shape, T, shared=shared, channels_last=channels_last, dtype=dtype, device=device
    )
    actual, exact = leaves(tensors), leaves(tensors, torch.float64)
    y, expected = call(op, actual, T, **options), expect(op, exact, T, **options)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    y.backward(grad)
    expected.backward(grad.double().cpu())
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 3e-2)
    for name in tensors:
        a, e = actual[name].grad.double().cpu(), exact[name].grad.cpu()
        scale = max(1.0, e.abs().max().item())
        torch.testing.assert_close(a / scale, e / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("op", OPS)
def test_only_the_gradients_asked_for(op, device):
    full = leaves(make(op, (3, 4, 5), 4, device=device))
    call(op, full, 4, activation="relu").sum().backward()
    for name in full:
        alone = {n: v.detach() for n, v in full.items()}
        alone[name].requires_grad_()
        call(op, alone, 4, activation="relu").sum().backward()
        torch.testing.assert_close(alone[name].grad, full[name].grad)
        assert all(v.grad is None for n, v in alone.items() if n != name)


def test_backward_returns_nothing_that_is_not_needed(device):
    t = make("bank", (2, 3, 4), 2, device=device)
    grad_y, seed = torch.ones_like(t["x"]), ops.new_seed(0, 0, device)
    grad_x, grad_residual, sums = torch.ops.bnuq.batch_norm_bank_backward(
        grad_y, None, None, t["mean"], t["var"], seed, None, 2, None, 1e-5, 1.0, False,
        True, False, False,
    )  # fmt: skip
    assert grad_x.shape == t["x"].shape and grad_residual.numel() == 0 and sums.numel() == 0


def test_unused_snapshots_have_no_gradient(device):
    t = leaves(make("bank", (2, 3, 4), 2, device=device))
    snapshot = torch.tensor([2, 2], device=device)
    y = ops.batch_norm_bank(t["x"], t["mean"], t["var"], snapshot=snapshot)
    y.square().sum().backward()
    for name in ("mean", "var"):
        assert torch.count_nonzero(t[name].grad[:2]) == 0
        assert torch.count_nonzero(t[name].grad[2]) > 0


def test_a_gradient_that_is_not_finite_reaches_no_other_snapshot(device):
    """A channel without spread, and no eps."""
    t = leaves(make("bank", (2, 3, 4), 2, device=device))
    with torch.no_grad():
        t["var"][1, 0] = 0.0
    snapshot = torch.tensor([0, 1], device=device)
    y = ops.batch_norm_bank(t["x"], t["mean"], t["var"], snapshot=snapshot, eps=0.0)
    y.nan_to_num(0.0, 0.0, 0.0).sum().backward()
    for name in ("mean", "var"):
        found = t[name].grad.isfinite()
        assert not found[1, 0] and found.sum() == found.numel() - 1
        assert torch.count_nonzero(t[name].grad[0]) and not torch.count_nonzero(t[name].grad[2:])


def test_gradients_are_deterministic(device, set_threads):
    """Any number of threads, any repetition: the same bits."""
    tensors = make("bank", (37, 65, 7), 5, dtype=torch.float32, device=device)

    def gradients():
        t = leaves(tensors)
        call("bank", t, 5, activation="relu").square().sum().backward()
        return [v.grad for v in t.values()]

    expected = gradients()
    set_threads(16)
    for a, e in zip(gradients(), expected, strict=True):
        assert torch.equal(a, e)


def test_expanded_gradient(device):
    """sum() hands back a gradient with stride 0."""
    t = leaves(make("normal", (2, 3, 2, 2), 3, channels_last=True, device=device))
    call("normal", t, 3).sum().backward()
    exact = leaves(t)
    expect("normal", exact, 3).sum().backward()
    for name in t:
        torch.testing.assert_close(t[name].grad, exact[name].grad)
    assert t["x"].grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_special_values_go_as_through_torchs_activation(activation, device, dtype):
    """Torch's relu selects: an infinite gradient stops at it, and NaN lets its gradient through."""
    values = [-math.inf, -1.0, 0.0, 1.0, math.inf, math.nan]
    x, grad = torch.meshgrid(*[torch.tensor(values, device=device, dtype=dtype)] * 2, indexing="ij")
    zero, one = torch.zeros(1, 6, device=device), torch.ones(1, 6, device=device)
    snapshot = torch.zeros(1, dtype=torch.int64, device=device)
    options = {"snapshot": snapshot, "eps": 0.0, "activation": activation}
    slope = {"negative_slope": 0.01} if activation == "leaky_relu" else {}
    with_nan = slice(None) if activation == "relu" else slice(5)
    mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    getattr(torch.nn.functional, activation)(plain, **slope).backward(grad)
    for again in (False, True):
        y = ops.batch_norm_bank(mine, zero, one, **options)
        (found,) = torch.autograd.grad(y, mine, grad, create_graph=again)
        torch.testing.assert_close(found[with_nan], plain.grad[with_nan], equal_nan=True)


def test_infinite_gradients_reach_no_other_snapshot(device):
    x = torch.randn(3, 2, device=device)
    table = [torch.ones(3, 2, device=device, requires_grad=True) for _ in range(2)]
    snapshot, grad = torch.tensor([0, 0, 2], device=device), torch.ones_like(x)
    grad[2, 0] = math.inf
    y = ops.batch_norm_bank(x, *table, snapshot=snapshot, eps=1.0, shared=False)
    found = torch.autograd.grad(y, table, grad)
    rstd = 0.5**0.5
    expected = [-2 * rstd * torch.ones_like(x[0]), -0.5 * rstd**3 * (x[:2] - 1).sum(0)]
    for by, first in zip(found, expected, strict=True):
        torch.testing.assert_close(by[0], first)
        assert not by[1].any() and by[2].isfinite().tolist() == [False, True]


def test_out_that_autograd_has_kept_is_not_written_unnoticed(device):
    """As with the `out` of torch's own operations."""
    zero, one = torch.zeros(1, 3, device=device), torch.ones(1, 3, device=device)
    params, seed = torch.ones(4, 3, device=device), ops.new_seed(0, device=device)
    bank = {"seed": seed, "num_samples": 1}
    for write in (
        lambda h: ops.batch_norm_bank(h, zero, one, out=h, **bank),
        lambda h: ops.batch_norm_fitted(h, params, seed, 0, 1, "normal", out=h),
    ):
        leaf = torch.randn(4, 3, device=device, requires_grad=True)
        h = leaf.exp()  # kept for its gradient
        write(h.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()


@pytest.fixture
def new_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
def test_an_empty_batch_has_no_gradient(device):
    weight, bias = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    statistics = torch.zeros(1, 3, device=device), torch.ones(1, 3, device=device)
    given = torch.ones(0, 3, device=device), *statistics, ops.new_seed(0, device=device)
    ops.batch_norm_bank(*given, num_samples=1, weight=weight, bias=bias).sum().backward()
    assert not weight.grad.any() and not bias.grad.any()
