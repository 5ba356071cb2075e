"""bayes_linear_kl, a layer and its divergence in one node, against the formulas in float64."""

import math

import pytest
import torch
from drawn import layer_noise
from one_link import bayes_linear_kl

from bnuq_ext import ops, reference

pytestmark = pytest.mark.usefixtures("divergence_op")
STREAM = 5
RHO = {  # (low, high), of which the one with positive numbers goes another way
    "narrow": (-9.0, 0.0),
    "wide": (-3.0, 4.0),
    "extreme": (-100.0, 100.0),
}


def make(O, I, dtype, rho="narrow", bias=True):  # noqa: E741
    generator = torch.Generator().manual_seed(2)
    low, high = RHO[rho]
    shapes = [(O, I), (O,)] if bias else [(O, I)]
    pairs = []
    for shape in shapes:
        mu = torch.randn(shape, generator=generator).to(dtype)
        spread = (low + (high - low) * torch.rand(shape, generator=generator)).to(dtype)
        pairs += mu.requires_grad_(), spread.requires_grad_()
    return pairs


def both(x, posterior, T, std=0.7):
    """(y, kl)"""
    noise = dict(seed=ops.new_seed(3, 2), stream=STREAM, num_samples=T)
    return bayes_linear_kl(x, *posterior, **noise, prior_std=std)


def layer(x, posterior, T):
    """y in float64, rounded once to the dtype of x."""
    mu, rho, *bias = (p.double() for p in posterior)
    noise = layer_noise(ops.new_seed(3, 2), STREAM, T, *mu.shape)
    y = reference.bayes_linear(x.double(), mu, rho, *(bias or (None, None)), *noise)
    return y.flatten(0, 1).to(x.dtype)


def expected_of(x, posterior, T, std=0.7):
    """(y, kl), each by its formula in float64."""
    doubles = [p.double() for p in posterior]
    pairs = zip(doubles[::2], doubles[1::2], strict=True)
    return layer(x, posterior, T), sum(reference.gaussian_kl(*pair, std) for pair in pairs)


def compared(x, posterior, T, weights, **tolerance):
    """Values and gradients of weights[0] * a sum of y's + weights[1] * kl, of both."""
    inputs = [t for t in (x, *posterior) if t.requires_grad]
    results = []
    for made in (both, expected_of):
        y, kl = made(x, posterior, T)
        shares = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
        terms = [
            w * t for w, t in zip(weights, ((y * shares).double().sum(), kl), strict=True) if w
        ]
        grads = torch.autograd.grad(sum(terms), inputs, allow_unused=True)
        results.append((y.detach(), kl.detach(), *grads))
    for actual, expected in zip(*results, strict=True):
        if expected is None:  # of the divergence by x
            assert actual is None
        else:
            torch.testing.assert_close(actual.double(), expected.double(), **tolerance)


@pytest.mark.parametrize("T, N", [(1, 1), (1, 3), (1, 4), (1, 9), (3, 2), (3, 9)])
@pytest.mark.parametrize("size", [(1, 1), (7, 33), (40, 129)], ids=str)
@pytest.mark.parametrize("rho", ["narrow", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_the_layer_and_its_divergence(dtype, rho, size, T, N):
    x = torch.randn(N, size[1], generator=torch.Generator().manual_seed(0), dtype=dtype)
    posterior = make(*size, dtype, rho)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)
    for weights in ((1.0, 0.3), (1.0, 0.0), (0.0, 2.0)):
        compared(x.clone().requires_grad_(), posterior, T, weights, **close)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_of_an_x_of_each_replica_and_without_a_bias(shared, bias):
    x = torch.randn(6, 20) if shared else torch.randn(3, 6, 20)
    posterior = make(11, 20, torch.float32, bias=bias)
    compared(x.requires_grad_(), posterior, 3, (1.0, 0.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_of_x_in_16_bits(dtype):
    x = torch.randn(9, 20).to(dtype).requires_grad_()
    eps = torch.finfo(dtype).eps
    compared(x, make(11, 20, torch.float32), 1, (1.0, 0.5), rtol=4 * eps, atol=4 * eps)


def test_rows_that_are_longer_than_a_slice_of_a_sum():
    posterior = make(3, 20_001, torch.float32)
    compared(torch.randn(9, 20_001), posterior, 1, (0.01, 1.0), rtol=2e-5, atol=1e-3)


@pytest.mark.parametrize("rho", RHO)
def test_weights_are_the_layers_own_and_the_divergence_is_that_of_float64(rho):
    posterior = make(64, 50, torch.float32, rho)
    eye = torch.eye(50)
    y, kl = both(eye, posterior, 1)
    expected, wanted = expected_of(eye, posterior, 1)
    torch.testing.assert_close(y, expected, rtol=3e-7, atol=6e-7 * expected.abs().max().item())
    torch.testing.assert_close(kl.double(), wanted, rtol=1e-6, atol=0.0)


def test_pruned_weights_count_nothing():
    mu, rho, *bias = make(12, 30, torch.float32)
    kept, x = torch.arange(360).view(12, 30) % 3 > 0, torch.randn(9, 30)

    pruned = [torch.where(kept, mu, 0.0), torch.where(kept, rho, -math.inf), *bias]
    y, kl = both(x, pruned, 1)
    expected = layer(x, [pruned[0], torch.where(kept, rho, -1000.0), *bias], 1)
    pairs = (mu.double()[kept], rho.double()[kept]), [b.double() for b in bias]
    wanted = sum(reference.gaussian_kl(*pair, 0.7) for pair in pairs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl.double(), wanted, rtol=1e-6, atol=0.0)
    inputs = [mu, rho, *bias]
    grads = torch.autograd.grad(y.sum() + kl, inputs, retain_graph=True)
    for actual, e in zip(grads, torch.autograd.grad(expected.sum() + wanted, inputs), strict=True):
        torch.testing.assert_close(actual, e, rtol=1e-5, atol=1e-6)
    assert not grads[0][~kept].any() and not grads[1][~kept].any()


@pytest.mark.parametrize("T, N", [(1, 9), (1, 2), (3, 9)])
def test_a_divergence_has_no_gradient_by_a_pruned_weight(T, N):
    """Whose mean is not 0, by a mask that is not prune's."""
    posterior = make(12, 30, torch.float32)
    with torch.no_grad():
        posterior[1][2, 3] = -math.inf
    y, kl = both(torch.randn(N, 30), posterior, T)
    by_mu, by_rho = torch.autograd.grad(kl + 0.0 * y.sum(), posterior[:2])
    assert by_mu[2, 3] == 0 == by_rho[2, 3]
    assert by_mu.count_nonzero() == 12 * 30 - 1 == by_rho.count_nonzero()


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (1, 2, 3)], ids=str)
def test_gradients_that_are_not_asked_for(frozen):
    posterior = make(11, 20, torch.float32)
    for place in frozen:
        posterior[place].requires_grad_(False)
    for x in (torch.randn(9, 20), torch.randn(2, 20)):
        compared(x, posterior, 1, (1.0, 0.5), rtol=1e-5, atol=1e-5)


def test_strided_arguments():
    bias = make(11, 20, torch.float32)[2:]
    strided = [t.detach().t().requires_grad_() for t in make(20, 11, torch.float32)[:2]]
    x = torch.randn(20, 9).t()
    compared(x, [*strided, *bias], 1, (1.0, 0.5), rtol=1e-5, atol=1e-5)


def test_gradcheck():
    posterior = make(4, 5, torch.float64, "wide")
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *p: both(x, p, 1), (x, *posterior))


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias):
    posterior = [t.detach() for t in make(4, 5, torch.float32, bias=bias)]
    given = posterior[::2], posterior[1::2], ops.new_seed(0), STREAM, 2, 0.7
    x = torch.randn(3, 5)
    torch.library.opcheck(torch.ops.bnuq.bayes_linear_kl.default, (x, *given))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore")  # torch's own, inside opcheck
