"""The CUDA source of the Bayesian ops, run on the CPU: the fused products and what feeds them."""

import numpy as np
import pytest
import torch
from drawn import layer_noise
from hostrun import build
from hostrun.bayes import STREAM, Ops

from bnuq_ext import ops, reference

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

HALF_STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=[0, 1], ids=lambda order: f"order{order}")
def kernels(request):
    return Ops(request.param)


def make(N, I, O, T, shared, dtype):  # noqa: E741
    generator = torch.Generator().manual_seed(N * 1000 + I * 10 + O)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    x = (draw(N, I) if shared else draw(T, N, I)).to(dtype)
    return x, 0.1 * draw(O, I), draw(O, I) - 3, draw(O), draw(O) - 3


def half_of(kernels, v, bfloat16):
    return kernels.bayes_operands(None, v, None, bfloat16)[2:4]


def sigma_of(kernels, rho, bfloat16):
    return kernels.bayes_operands(None, None, rho, bfloat16)[4:]


# Each form of the kernels: rows 1..8, ..32, ..64, more; edges inside and outside of tiles;
# one, two or four replicas a warp; warps that share a tile.
CASES = [
    (1, 1, 1, 1, True), (1, 129, 17, 7, False), (8, 20, 17, 5, False), (2, 784, 17, 1, True),
    (9, 784, 7, 2, True), (32, 65, 33, 4, False), (16, 40, 129, 1, True), (33, 129, 16, 1, True),
    (64, 30, 40, 3, False), (65, 140, 129, 2, True), (140, 17, 20, 2, False),
]  # fmt: skip


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("N,I,O,T,shared", CASES)
def test_fused_products_match_the_reference(kernels, N, I, O, T, shared, half):  # noqa: E741
    products = Products(kernels, N, I, O, T, shared, half)
    products.check_forward()
    products.check_gradients()


@pytest.mark.parametrize("kernels", [1], indirect=True, ids=["order1"])
@pytest.mark.parametrize("N,shared,half", [(1, False, torch.bfloat16), (9, True, torch.float16)])
def test_fused_products_of_so_many_tiles_that_no_warps_share_one(kernels, N, shared, half):
    Products(kernels, N, 17, 250, 1056, shared, half).check_forward()


@pytest.mark.parametrize("kernels", [1], indirect=True, ids=["order1"])
@pytest.mark.parametrize("shared,half", [(False, torch.bfloat16), (True, torch.float16)])
def test_fused_products_of_so_many_tiles_that_a_warp_has_128_rows(kernels, shared, half):
    Products(kernels, 70, 17, 33, 352, shared, half).check_forward()


@pytest.mark.parametrize("kernels", [1], indirect=True, ids=["order1"])
@pytest.mark.parametrize("N,shared,half", [(1, False, torch.bfloat16), (9, True, torch.float16)])
def test_gradients_of_so_many_replicas(kernels, N, shared, half):
    """Of an x for each, whose tiles no warps share; and of one x, a sum over them all."""
    Products(kernels, N, 50, 17, 1056, shared, half).check_gradients()


