"""bayes_linear against plain PyTorch fed with its noise."""

import pytest
import torch
from drawn import layer_noise
from torch.utils.checkpoint import checkpoint

from bnuq_ext import ops, reference

STREAM = 2**31 + 5  # needs its 32 bits
FEW = 4  # up to so many rows a replica, the CPU writes no weights out
LARGE = [(FEW + 1, 784, 270), (100, 129, 131)]  # from 2^20 multiplications on, oneDNN may take them


def make(N, I, O, T, shared, dtype=torch.float64, device="cpu", bias=True):  # noqa: E741
    generator = torch.Generator().manual_seed(N * 1000 + I * 10 + O)
    acc = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape, dtype=acc):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    x = draw(N, I, dtype=dtype) if shared else draw(T, N, I, dtype=dtype)
    mu, rho = draw(O, I), draw(O, I)
    return [x, mu, rho, *((draw(O), draw(O)) if bias else (None, None))]


def run(inputs, seed, T):
    return ops.bayes_linear(*inputs, seed=seed, stream=STREAM, num_samples=T)


def grads(y, inputs, grad_y):
    wanted = [t for t in inputs if t is not None]
    return torch.autograd.grad(y, wanted, grad_y)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("T", [1, 3, 20])
@pytest.mark.parametrize(
    "N,I,O",
    [
        *((1, 1, 1), (1, 784, 7), (FEW, 17, 129), (FEW + 1, 129, 1), (7, 7, 16), (33, 130, 31)),
        *((6, 80, 17), (6, 81, 17), (2, 100, 17)),  # about where rows are wide
        *LARGE,
    ],
)
def test_matches_reference(N, I, O, T, shared, bias, device, assert_close):  # noqa: E741
    inputs = make(N, I, O, T, shared, torch.float32, device, bias)
    seed = ops.new_seed(-3, 2**33 + 7, device)
    inputs64 = [t if t is None else t.detach().double().requires_grad_() for t in inputs]
    y = run(inputs, seed, T)
    expected = reference.bayes_linear(*inputs64, *layer_noise(seed, STREAM, T, O, I))
    # The fused kernel's operands have 16 bits: 2^-11 where float32 has 2e-5.
    scale = max(1.0, (T * N * I) ** 0.5) * (100 if device.type == "cuda" else 1)
    assert y.shape == (T, N, O)
    assert_close(y, expected, scale=scale)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(device)
    pairs = zip(grads(y, inputs, grad_y), grads(expected, inputs64, grad_y.double()), strict=True)
    for actual, wanted in pairs:
        assert_close(actual, wanted, scale=scale * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("N,I,O", LARGE)
def test_large_products_in_float64(N, I, O, T, shared):  # noqa: E741
    inputs, seed = make(N, I, O, T, shared), ops.new_seed(4)
    inputs64 = [t.detach().requires_grad_() for t in inputs]
    y, expected = (
        run(inputs, seed, T),
        reference.bayes_linear(*inputs64, *layer_noise(seed, STREAM, T, O, I)),
    )
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).double()
    mine, wanted = grads(y, inputs, grad_y), grads(expected, inputs64, grad_y)
    torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("N", [2, FEW + 3])
def test_dtypes(N, dtype, device, assert_close):
    T, I, O = 3, 65, 18  # noqa: E741
    inputs = make(N, I, O, T, False, dtype, device)
    seed = ops.new_seed(1, 0, device)
    y = run(inputs, seed, T)
    inputs64 = [t.detach().double().requires_grad_() for t in inputs]
    expected = reference.bayes_linear(*inputs64, *layer_noise(seed, STREAM, T, O, I))
    assert y.dtype == dtype
    scale = 30 * (20 if device.type == "cuda" else 1)
    assert_close(y, expected, scale=scale)
    grad_y = torch.ones_like(y)
    pairs = zip(grads(y, inputs, grad_y), grads(expected, inputs64, grad_y.double()), strict=True)
    for tensor, (actual, wanted) in zip(inputs, pairs, strict=True):
        assert actual.dtype == tensor.dtype
        assert_close(actual, wanted, scale=scale)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("N", [2, FEW + 2])
@pytest.mark.parametrize("T", [1, 2])
def test_gradcheck(T, N, shared, bias):
    inputs = [t for t in make(N, 5, 3, T, shared, bias=bias)]
    seed = ops.new_seed(11)
    wanted = [t for t in inputs if t is not None]
    pad = [None] * (5 - len(wanted))
    assert torch.autograd.gradcheck(lambda *a: run([*a, *pad], seed, T), wanted)


