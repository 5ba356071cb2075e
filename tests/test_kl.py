"""gaussian_kl and mixture_kl against closed forms, quadrature and plain PyTorch."""

import math

import pytest
import torch
from scipy.integrate import quad

from bnuq_ext import ops, reference
from bnuq_ext.ops import kl as kl_ops

MIXTURE = dict(pi=0.25, std1=1.0, std2=math.exp(-6))
STREAM = 2**31 + 3  # needs its 32 bits


def make(shape, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    mu = torch.randn(shape, generator=generator).to(device, dtype)
    rho = (2 * torch.randn(shape, generator=generator) - 3).to(device, dtype)
    return mu.requires_grad_(), rho.requires_grad_()


def noise(seed, T, shape):
    return ops.philox_normal(seed, STREAM, (T, *shape), tag="weight" if len(shape) == 2 else "bias")


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (64, 33), (129, 130)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_matches_reference(shape, dtype, device, assert_close):
    inputs = make(shape, dtype, device)
    inputs64 = [t.detach().double().requires_grad_() for t in inputs]
    kl, expected = ops.gaussian_kl(*inputs, 0.7), reference.gaussian_kl(*inputs64, 0.7)
    torch.testing.assert_close(kl.double(), expected, rtol=3e-6, atol=1e-6)
    for a, e in zip(
        torch.autograd.grad(kl, inputs), torch.autograd.grad(expected, inputs64), strict=True
    ):
        assert_close(a, e, scale=5)


@pytest.mark.parametrize("highest", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_of_each_rho(highest, dtype):
    """One at a time, and all at once: where no rho is positive the sum goes another way."""
    rho = torch.linspace(-90, highest, 700, dtype=dtype)
    mu = torch.zeros_like(rho)
    expected = torch.stack([reference.gaussian_kl(mu[0].double(), r, 0.7) for r in rho.double()])
    actual = torch.stack([ops.gaussian_kl(mu[0], r, 0.7) for r in rho])
    torch.testing.assert_close(actual.double(), expected, rtol=2e-7, atol=3e-7)
    total = ops.gaussian_kl(mu, rho, 0.7)
    torch.testing.assert_close(total.double(), expected.sum(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("at", [0, 15, 4097, 8191, 8192, 20_000])
def test_gaussian_of_one_wide_weight_among_many(at):
    """Slices of 8,192 weights without a positive rho are summed in another way."""
    rho = torch.full((20_001,), -3.0)
    rho[at] = 10.0  # 45 of 50,559 nats
    kl = ops.gaussian_kl(torch.zeros_like(rho), rho, 1.0)
    expected = reference.gaussian_kl(torch.zeros_like(rho).double(), rho.double(), 1.0)
    torch.testing.assert_close(kl.double(), expected, rtol=2e-5, atol=0.0)


def test_gradients_are_the_same_by_any_number_of_threads(set_threads):
    """One wide weight, at the end: the others' slices go their way whatever the threads."""
    mu = torch.randn(40_000, requires_grad=True)
    rho = -5 + torch.rand(40_000)
    rho[-1] = 0.5
    rho.requires_grad_()
    grads = []
    for count in (1, 2, 3):
        set_threads(count)
        grads.append(torch.autograd.grad(ops.gaussian_kl(mu, rho, 0.7), (mu, rho)))
    assert all(
        torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True)
    )


@pytest.mark.parametrize("highest", [-1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pruned_weights_count_nothing(highest, dtype):
    """A mean of 0 and a rho of -inf, between weights that are all narrow and between others."""
    rho = torch.linspace(-6, highest, 300, dtype=dtype).view(20, 15).requires_grad_()
    mu = torch.linspace(-1, 1, 300, dtype=dtype).view(20, 15).requires_grad_()
    kept = torch.arange(300).view(20, 15) % 3 > 0
    pruned = torch.where(kept, mu, 0.0), torch.where(kept, rho, -math.inf)
    left = [t.detach().double()[kept].requires_grad_() for t in (mu, rho)]
    seed = ops.new_seed(1)
    eps = noise(seed, 2, (20, 15)).double()[:, kept]
    pairs = [
        (ops.gaussian_kl(*pruned, 0.7), reference.gaussian_kl(*left, 0.7)),
        (kl_ops.gaussian_kl_sum([(*pruned, 0.7)]), reference.gaussian_kl(*left, 0.7)),
        (
            ops.mixture_kl(*pruned, seed, STREAM, 2, pi=0.5, std1=1.0, std2=0.1),
            reference.mixture_kl(*left, eps, 0.5, 1.0, 0.1),
        ),
    ]
    rtol = 1e-5 if dtype == torch.float32 else 1e-11
    for kl, expected in pairs:
        torch.testing.assert_close(kl.double(), expected, rtol=rtol, atol=0.0)
        grads = torch.autograd.grad(kl, (mu, rho), retain_graph=True)
        wanted = torch.autograd.grad(expected, left)
        for a, e in zip(grads, wanted, strict=True):
            assert not a[~kept].any()
            torch.testing.assert_close(a[kept].double(), e, rtol=10 * rtol, atol=10 * rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_least_finite_rho_is_not_pruned(dtype):
    rho = torch.full((3, 9), torch.finfo(dtype).min, dtype=dtype)
    rho[:, 1:], rho[1:] = -1.0, -math.inf
    rho.requires_grad_()
    mu = torch.ones_like(rho).requires_grad_()
    for kl in (
        ops.gaussian_kl(mu, rho),
        kl_ops.gaussian_kl_sum([(mu, rho, 1.0)]),
        ops.mixture_kl(mu, rho, ops.new_seed(1), STREAM),
    ):
        assert kl == torch.finfo(dtype).max
        by_mu, by_rho = torch.autograd.grad(kl, (mu, rho))
        assert by_mu[0, 0] == 1 and by_rho[0, 0] == -1


@pytest.mark.parametrize("highest", [-1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pruned_weights_have_no_gradient(highest, dtype):
    """Whatever their mean is, by the ops alone."""
    rho = torch.linspace(-6, highest, 300, dtype=dtype)
    pruned = torch.arange(300) % 3 == 0
    rho[pruned] = -math.inf
    mu = torch.linspace(1, 2, 300, dtype=dtype).requires_grad_()
    rho.requires_grad_()
    seed = ops.new_seed(1)
    for kl in (
        ops.gaussian_kl(mu, rho, 0.7),
        kl_ops.gaussian_kl_sum([(mu, rho, 0.7), (mu, rho, 0.7)]),
        ops.mixture_kl(mu, rho, seed, STREAM, 2, pi=0.5, std1=1.0, std2=0.1),
    ):
        for grad in torch.autograd.grad(kl, (mu, rho)):
            assert not grad[pruned].any() and grad[~pruned].all()


@pytest.mark.parametrize("shape", [(1,), (130,), (7, 5), (33, 129)], ids=str)
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixture_matches_reference(shape, T, dtype, device, assert_close):
    inputs = make(shape, dtype, device)
    seed = ops.new_seed(-1, 2**33 + 4, device)
    inputs64 = [t.detach().double().requires_grad_() for t in inputs]
    kl = ops.mixture_kl(*inputs, seed, STREAM, T, **MIXTURE)
    eps = noise(seed, T, shape).double()
    expected = reference.mixture_kl(*inputs64, eps, *MIXTURE.values())
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-4)
    for a, e in zip(
        torch.autograd.grad(kl, inputs), torch.autograd.grad(expected, inputs64), strict=True
    ):
        # The gradient is by_w * eps: where w is near a mode of width e^-6,
        # rounding of w is magnified.
        assert_close(a, e, scale=max(1.0, float(e.abs().max())) * 20)


def test_mixture_takes_a_strided_seed():
    mu, rho = make((6, 7), torch.float64)
    seed = torch.stack([ops.new_seed(6), ops.new_seed(7)], 1)[:, 0]
    expected = ops.mixture_kl(mu, rho, ops.new_seed(6), 0, **MIXTURE)
    assert not seed.is_contiguous()
    assert torch.equal(ops.mixture_kl(mu, rho, seed, 0, **MIXTURE), expected)


def test_strided_parameters():
    mu, rho = torch.randn(2, 5, 3).transpose(1, 2)
    for divergence in (
        ops.gaussian_kl,
        lambda mu, rho: kl_ops.gaussian_kl_sum([(mu, rho, 0.5)]),
        lambda mu, rho: ops.mixture_kl(mu, rho, 6, 0, **MIXTURE),
    ):
        assert torch.equal(divergence(mu, rho), divergence(mu.contiguous(), rho.contiguous()))


def test_gaussian_is_the_integral():
    mu, rho, std = 0.3, -1.2, 0.7
    sigma = math.log1p(math.exp(rho))

    def integrand(w):
        q = math.exp(-0.5 * ((w - mu) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return q * (math.log(std / sigma) - 0.5 * ((w - mu) / sigma) ** 2 + 0.5 * (w / std) ** 2)

    expected, _ = quad(integrand, mu - 12 * sigma, mu + 12 * sigma, epsabs=1e-12)
    actual = ops.gaussian_kl(torch.tensor([mu]).double(), torch.tensor([rho]).double(), std)
    assert abs(float(actual) - expected) < 1e-6


def test_mixture_mean_is_the_integral():
    """200,000 samples of one weight: 5 standard errors of the mean find a bias of 0.03 nats."""
    mu, rho = torch.tensor([0.02]).double(), torch.tensor([-4.0]).double()
    sigma = float(reference.softplus(rho))
    T = 200_000

    def density(w, mean, std):
        return math.exp(-0.5 * ((w - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))

    def term(w):
        p = MIXTURE["pi"] * density(w, 0, MIXTURE["std1"])
        p += (1 - MIXTURE["pi"]) * density(w, 0, MIXTURE["std2"])
        return math.log(density(w, float(mu), sigma)) - math.log(p)

    low, high = float(mu) - 10 * sigma, float(mu) + 10 * sigma
    expected, _ = quad(lambda w: density(w, float(mu), sigma) * term(w), low, high, limit=400)
    second, _ = quad(lambda w: density(w, float(mu), sigma) * term(w) ** 2, low, high, limit=400)
    error = math.sqrt((second - expected**2) / T)
    actual = float(ops.mixture_kl(mu, rho, ops.new_seed(0), STREAM, T, **MIXTURE))
    assert abs(actual - expected) < 5 * error < 0.03


def test_gaussian_is_zero_only_at_the_prior():
    rho = torch.full((50,), math.log(math.expm1(0.7)), dtype=torch.float64)
    assert abs(float(ops.gaussian_kl(torch.zeros(50).double(), rho, 0.7))) < 1e-6
    mu, rho = make((50,))
    assert ops.gaussian_kl(mu, rho, 0.7).item() > 0


def test_mixture_far_in_the_tail():
    """At w = 200 both densities underflow; the logarithm and its slope do not."""
    for dtype in (torch.float32, torch.float64):
        mu = torch.full((3,), 200.0, dtype=dtype, requires_grad=True)
        rho = torch.full((3,), -5.0, dtype=dtype, requires_grad=True)
        kl = ops.mixture_kl(mu, rho, ops.new_seed(0), STREAM, pi=0.5, std1=0.1, std2=0.01)
        grad_mu, grad_rho = torch.autograd.grad(kl, (mu, rho))
        assert kl.isfinite() and grad_rho.isfinite().all()
        torch.testing.assert_close(grad_mu, torch.full_like(mu, 200 / 0.1**2), rtol=1e-2, atol=0.0)


def test_mixture_where_squares_overflow():
    """At w = 1e30 the divergence is infinite in float32; its slope is not."""
    mu = torch.tensor([1e30, -1e30], requires_grad=True)
    rho = torch.full((2,), -5.0, requires_grad=True)
    kl = ops.mixture_kl(mu, rho, ops.new_seed(0), STREAM, pi=0.5, std1=1.0, std2=0.01)
    (grad,) = torch.autograd.grad(kl, mu)
    assert kl.item() == math.inf
    torch.testing.assert_close(grad, mu.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stds", [(1.0, math.exp(-6)), (1.0, math.exp(-8)), (math.exp(-6), 1.0)])
def test_mixture_gradient_where_the_narrow_component_fades(stds, dtype):
    """Every weight by itself, up to 9 of its deviations: its share falls to 1e-17,
    its precision is 1e5 to 1e7."""
    mu = (torch.linspace(0.01, 9, 900, dtype=torch.float64) * min(stds)).to(dtype).requires_grad_()
    rho = torch.full_like(mu, -100.0)
    kl = ops.mixture_kl(mu, rho, ops.new_seed(0), 0, pi=0.5, std1=stds[0], std2=stds[1])
    w = mu.detach().double().requires_grad_()
    terms = [math.log(0.5 / std) - w**2 / (2 * std**2) for std in stds]
    expected = -torch.logsumexp(torch.stack(terms), 0).sum()
    (grad,), (wanted,) = torch.autograd.grad(kl, mu), torch.autograd.grad(expected, w)
    # A share is exp of up to 45, rounded to 4e-6 of itself in float32.
    rtol = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(grad.double(), wanted, rtol=rtol, atol=0)


def test_mixture_of_rows_longer_than_a_slice(device):
    mu, rho = make((2, 8200), torch.float32, device)
    seed = ops.new_seed(-1, 2**33 + 4, device)
    eps = noise(seed, 1, (2, 8200)).double()
    expected = reference.mixture_kl(mu.double(), rho.double(), eps, *MIXTURE.values())
    kl = ops.mixture_kl(mu, rho, seed, STREAM, 1, **MIXTURE)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rho", [-100.0, -60.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rho(rho, dtype):
    """log sigma is rho far below 0, whose slope is 1; sigma itself may underflow."""
    mu = torch.zeros(4, dtype=dtype, requires_grad=True)
    spread = torch.full((4,), rho, dtype=dtype, requires_grad=True)
    sigma = max(rho, 0.0)
    kl = ops.gaussian_kl(mu, spread, 1.0)
    expected = 4 * (-(math.log(sigma) if sigma else rho) + sigma**2 / 2 - 0.5)
    assert kl.item() == pytest.approx(expected, rel=1e-6)
    _, grad = torch.autograd.grad(kl, (mu, spread))
    slope = sigma - 1 / sigma if sigma else -1.0
    torch.testing.assert_close(grad, torch.full_like(grad, slope), rtol=1e-5, atol=1e-5)
    kl = ops.mixture_kl(mu, spread, ops.new_seed(0), STREAM, **MIXTURE)
    assert all(t.isfinite().all() for t in (kl, *torch.autograd.grad(kl, (mu, spread))))


def test_mixture_of_one_component_is_that_gaussian():
    mu, rho = make((20, 17))
    seed = ops.new_seed(2)
    both = [
        ops.mixture_kl(mu, rho, seed, STREAM, 2, pi=pi, std1=s1, std2=s2)
        for pi, s1, s2 in ((1.0, 0.5, 0.1), (0.0, 3.0, 0.5))
    ]
    expected = reference.mixture_kl(mu, rho, noise(seed, 2, (20, 17)).double(), 1.0, 0.5, 1.0)
    for kl in both:
        torch.testing.assert_close(kl, expected, rtol=1e-6, atol=1e-6)


def test_gradcheck():
    mu, rho = make((4, 3))
    assert torch.autograd.gradcheck(lambda m, r: ops.gaussian_kl(m, r, 0.7), (mu, rho))
    seed = ops.new_seed(0)
    mixture = dict(pi=0.3, std1=1.0, std2=0.2)
    assert torch.autograd.gradcheck(
        lambda m, r: ops.mixture_kl(m, r, seed, STREAM, 2, **mixture), (mu, rho)
    )


@pytest.mark.parametrize("shape", [(0,), (5,), (6, 7)], ids=str)
@pytest.mark.filterwarnings("ignore")  # torch's own, inside opcheck
def test_opcheck(shape, device):
    mu, rho = make(shape, torch.float32, device)
    torch.library.opcheck(torch.ops.bnuq.gaussian_kl.default, (mu, rho, 0.7))
    args = (mu, rho, ops.new_seed(0, 0, device), STREAM, 2, *MIXTURE.values())
    torch.library.opcheck(torch.ops.bnuq.mixture_kl.default, args)


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its compiler
def test_compiles_whole():
    mu, rho = make((6, 7), torch.float32)
    seed = ops.new_seed(0)

    def both(m, r):
        return ops.gaussian_kl(m, r, 0.7) + ops.mixture_kl(m, r, seed, STREAM, 2, **MIXTURE)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mu, rho), both(mu, rho))


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its exporter
def test_exports():
    class Divergence(torch.nn.Module):
        def forward(self, mu, rho, seed):
            kl = ops.mixture_kl(mu, rho, seed, STREAM, 2, **MIXTURE)
            return ops.gaussian_kl(mu, rho, 0.7) + kl

    args = (*(t.detach() for t in make((6, 7))), ops.new_seed(0))
    exported = torch.export.export(Divergence(), args, strict=False).module()
    assert torch.equal(exported(*args), Divergence()(*args))


def test_does_not_depend_on_threads(set_threads):
    mu, rho = make((300, 200), torch.float32)
    results = []
    for count in (1, 2, 3):
        set_threads(count)
        kl = ops.gaussian_kl(mu, rho, 1.0) + ops.mixture_kl(mu, rho, ops.new_seed(0), 0, **MIXTURE)
        results.append([kl.detach(), *torch.autograd.grad(kl, (mu, rho))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype,std2", [(torch.float32, 5.43e-20), (torch.float64, 7.46e-155)])
def test_mixture_gradients_are_finite_with_the_least_std(dtype, std2, device):
    mu, rho = (torch.full((4,), v, dtype=dtype, device=device, requires_grad=True) for v in (0.3, -3.0))  # fmt: skip
    noise = ops.new_seed(0, device=device), STREAM
    kl = ops.mixture_kl(mu, rho, *noise, pi=0.5, std1=1.0, std2=std2)
    expected = ops.mixture_kl(mu, rho, *noise, pi=1.0, std1=1.0, std2=1.0)  # the broad component's
    for a, e in zip(*(torch.autograd.grad(k, (mu, rho)) for k in (kl, expected)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (0,)])
def test_of_no_weights_is_nothing(shape, device):
    mu, rho = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    kl = ops.mixture_kl(mu, rho, ops.new_seed(0, device=device), STREAM, 2)
    assert kl == 0 and ops.gaussian_kl(mu, rho) == 0
    assert [g.shape for g in torch.autograd.grad(kl, (mu, rho))] == [mu.shape, mu.shape]


def test_a_long_row_is_summed_as_exactly_as_a_short_one(device):
    """Its sums in float32 alone would be off by 2e-5."""
    single, double = (
        torch.full((1, 2**21), -3.0, dtype=d, device=device) for d in (torch.float32, torch.float64)
    )
    seed = ops.new_seed(6, device=device)
    actual = ops.mixture_kl(single, single, seed, STREAM, 1, **MIXTURE)
    expected = ops.mixture_kl(double, double, seed, STREAM, 1, **MIXTURE)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layers", [1, 2, 70])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float32, torch.float64)])
def test_sum_over_layers_is_the_sum_of_each(dtypes, layers, device):
    """Of 70 layers, three launches on CUDA."""
    pairs = [make([(5, 3), (7,), (300,)][k % 3], dtypes[k % 2], device) for k in range(layers)]
    stds = [0.7 + 0.01 * k for k in range(layers)]
    total = kl_ops.gaussian_kl_sum([(*pair, std) for pair, std in zip(pairs, stds, strict=True)])
    parts = [ops.gaussian_kl(*pair, std).double() for pair, std in zip(pairs, stds, strict=True)]
    assert total.dtype == dtypes[0] and total.device == pairs[0][0].device
    torch.testing.assert_close(total.double(), sum(parts), rtol=1e-6, atol=1e-6)
    tensors = [t for pair in pairs for t in pair]
    expected = torch.autograd.grad(sum(3 * part for part in parts), tensors)
    for a, e in zip(torch.autograd.grad(3 * total, tensors), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7)