class Products:
    """Four roundings to 16 bits enter a product: a sum is off by about 2^-11 (2^-8) of the root of
    its sum of squares. Six times that is allowed; one wrong weight is off
    by about the root over sqrt(I)."""

    def __init__(self, kernels, N, I, O, T, shared, half):  # noqa: E741
        self.kernels, self.half, self.shared = kernels, half, shared
        self.dtype = torch.float32 if half == torch.float16 else torch.bfloat16
        x, mu, rho, bias_mu, bias_rho = make(N, I, O, T, shared, self.dtype)
        self.x, self.parameters = x, (mu, rho, bias_mu, bias_rho)
        self.draw = ops.new_seed(5, 3), STREAM, T
        self.inputs64 = [t.double().requires_grad_() for t in (x, *self.parameters)]
        self.eps, bias_eps = layer_noise(self.draw[0], STREAM, T, O, I)
        self.expected = reference.bayes_linear(*self.inputs64, self.eps, bias_eps)
        self.x2 = x.double().square().expand(T, N, I)
        self.noise2 = (reference.softplus(rho.double()) * self.eps).square()

    def check(self, actual, wanted, squares):
        bound = 6 * HALF_STEP[self.half] * squares.sqrt() + 1e-5 * float(wanted.abs().max())
        rounding = 2**-8 * wanted.abs() if actual.dtype == torch.bfloat16 else 0.0
        assert ((actual.double() - wanted).abs() <= bound + rounding).all()

    def check_forward(self):
        y = self.kernels.forward(self.x, *self.parameters, *self.draw)
        assert y.dtype == self.dtype
        squares = torch.einsum("tni,toi->tno", self.x2, self.noise2)
        self.check(y, self.expected.detach(), squares)

    def check_gradients(self):
        generator = torch.Generator().manual_seed(1)
        grad_y = torch.randn(self.expected.shape, generator=generator).to(self.dtype)
        grads = self.kernels.backward(grad_y, self.x, *self.parameters[:2], *self.draw)
        wanted = torch.autograd.grad(self.expected, self.inputs64, grad_y.double())
        grad2 = grad_y.double().square()
        by_x = torch.einsum("tno,toi->tni", grad2, self.noise2)
        self.check(grads[0], wanted[0], by_x.sum(0) if self.shared else by_x)
        by_sigma = torch.einsum("tno,tni,toi->oi", grad2, self.x2, self.eps.square())
        self.check(
            grads[2], wanted[2], by_sigma * torch.sigmoid(self.parameters[1].double()).square()
        )
        self.check(grads[1], wanted[1], torch.zeros_like(wanted[1]))  # no 16-bit operand here


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("I", [16, 300])
def test_the_noise_is_as_far_off_as_stated(kernels, I, half):  # noqa: E741
    """By 2^-11 (2^-8) of its own size, whatever the number of inputs."""
    T, O = 3, 30  # noqa: E741
    x, mu, rho, *_ = make(10, I, O, T, True, half)
    bfloat16 = half == torch.bfloat16
    operand, scale = half_of(kernels, x.float()[None], bfloat16)
    sigma, sigma_scale = sigma_of(kernels, rho, bfloat16)
    seed, nothing = ops.new_seed(5), torch.zeros(1, 10, O)
    noise = kernels.bayes_forward(
        operand, sigma, nothing, None, None, scale, sigma_scale, seed, STREAM, T
    ).double()
    eps, _ = layer_noise(seed, STREAM, T, O, I)
    weights = reference.softplus(rho.double()) * eps
    expected = torch.einsum("ni,toi->tno", x.double(), weights)
    error = (noise - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert HALF_STEP[half] / 2 < error < HALF_STEP[half]


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(
    "largest", [3.0, 2.0**-10, 1e-30, 1e-38, 1e38, 0.0, float("inf"), float("nan")]
)
def test_operands_lie_in_the_range_of_16_bits(kernels, largest, bfloat16):
    """v / scale, rows padded with zeros; for float16 the largest lies in [2^13, 2^14)."""
    v = torch.linspace(-1, 0.7, 2 * 40 * 70).view(2, 40, 70) * (largest if largest < 1e39 else 1.0)
    v[1, 3, 5] = largest
    operand, scale = half_of(kernels, v, bfloat16)
    assert operand.shape == (2, 40, 80) and not operand[..., 70:].any()
    assert float(scale).hex().startswith(("0x1.0", "0x0.0"))  # a power of two
    if largest not in (1e-38, 0.0) and not bfloat16:  # what is not finite counts for nothing
        assert 2**13 <= float(operand[operand.isfinite()].abs().max()) < 2**14
    expected = (v.double() / float(scale)).to(operand.dtype)
    torch.testing.assert_close(operand[..., :70], expected, rtol=0, atol=0, equal_nan=True)


def test_weights_are_the_noise_of_the_cpu(kernels):
    """x = one row of the identity reads single weights:
    wrong places would be off by about sigma."""
    O, I, T = 33, 40, 3  # noqa: E741
    x = torch.eye(I)
    rho = torch.zeros(O, I)
    seed = ops.new_seed(-9, 2**33)
    y = kernels.forward(x, torch.zeros(O, I), rho, None, None, seed, STREAM, T)
    eps = ops.philox_normal(seed, STREAM, (T, O, I))
    sigma = float(reference.softplus(torch.zeros(()).double()))
    torch.testing.assert_close(y, sigma * eps.transpose(1, 2), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("scale", [1e-12, 1e6, 0.0])
def test_operands_are_scaled_to_float16s_range(kernels, scale):
    """Gradients of 1e-12 would vanish in float16, inputs of 1e6 overflow."""
    x, *parameters = make(16, 24, 8, 2, True, torch.float32)
    x = x * scale
    seed = ops.new_seed(0)
    y = kernels.forward(x, *parameters, seed, STREAM, 2)
    expected = reference.bayes_linear(
        x.double(), *(p.double() for p in parameters), *layer_noise(seed, STREAM, 2, 8, 24)
    )
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=1e-2 * scale + 1e-6)
    grads = kernels.backward(scale * torch.ones_like(y), x, *parameters[:2], seed, STREAM, 2)
    inputs64 = [t.double().requires_grad_() for t in (x, *parameters)]
    wanted = torch.autograd.grad(
        reference.bayes_linear(*inputs64, *layer_noise(seed, STREAM, 2, 8, 24)),
        inputs64,
        scale * torch.ones_like(y).double(),
    )
    for actual, expected in zip(grads[:3], wanted[:3], strict=True):
        bound = 5e-3 * float(expected.abs().max())
        torch.testing.assert_close(actual.double(), expected, rtol=5e-3, atol=bound)


@pytest.mark.parametrize("place", [0, -1])
def test_the_largest_of_more_numbers_than_the_grid_has_threads(kernels, place):
    """The range is that of the largest; 512 blocks look for it,
    some numbers are in a second turn of theirs."""
    v = torch.full((1, 1100, 1000), 0.1)
    v.view(-1)[place] = -7.0
    operand, scale = half_of(kernels, v, False)
    assert float(operand.abs().max()) * float(scale) == 7.0 and float(scale) == 2.0**-11


@pytest.mark.parametrize("shape", [(1, 3, 0), (0, 3, 5)], ids=str)
def test_an_operand_of_nothing_has_a_scale(kernels, shape):
    assert float(half_of(kernels, torch.empty(shape), False)[1]) == 1.0
    assert float(sigma_of(kernels, torch.empty(shape[2], shape[0]), False)[1]) > 0.0


@pytest.mark.parametrize("largest", [-3.0, 0.0, 40.0])
def test_noise_stays_in_the_range_of_16_bits(kernels, largest):
    """sigma * eps with the largest eps there is, sqrt(32 * 2 ln 2): below 65504, and not by far."""
    rho = torch.linspace(largest - 5, largest, 17 * 33).view(17, 33)
    packed, scale = sigma_of(kernels, rho, False)
    sigma = torch.nn.functional.softplus(torch.tensor(largest, dtype=torch.float64))
    root = (2 * np.log(2)) ** 0.5  # comes with sigma here
    torch.testing.assert_close(
        float(packed.max()) * float(scale), float(sigma * root), rtol=2**-11, atol=0
    )
    assert 65504 / 8 < float(packed.max()) * 32**0.5 < 65504


@pytest.mark.parametrize("N", [3, 20])
def test_sums_of_nothing(kernels, N):
    """No inputs leave the rest of the output, no outputs the gradient as it is."""
    T, seed, one, none = 2, ops.new_seed(0), torch.ones(()), torch.empty(0, dtype=torch.float16)
    base, bias_mu, bias_rho = torch.randn(1, N, 5), torch.randn(5), torch.randn(5)
    x = none.view(1, N, 0)
    y = kernels.bayes_forward(x, none, base, bias_mu, bias_rho, one, one, seed, STREAM, T)
    eps = ops.philox_normal(seed, STREAM, (T, 5), tag="bias")
    bias = bias_mu + reference.softplus(bias_rho) * eps
    torch.testing.assert_close(y, base + bias[:, None], rtol=1e-5, atol=2e-6)
    grad_x = torch.randn(T, N, 5)
    before = grad_x.clone()
    kernels.bayes_grad_x_(grad_x, none.view(T, N, 0), none, one, one, seed, STREAM)
    assert torch.equal(grad_x, before)


def test_thread_order_does_not_matter():
    x, *parameters = make(40, 70, 20, 3, False, torch.float32)
    seed, results = ops.new_seed(1), []
    for order in (0, 1, 2):
        made = Ops(order)
        operand, scale = half_of(made, x, False)
        packed, sigma_scale = sigma_of(made, parameters[1], False)
        base = torch.zeros(3, 40, 20)
        y = made.bayes_forward(
            operand, packed, base, None, None, scale, sigma_scale, seed, STREAM, 3
        )
        grad, grad_scale = half_of(made, y, False)
        results.append(
            [y, made.bayes_grad_rho(grad, operand, parameters[1], grad_scale, scale, seed, STREAM)]
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