@pytest.mark.parametrize("N", [2, FEW + 2])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.filterwarnings("ignore")  # torch's own, inside opcheck
def test_opcheck(T, N, device):
    for shared in (True, False):
        x, mu, rho, bias_mu, bias_rho = make(N, 20, 18, T, shared, torch.float32, device)
        args = (x, mu, rho, bias_mu, bias_rho, ops.new_seed(0, 0, device), STREAM, T)
        torch.library.opcheck(torch.ops.bnuq.bayes_linear.default, args)


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_results_of_the_backward_share_no_memory(needs, device):
    """Not even those that are not needed, and empty: torch's compiler relies on it."""
    x, mu, rho, _, bias_rho = (
        t.detach() for t in make(FEW + 2, 20, 18, 2, True, torch.float32, device)
    )
    grad_y = torch.randn(2, FEW + 2, 18, device=device)
    args = (grad_y, x, mu, rho, bias_rho, ops.new_seed(0, 0, device), STREAM, 2, *needs)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.bnuq.bayes_linear_backward.default, args, test_utils=tests)


@pytest.mark.parametrize("T", [1, 3])
def test_the_registered_rule_gives_the_same(T, device):
    inputs, seed = make(FEW + 2, 20, 18, T, True, torch.float32, device), ops.new_seed(1, 0, device)
    y, registered = run(inputs, seed, T), torch.ops.bnuq.bayes_linear(*inputs, seed, STREAM, T)
    assert torch.equal(y, registered)
    grad_y = torch.randn_like(y)
    for a, e in zip(grads(y, inputs, grad_y), grads(registered, inputs, grad_y), strict=True):
        assert torch.equal(a, e)


@pytest.mark.filterwarnings("ignore")  # torch's own: it has no batching rule, and goes one by one
def test_vmap():
    _, mu, rho, *bias = make(FEW + 2, 20, 9, 2, True)
    xs, seed = torch.randn(3, FEW + 2, 20).double(), ops.new_seed(1)
    with torch.no_grad():
        actual = torch.vmap(lambda x: run([x, mu, rho, *bias], seed, 2))(xs)
        assert torch.equal(actual, torch.stack([run([x, mu, rho, *bias], seed, 2) for x in xs]))


@pytest.mark.parametrize("needed", range(5))
@pytest.mark.parametrize("T", [1, 2])
def test_each_gradient_alone(T, needed):
    inputs = make(FEW + 2, 20, 9, T, True)
    full = grads(run(inputs, ops.new_seed(2), T), inputs, torch.ones(T, FEW + 2, 9).double())
    alone = [t.detach().requires_grad_(k == needed) for k, t in enumerate(inputs)]
    (actual,) = torch.autograd.grad(run(alone, ops.new_seed(2), T).sum(), [alone[needed]])
    torch.testing.assert_close(actual, full[needed])