def test_opcheck_of_the_gradients(bias):
    posterior = [t.detach() for t in make(4, 5, torch.float32, bias=bias)]
    given = posterior[::2], posterior[1::2], ops.new_seed(0), STREAM, 2, 0.7, True, True, bias
    op, grad_y = torch.ops.bnuq.bayes_linear_kl_backward.default, torch.randn(6, 4)
    torch.library.opcheck(op, (grad_y, torch.ones(()), torch.randn(3, 5), *given))


def test_the_ops_refuse_what_does_not_fit():
    mu, rho, *bias = (t.detach() for t in make(4, 5, torch.float32))
    x, noise = torch.randn(9, 5), (ops.new_seed(0), STREAM, 1, 0.7)
    with pytest.raises(RuntimeError, match="those of a matrix and of a bias that fits it"):
        torch.ops.bnuq.bayes_linear_kl(x, [mu, bias[0][:3]], [rho, bias[1]], *noise)
    with pytest.raises(RuntimeError, match="a bias be there if its gradients are needed"):
        given = torch.randn(9, 4), torch.ones(()), x, [mu], [rho], *noise
        torch.ops.bnuq.bayes_linear_kl_backward(*given, True, True, True)


def test_infinite_means_without_a_divergence():
    """The layer alone adds no 0 times infinity to a gradient."""
    mu, rho, *bias = (t.detach() for t in make(4, 5, torch.float32))
    mu[0, 0] = math.inf
    noise = dict(seed=ops.new_seed(0), stream=0, num_samples=1)
    y = ops.bayes_linear(torch.rand(16, 5) + 0.1, mu.requires_grad_(), rho, *bias, **noise)
    (grad,) = torch.autograd.grad(y.tanh().sum(), mu)
    assert grad[0, 0] == 0 and grad.isfinite().all()


def test_bad_arguments_are_named():
    mu, rho, *bias = make(4, 5, torch.float32)
    with pytest.raises(ValueError, match="bayes_linear: x must have 5 features, got 6"):
        both(torch.randn(3, 6), [mu, rho, *bias], 1)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("op", ["bayes_linear", "bayes_linear_kl"])
def test_freed_storage_is_an_error(op, index):
    """As a sharded model leaves it where a backward runs without its hook."""
    x = torch.randn(9, 20, requires_grad=True)
    posterior = make(11, 20, torch.float32)
    if op == "bayes_linear":
        y = ops.bayes_linear(x, *posterior, seed=ops.new_seed(3), stream=0, num_samples=1)
    else:
        y = both(x, posterior, 1)[0]
    (x, posterior[0], posterior[1], posterior[3])[index].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="must have its storage, got one that has been freed"):
        y.sum().backward()


@pytest.mark.parametrize("index", [0, 1])
def test_freed_storage_is_an_error_of_divergences(index):
    posterior = [torch.zeros(4, 3), torch.zeros(4, 3)]
    posterior[index].untyped_storage().resize_(0)
    for call in (ops.gaussian_kl, lambda *given: ops.mixture_kl(*given, ops.new_seed(0), 0)):
        with pytest.raises(
            RuntimeError, match="must have its storage, got one that has been freed"
        ):
            call(*posterior)
