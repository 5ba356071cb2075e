"""The CUDA source of bayes_linear's direct way, run on the CPU, and which calls take it."""

import pytest
import torch
from hostrun import build
from hostrun.bayes import STREAM, Direct, Ops
from test_hostrun_linear import make

from bnuq_ext import ops, reference
from bnuq_ext.ops import linear_cuda, linear_parts

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}  # of the largest number of a result


@pytest.fixture(params=[0, 1], ids=lambda order: f"order{order}")
def direct(request, monkeypatch):
    made = Direct(request.param)
    monkeypatch.setattr(linear_cuda, "way_of", lambda *call: "direct")
    monkeypatch.setattr(linear_cuda, "_ops", made)
    return made


# Each form: one row and more, one replica and more; edges inside and outside of tiles and of groups
# of rows and replicas; warps that share a tile, and so many tiles that none does; nothing to sum.
CASES = [
    (1, 1, 1, 1, True), (1, 129, 17, 7, False), (8, 20, 17, 5, False), (2, 784, 17, 1, True),
    (9, 34, 7, 2, True), (32, 65, 33, 4, False), (16, 40, 129, 1, True), (1, 64, 40, 20, True),
    (140, 17, 20, 2, False), (1, 17, 250, 1056, False), (9, 16, 250, 300, True),
    (3, 16, 5, 3, False), (5, 0, 4, 2, True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("N,I,O,T,shared", CASES)
def test_matches_the_reference(direct, N, I, O, T, shared, dtype):  # noqa: E741
    inputs = [v.to(dtype) for v in make(N, I, O, T, shared, torch.float32)]
    x, mu, rho, bias_mu, bias_rho = inputs
    seed = ops.new_seed(5, 2**33 + 3)
    inputs64 = [v.double().requires_grad_() for v in inputs]
    expected = reference.bayes_linear(*inputs64, *direct.noise64(seed, T, O, I))

    def check(actual, wanted):
        assert actual.dtype == dtype and actual.shape == wanted.shape
        if wanted.numel():
            error = (actual.double() - wanted).abs().max()
            assert error <= TOLERANCE[dtype] * wanted.abs().max()

    check(linear_cuda._forward(*inputs, seed, STREAM, T), expected.detach())
    grad_y = torch.randn(T, N, O, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = (grad_y, x, mu, rho, bias_rho, seed, STREAM, T, True, True, True)
    wanted = torch.autograd.grad(expected, inputs64, grad_y.double())
    for actual, expected in zip(linear_cuda._backward(*given), wanted, strict=True):
        check(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
def test_inputs_of_16_bits_are_summed_in_float32(direct, shared, dtype):
    x, *weights = make(5, 20, 9, 3, shared, dtype)
    seed = ops.new_seed(1)
    y = linear_cuda._forward(x, *weights, seed, STREAM, 3)
    expected = linear_cuda._forward(x.float(), *weights, seed, STREAM, 3)
    assert y.dtype == dtype and torch.equal(y, expected.to(dtype))
    grads = [
        linear_cuda._backward(
            y.to(v.dtype), v, *weights[:2], weights[3], seed, STREAM, 3, True, True, True
        )
        for v in (x, x.float())
    ]
    for actual, wanted in zip(*grads, strict=True):
        assert torch.equal(actual, wanted.to(actual.dtype))
    assert grads[0][0].dtype == dtype and grads[0][1].dtype == torch.float32


def test_without_a_bias_and_with_pruned_weights(direct):
    """A spread of -inf is a weight without noise; an output without a bias is the product alone."""
    x, mu, rho, *_ = make(3, 20, 9, 2, True, torch.float32)
    rho[::2] = -torch.inf
    seed = ops.new_seed(1)
    y = linear_cuda._forward(x, mu, rho, None, None, seed, STREAM, 2)
    torch.testing.assert_close(y[0, :, ::2], x @ mu[::2].t())
    assert torch.equal(y[0, :, ::2], y[1, :, ::2])
    given = (torch.ones_like(y), x, mu, rho, None, seed, STREAM, 2, False, True, False)
    _, _, grad_rho, *_ = linear_cuda._backward(*given)
    assert not grad_rho[::2].any() and grad_rho[1::2].all()


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)], ids=str)
def test_only_what_is_needed_is_made(direct, needs):
    x, *weights = make(3, 20, 9, 2, True, torch.float32)
    given = (torch.ones(2, 3, 9), x, *weights[:2], weights[3], ops.new_seed(1), STREAM, 2)
    everything = linear_cuda._backward(*given, True, True, True)
    need_x, need_weight, need_bias = map(bool, needs)
    some = linear_cuda._backward(*given, need_x, need_weight, need_bias)
    needed = (need_x, need_weight, need_weight, need_bias, need_bias)
    for actual, wanted, kept in zip(some, everything, needed, strict=True):
        assert torch.equal(actual, wanted) if kept else actual.numel() == 0


def test_which_way_a_call_goes():
    """By rows, weights and float64; whatever the number of replicas, which `way_of` does not know."""
    mu = {size: torch.empty(size, size, device="meta") for size in (16, 443, 444, 724, 725)}

    def way(N, size, dtype=torch.float32):
        return linear_cuda.way_of(torch.empty(3, N, size, dtype=dtype, device="meta"), mu[size])

    direct = [(1, 16), (8, 443), (1000, 725, torch.float64)]
    sampled = [(9, 16), (1, 444), (512, 724, torch.bfloat16)]
    fused = [(1, 725), (512, 725), (513, 16)]
    for name, calls in (("direct", direct), ("sampled", sampled), ("fused", fused)):
        assert all(way(*call) == name for call in calls), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["direct", "fused"])
def test_a_replica_alone_is_what_it_is_among_others(monkeypatch, way, dtype):
    """To far less than the rounding of 16-bit operands:
    `predict` promises it for every chunk and strategy."""
    both = Ops(1)
    for module in (linear_cuda, linear_parts):
        monkeypatch.setattr(module, "_ops", both)
    monkeypatch.setattr(linear_cuda, "way_of", lambda *call: way)
    x, *weights = make(9, 40, 20, 6, True, dtype)
    weights[1] += 3.0  # noise as large as the rest
    seed = ops.new_seed(2)
    together = linear_cuda._forward(x, *weights, seed, STREAM, 6).float()
    for t in range(6):
        alone = linear_cuda._forward(x, *weights, ops.new_seed(2, t), STREAM, 1).float()
        near = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(together[t], alone[0], **near)