def test_several_samples_before_one_backward():
    """Noise kept in a buffer that the next sample refills would give the last sample's gradient."""
    inputs = make(FEW + 2, 20, 9, 1, True)
    seeds = [ops.new_seed(key) for key in range(4)]
    loss = sum(run(inputs, seed, 1).square().sum() for seed in seeds)
    actual = torch.autograd.grad(loss, inputs)
    inputs64 = [t.detach().requires_grad_() for t in inputs]
    expected = sum(
        reference.bayes_linear(*inputs64, *layer_noise(seed, STREAM, 1, 9, 20)).square().sum()
        for seed in seeds
    )
    for a, e in zip(actual, torch.autograd.grad(expected, inputs64), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("N", [1, 3, FEW + 5])
def test_replicas_are_numbered_globally(N, device, set_threads):
    set_threads(1)  # two share the sums of one product, and of several take one each
    inputs = make(N, 40, 33, 20, True, torch.float32, device)
    whole = run(inputs, ops.new_seed(9, 0, device), 20)
    for first in (0, 7, 19):
        part = run(inputs, ops.new_seed(9, first, device), 20 - first)
        if device.type == "cuda":  # how many warps share a sum depends on the number of replicas
            torch.testing.assert_close(part, whole[first:], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(part, whole[first:])


def test_checkpointing_recomputes_the_same_sample():
    inputs = make(FEW + 2, 20, 9, 2, True)
    seed = ops.new_seed(4)
    plain = torch.autograd.grad(run(inputs, seed, 2).square().sum(), inputs)
    again = checkpoint(lambda *a: run(a, seed, 2), *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.square().sum(), inputs), plain, strict=True):
        assert torch.equal(a, b)


def test_is_deterministic():
    inputs = make(FEW + 2, 300, 65, 4, True, torch.float32)
    first, second = (
        [y := run(inputs, ops.new_seed(1), 4), *torch.autograd.grad(y.sum(), inputs)]
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("N", [2, FEW + 2])
@pytest.mark.parametrize("T", [1, 2])
def test_accepts_strided_inputs(T, N):
    inputs = make(N, 20, 9, T, False)
    x, mu, rho = inputs[:3]
    strided = [
        x.transpose(0, 2).contiguous().transpose(0, 2),
        mu.t().contiguous().t(),
        rho.repeat(1, 2)[:, ::1][:, :20],
        *inputs[3:],
    ]
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    expected = run(inputs, ops.new_seed(6), T)
    torch.testing.assert_close(run(strided, ops.new_seed(6), T), expected)
    seed = torch.stack([ops.new_seed(6), ops.new_seed(7)], 1)[:, 0]
    assert not seed.is_contiguous() and torch.equal(run(inputs, seed, T), expected)


def in_steps(t):
    """The same values, of which memory holds every second one."""
    return torch.stack([t, t], -1)[..., 0]


def turned(t):
    """The same values, transposed in memory."""
    return in_steps(t) if t.dim() == 1 else t.mT.contiguous().mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("N", [2, FEW + 2])
@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("layout", [in_steps, turned])
def test_gradients_of_strided_inputs(layout, T, N, dtype):
    """An expanded gradient too, which is what a sum has."""
    x, *parameters = make(N, 20, 9, T, False)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [x.to(dtype), *(p.to(kind) for p in parameters)]
    strided = [layout(t) for t in inputs]
    weights = torch.linspace(-1, 1, 9, dtype=dtype)

    def gradients(given, expanded):
        leaves = [t.detach().requires_grad_() for t in given]
        y = run(leaves, ops.new_seed(6), T)
        grad = weights.expand_as(y)
        return torch.autograd.grad(y, leaves, grad if expanded else grad.contiguous())

    assert not any(t.is_contiguous() for t in strided)
    expected = gradients(inputs, False)
    for given, expanded in ((strided, False), (inputs, True), (strided, True)):
        for actual, wanted in zip(gradients(given, expanded), expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("T", [1, 2])
def test_extreme_rho(T, device):
    """sigma is rho at +100 and 0 at -100; nothing overflows."""
    x = torch.ones(FEW + 2, 8, device=device)
    seed = ops.new_seed(8, 0, device)
    for rho, sigma in ((100.0, 100.0), (-100.0, 0.0)):
        mu = torch.zeros(6, 8, device=device).requires_grad_()
        spread = torch.full_like(mu, rho).requires_grad_()
        y = ops.bayes_linear(x, mu, spread, seed=seed, stream=STREAM, num_samples=T)
        eps = ops.philox_normal(seed, STREAM, (T, 6, 8))
        # The fused kernel rounds eps and sigma * eps to 11 bits; eps is below 4 here.
        off = 8 * 4 * sigma * 2**-11 if device.type == "cuda" else 0.0
        expected = (sigma * eps.sum(-1))[:, None].expand_as(y)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 + off)
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [mu, spread]))


@pytest.mark.parametrize("shared", [True, False])
def test_moments(shared):
    """Mean and variance of an output over 20,000 replicas; each bound is 5 standard errors, so a
    wrong mean of 0.035 sigma or variance of 5 % is found, and a right one refused once in 10^6."""
    T, N, I, O = 20_000, 2, 6, 3  # noqa: E741
    x, mu, rho, bias_mu, bias_rho = (t.detach() for t in make(N, I, O, 1, True))
    y = run([x if shared else x.expand(T, N, I), mu, rho, bias_mu, bias_rho], ops.new_seed(0), T)
    sigma, bias_sigma = reference.softplus(rho), reference.softplus(bias_rho)
    mean, var = x @ mu.T + bias_mu, x.square() @ sigma.square().T + bias_sigma.square()
    assert ((y.mean(0) - mean).abs() < 5 * (var / T).sqrt()).all()
    assert ((y.var(0) / var - 1).abs() < 5 * (2 / T) ** 0.5).all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")  # torch's own, inside its compiler
