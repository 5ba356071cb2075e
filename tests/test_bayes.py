"""The Bayesian linear layer, priors and to_bayesian."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, softplus

import bnuq_ext as bnuq
from bnuq_ext import ops


def layer(*args, **kwargs):
    torch.manual_seed(0)
    return bnuq.BayesLinear(*(args or (5, 3)), **({"rho_init": -1.0} | kwargs))


def x(rows=7, features=5):
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(2))


def predict(model, inputs, num_samples=6, **kwargs):
    arguments = dict(likelihood="gaussian", num_samples=num_samples, seed=1, keep_samples=True)
    return bnuq.predict(model, inputs, **(arguments | kwargs)).samples


def test_eval_uses_the_posterior_mean():
    m = layer().eval()
    torch.testing.assert_close(m(x()), linear(x(), m.weight_mu, m.bias_mu))


def test_train_draws_a_fresh_sample_from_torchs_generator():
    m = layer()
    torch.manual_seed(3)
    first, second = m(x()), m(x())
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, m(x()))
    first.sum().backward()
    assert m.weight_rho.grad.abs().sum() > 0


def test_one_weight_matrix_serves_all_rows():
    m = layer()
    rows = x(1).expand(4, 5)
    y = m(rows)
    torch.testing.assert_close(y, y[:1].expand(4, 3))


def test_replicas_have_the_noise_of_philox_normal():
    m = layer()
    samples = predict(m, x())
    eps = ops.philox_normal(ops.new_seed(1), 0, (6, 3, 5))
    bias_eps = ops.philox_normal(ops.new_seed(1), 0, (6, 3), tag="bias")
    weight = m.weight_mu + softplus(m.weight_rho) * eps
    bias = m.bias_mu + softplus(m.bias_rho) * bias_eps
    expected = torch.einsum("ni,toi->tno", x(), weight) + bias[:, None]
    torch.testing.assert_close(samples, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["exact", "local"])
@pytest.mark.parametrize("bias", [True, False])
def test_strategies_agree(estimator, bias):
    torch.manual_seed(0)
    kwargs = dict(bias=bias, rho_init=-2.0, estimator=estimator)
    model = nn.Sequential(
        nn.Linear(5, 8),
        bnuq.BayesLinear(8, 16, **kwargs),
        nn.ReLU(),
        bnuq.BayesLinear(16, 4, **kwargs),
    )
    runs = [predict(model, x(), strategy=s, chunk=c) for s in ("loop", "folded") for c in (1, 4, 6)]
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=1e-5, atol=1e-6)
    second_half = predict(model, x(), num_samples=3, first_replica=3)
    torch.testing.assert_close(second_half, runs[0][3:], rtol=1e-5, atol=1e-6)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = bnuq.BayesLinear(5, 5, rho_init=-2.0), nn.BatchNorm1d(5)
        self.b, self.drop = bnuq.BayesLinear(5, 5, rho_init=-2.0), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.b(self.norm(self.a(x)).relu()))


def test_composes_with_stochastic_batch_norm_dropout_and_residuals():
    torch.manual_seed(0)
    model = bnuq.convert(Residual())
    bnuq.collect(model, [torch.randn(16, 5) for _ in range(6)], progress=False)
    loop, folded = (predict(model, x(), strategy=s) for s in ("loop", "auto"))
    torch.testing.assert_close(folded, loop, rtol=1e-5, atol=1e-6)
    assert folded.std(0).min() > 0


def test_trailing_dimensions_are_like_nn_linear():
    m = layer().eval()
    y = m(x(12).view(3, 4, 5))
    torch.testing.assert_close(y, linear(x(12), m.weight_mu, m.bias_mu).view(3, 4, 3))
    loop, folded = (predict(m, x(12).view(3, 4, 5), strategy=s) for s in ("loop", "folded"))
    assert folded.shape == (6, 3, 4, 3)
    torch.testing.assert_close(folded, loop, rtol=1e-5, atol=1e-6)


def test_local_estimator_has_the_exact_ones_marginals():
    """Mean and variance of each output over 20,000 replicas, within 5 standard errors: a mean off
    by 0.035 standard deviations or a variance by 5 % is found; a right one refused once in 10^6."""
    m = layer(estimator="local")
    with torch.no_grad():
        m.weight_rho.normal_(-1)
    T, inputs = 20_000, x(2)
    samples = predict(m, inputs, T).double()
    mean = linear(inputs, m.weight_mu, m.bias_mu).detach().double()
    var = linear(inputs.square(), softplus(m.weight_rho).square(), softplus(m.bias_rho).square())
    var = var.detach().double()
    assert ((samples.mean(0) - mean).abs() < 5 * (var / T).sqrt()).all()
    assert ((samples.var(0) / var - 1).abs() < 5 * (2 / T) ** 0.5).all()
    rows = predict(m, inputs[:1].expand(2, 5), 100)
    assert not torch.equal(rows[:, 0], rows[:, 1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_dtype", [torch.float16, torch.float32, torch.float64])
def test_local_estimator_is_its_formula(input_dtype, bias):
    m = layer(estimator="local", bias=bias, dtype=ops.checks.acc_dtype(input_dtype))
    with torch.no_grad():
        m.weight_rho.normal_(-1)
    inputs = x().to(input_dtype)
    with torch.no_grad(), bnuq.replicas(m, 6, seed=-1):
        y = m(inputs)
    mu, sigma = m.weight_mu.detach().double(), softplus(m.weight_rho.detach().double())
    mean, var = inputs.double() @ mu.T, inputs.double().square() @ sigma.square().T
    if bias:
        mean = mean + m.bias_mu.detach()
        var = var + softplus(m.bias_rho.detach().double()).square()
    eps = ops.philox_normal(ops.new_seed(-1), 0, (6, 7, 3), tag="local").double()
    expected = (mean + var.sqrt() * eps).flatten(0, 1)
    assert y.dtype == input_dtype
    off = 4 * torch.finfo(input_dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=off, atol=4 * off)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_local_estimator_keeps_its_spread_under_autocast(dtype):
    m = layer(estimator="local", rho_init=-10.0)  # sigma^2 is 2e-9: 0 in float16
    inputs = (400 * x()).to(dtype).float()  # and x^2 is infinite there
    for train in (False, True):
        m.train(train)
        with bnuq.replicas(m, 6, seed=-1):
            expected = m(inputs).to(dtype)
            with torch.autocast("cpu", dtype):
                assert torch.equal(m(inputs), expected)


def test_local_estimator_without_spread_has_finite_gradients():
    m = layer(estimator="local", rho_init=-200.0)
    m(x()).sum().backward()
    assert all(p.grad.isfinite().all() for p in m.parameters())


def test_state_survives_copies_and_checkpoints():
    m = layer()
    bnuq.prune(m, 0.4)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(predict(other, x()), predict(m, x()))
    fresh, state = layer(), m.state_dict()
    fresh.load_state_dict(state)
    assert torch.equal(predict(fresh, x()), predict(m, x()))
    state["weight_mask"].logical_not_()  # the checkpoint's own
    assert torch.equal(fresh.weight_mask, ~m.weight_mask)
    m.weight_mask.logical_not_()
    plain = layer()
    m.load_state_dict(plain.state_dict())
    assert m.weight_mask is None and torch.equal(predict(m, x()), predict(plain, x()))


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its compiler
def test_compiled_equals_eager():
    m = nn.Sequential(layer(), nn.ReLU()).eval()
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x()), m(x()))


def test_initialisation():
    m = layer(40, 50, mu_init=(-0.2, 0.2), rho_init=(-5.0, -4.0))
    assert m.weight_mu.min() >= -0.2 and m.weight_mu.max() <= 0.2 and m.weight_mu.std() > 0.1
    assert m.weight_rho.min() >= -5 and m.weight_rho.max() <= -4 and m.weight_rho.std() > 0.2
    default = layer(40, 50)
    assert 0.98 * 40**-0.5 < default.weight_mu.abs().max() <= 40**-0.5
    assert (default.weight_rho == -1).all() and (default.bias_rho == -1).all()


@pytest.mark.parametrize(
    "args,kwargs,error,message",
    [
        ((0, 3), {}, ValueError, "BayesLinear: in_features must be at least 1, got 0"),
        ((3, -1), {}, ValueError, "BayesLinear: out_features must be at least 1, got -1"),
        ((3, 3), dict(prior="wide"), TypeError, "BayesLinear: prior must be GaussianPrior"),
        ((3, 3), dict(estimator="flipout"), ValueError, "estimator must be one of exact, local"),
        ((3, 3), dict(dtype=torch.float16), TypeError, "dtype must be float32 or float64"),
        ((3, 3), dict(device="gpu"), ValueError, "BayesLinear: device must name a torch device"),
    ],
)
def test_rejects(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        bnuq.BayesLinear(*args, **kwargs)


def test_a_default_dtype_of_16_bits_is_refused():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(TypeError, match="^BayesLinear: dtype must be float32 or float64, got"):
            bnuq.BayesLinear(3, 2)
        assert bnuq.BayesLinear(3, 2, dtype=torch.float32).weight_mu.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_mixture_is_blundell_s_narrow_one():
    assert bnuq.ScaleMixturePrior() == bnuq.ScaleMixturePrior(0.5, 1.0, math.exp(-6))
    mu, rho, seed = torch.randn(5, 3), torch.randn(5, 3) - 2, ops.new_seed(0)
    expected = ops.mixture_kl(mu, rho, seed, 0, pi=0.5, std1=1.0, std2=math.exp(-6))
    assert torch.equal(ops.mixture_kl(mu, rho, seed, 0), expected)


@pytest.mark.parametrize("training", [False, True])
def test_rejects_an_input_elsewhere(training):
    layer = bnuq.BayesLinear(3, 2).train(training)
    with pytest.raises(
        ValueError, match="BayesLinear: x must be on cpu like the weights, got meta"
    ):
        layer(torch.ones(4, 3, device="meta"))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rejects_an_input_that_is_not_dense(training):
    layer = bnuq.BayesLinear(3, 2).train(training)
    nested = torch.nested.nested_tensor([torch.ones(4, 3), torch.ones(2, 3)])
    for x, got in ((nested, "a nested one"), (torch.ones(4, 3).to_sparse(), "torch.sparse_coo")):
        with pytest.raises(TypeError, match=f"BayesLinear: x must be a dense tensor, got {got}"):
            layer(x)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: bnuq.GaussianPrior(0.0), "GaussianPrior: std must be positive, got 0.0"),
        (lambda: bnuq.ScaleMixturePrior(1.2), r"pi must lie in \[0, 1\], got 1.2"),
        (lambda: bnuq.ScaleMixturePrior(0.5, 1.0, 0.0), "std2 must be positive, got 0.0"),
        (
            lambda: bnuq.ScaleMixturePrior(0.5, 0.1, 1.0),
            "std1 must be at least std2 = 1.0, got 0.1",
        ),
    ],
)
def test_priors_reject(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sampler_needs_batch_norm():
    with pytest.raises(ValueError, match='must contain stochastic batch norm for sampler "joint"'):
        bnuq.predict(layer(), x(), likelihood="gaussian", sampler="joint")


# ---- to_bayesian
# -----------------------------------------------------------------------------------


def trained():
    torch.manual_seed(0)
    shared = nn.Linear(5, 5)
    return nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(5, 2, bias=False))


def test_to_bayesian_keeps_the_function_and_shared_layers():
    model = trained().eval()
    made = bnuq.to_bayesian(model, rho_init=-4.0, prior=bnuq.GaussianPrior(0.3))
    torch.testing.assert_close(made(x()), model(x()))
    assert isinstance(made[0], bnuq.BayesLinear) and made[0] is made[2] and made[3].bias_mu is None
    assert type(model[0]) is nn.Linear and made[0].prior == bnuq.GaussianPrior(0.3)
    assert (made[3].weight_rho == -4).all() and not made.training
    assert predict(made, x()).std(0).min() > 0


def test_to_bayesian_chooses_layers_and_takes_a_root():
    made = bnuq.to_bayesian(trained(), filter_fn=lambda name, m: name == "3")
    assert type(made[0]) is nn.Linear and isinstance(made[3], bnuq.BayesLinear)
    assert isinstance(bnuq.to_bayesian(nn.Linear(3, 2)), bnuq.BayesLinear)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda: bnuq.to_bayesian(nn.ReLU()), ValueError, "model must contain a torch.nn.Linear"),
        (lambda: bnuq.to_bayesian(3), TypeError, "model must be a torch.nn.Module, got int"),
        (lambda: bnuq.to_bayesian(trained(), 3), TypeError, "filter_fn must be callable, got int"),
        (lambda: bnuq.to_bayesian(trained(), prior=3), TypeError, "prior must be GaussianPrior"),
    ],
)
def test_to_bayesian_rejects(call, error, message):
    with pytest.raises(error, match=f"to_bayesian: {message}"):
        call()