def test_compiles_whole(backend):
    inputs = make(FEW + 2, 20, 9, 3, True, torch.float32)
    seed = ops.new_seed(5)
    compiled = torch.compile(lambda *a: run(a, seed, 3).relu(), fullgraph=True, backend=backend)
    y, expected = compiled(*inputs), run(inputs, seed, 3).relu()
    torch.testing.assert_close(y, expected)
    for a, e in zip(
        torch.autograd.grad(y.sum(), inputs),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its exporter
def test_exports():
    class Layer(torch.nn.Module):
        def forward(self, x, mu, rho, seed):
            return ops.bayes_linear(x, mu, rho, seed=seed, stream=STREAM, num_samples=3)

    args = (torch.randn(7, 5), torch.randn(4, 5), torch.randn(4, 5), ops.new_seed(0))
    exported = torch.export.export(Layer(), args, strict=False).module()
    assert torch.equal(exported(*args), Layer()(*args))


@pytest.mark.parametrize("empty_dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("N,I,O", [(0, 5, 3), (3, 0, 4), (6, 5, 0), (0, 0, 0), (600, 0, 4)])
def test_empty(N, I, O, empty_dtype, device):  # noqa: E741
    inputs = make(N, I, O, 2, True, empty_dtype, device)
    y = run(inputs, ops.new_seed(0, 0, device), 2)
    assert y.shape == (2, N, O)
    for tensor, grad in zip(inputs, grads(y, inputs, torch.ones_like(y)), strict=True):
        assert grad.shape == tensor.shape


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its compiler
def test_compiles_without_features():
    inputs, seed = make(3, 0, 4, 2, True), ops.new_seed(0)
    compiled = torch.compile(lambda *a: run(a, seed, 2), fullgraph=True, backend="aot_eager")
    y = compiled(*inputs)
    for a, e in zip(
        grads(y, inputs, torch.ones_like(y)),
        grads(run(inputs, seed, 2), inputs, torch.ones_like(y)),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


REJECTED = [
    (dict(x=torch.zeros(2, 5, dtype=torch.long)), TypeError, "x must be float32, float16, bf"),
    (dict(x=torch.zeros(2, 5).to(torch.float8_e5m2)), TypeError, "x must be float32, float16, bf"),
    (dict(x=torch.zeros(5)), ValueError, r"x must have shape \(N, I\) or \(T, N, I\), got \[5\]"),
    (dict(x=torch.zeros(3, 2, 5)), ValueError, "x must hold 2 replicas, got 3"),
    (dict(x=torch.zeros(2, 4)), ValueError, "x must have 5 features, got 4"),
    (dict(mu=torch.zeros(5)), ValueError, r"mu must have shape \(O, I\), got \[5\]"),
    (dict(rho=None), TypeError, "rho must be a tensor, got NoneType"),
    (dict(rho=torch.zeros(3, 4)), ValueError, r"rho must have shape \[3, 5\], got \[3, 4\]"),
    (dict(rho=torch.zeros(3, 5).double()), TypeError, "rho must be torch.float32 for x in"),
    (dict(bias_rho=None), ValueError, "bias_rho must be given with its other half, got None"),
    (dict(bias_mu=torch.zeros(4)), ValueError, r"bias_mu must have shape \[3\], got \[4\]"),
    (dict(mu=torch.zeros(3, 5, device="meta")), ValueError, "mu must be on cpu, got meta"),
    (dict(seed=torch.zeros(2)), TypeError, "seed must be int64, got torch.float32"),
    (dict(seed=torch.zeros(3).long()), ValueError, r"seed must have shape \[2\], got \[3\]"),
    (dict(stream=-1), ValueError, r"stream must lie in \[0, 2\^32\), got -1"),
    (dict(stream=None), TypeError, "stream must be an integer, got None"),
    (dict(num_samples=0), ValueError, "num_samples must be at least 1, got 0"),
    (dict(num_samples="2"), TypeError, "num_samples must be an integer, got '2'"),
]


@pytest.mark.parametrize("change,error,message", REJECTED)
def test_rejects(change, error, message):
    arguments = dict(
        x=torch.zeros(2, 5), mu=torch.zeros(3, 5), rho=torch.zeros(3, 5), bias_mu=torch.zeros(3),
        bias_rho=torch.zeros(3), seed=ops.new_seed(0), stream=0, num_samples=2,
    )  # fmt: skip
    with pytest.raises(error, match=f"bayes_linear: {message}"):
        ops.bayes_linear(**(arguments | change))
