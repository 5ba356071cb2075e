"""BayesLinear in forwards of other shapes than rows by features: shared layers, inner dimensions,
one row, none; and its noise in each of the functions that draw it."""

import pytest
import torch
from drawn import layer_noise
from torch import nn
from torch.nn.functional import linear

import bnuq_ext as bnuq
from bnuq_ext import ops, reference
from bnuq_ext.ops.formulas import sigma_of

OPTIONS = dict(rho_init=-1.0, dtype=torch.float64)


def x(*shape):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def samples(model, inputs, num_samples=3, **kwargs):
    arguments = dict(likelihood="gaussian", num_samples=num_samples, seed=1, keep_samples=True)
    return bnuq.predict(model, inputs, **(arguments | kwargs)).samples


def by_hand(layer, rows, stream, num_samples=3):
    """(T, N, O) of rows (N, I) or (T, N, I), with the noise of seed 1."""
    noise = layer_noise(ops.new_seed(1), stream, num_samples, *layer.weight_mu.shape)
    parameters = (layer.weight_mu, layer.weight_rho, layer.bias_mu, layer.bias_rho)
    return reference.bayes_linear(rows, *parameters, *noise).detach()


class Shared(nn.Module):
    """One hidden layer, applied three times."""

    def __init__(self, estimator="exact"):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = bnuq.BayesLinear(5, 5, estimator=estimator, **OPTIONS)
        self.last = bnuq.BayesLinear(5, 2, **OPTIONS)

    def forward(self, h):
        for _ in range(3):
            h = self.hidden(h).tanh()
        return self.last(h)


@pytest.mark.parametrize("strategy", ["loop", "folded"])
def test_a_replica_of_a_shared_layer_has_one_weight_matrix(strategy):
    """A recurrent network has one set of weights for all steps, and so has each of its replicas."""
    model = Shared()
    h = x(4, 5)
    for _ in range(3):
        h = by_hand(model.hidden, h, 0).tanh()
    expected = by_hand(model.last, h, 1 << 16)
    torch.testing.assert_close(samples(model, x(4, 5), strategy=strategy), expected, rtol=1e-6, atol=1e-7)  # fmt: skip


def test_rows_of_their_own_noise_have_it_in_every_call():
    model = nn.Sequential(bnuq.BayesLinear(5, 5, estimator="local", **OPTIONS))
    twice = torch.nn.ModuleList([model[0]])
    twice.forward = lambda h: torch.cat([model[0](h), model[0](h)], 1)
    first, second = samples(twice, x(4, 5)).chunk(2, -1)
    assert not torch.isclose(first, second).any()


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (3, 4, 5), (2, 0, 5), (0, 4, 5), (2, 3, 4, 5)])
def test_inner_dimensions(shape):
    torch.manual_seed(0)
    layer = bnuq.BayesLinear(5, 2, **OPTIONS)
    expected = by_hand(layer, x(*shape).flatten(0, -2), 0).view(3, *shape[:-1], 2)
    for likelihood in ["gaussian", "categorical"][: 1 if 0 in shape[1:] else 2]:  # or no classes
        found = samples(layer, x(*shape), likelihood=likelihood)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert layer(x(*shape)).shape == (*shape[:-1], 2)
    mean = linear(x(*shape), layer.weight_mu, layer.bias_mu)
    torch.testing.assert_close(layer.eval()(x(*shape)), mean)


def test_a_single_row_is_like_nn_linear_s():
    layer = bnuq.BayesLinear(5, 2, **OPTIONS)
    torch.manual_seed(3)
    one = layer(x(5))
    torch.manual_seed(3)
    assert torch.equal(one, layer(x(1, 5))[0])
    assert layer.eval()(x(5)).shape == (2,)


@pytest.mark.parametrize("shape", [(10, 4), (4, 10), (5, 0), ()])
def test_other_features_are_refused(shape):
    """Ten rows of four features are forty numbers, but not eight rows of five."""
    layer = bnuq.BayesLinear(5, 2, **OPTIONS)
    got = r"\[10, 4\]|\[4, 10\]|\[5, 0\]|\[\]"
    with pytest.raises(ValueError, match=rf"BayesLinear: x must have shape \(N, \*, 5\), got ({got})"):  # fmt: skip
        layer(x(*shape))


def test_rows_without_a_batch_are_refused_in_a_pass():
    layer = bnuq.BayesLinear(5, 2, **OPTIONS)
    with pytest.raises(ValueError, match=r"BayesLinear: x must have shape \(N, \*, 5\), got \[5\]"):
        samples(layer, x(5))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floating_point_is_taken(training, dtype):
    """The posterior means are cast to what comes in: as integers they would be 0."""
    layer = bnuq.BayesLinear(5, 2, rho_init=-1.0).train(training)
    with pytest.raises(TypeError, match=rf"x must be a floating-point tensor, got {dtype}$"):
        layer(torch.ones(3, 5, dtype=dtype))
    with pytest.raises(TypeError, match="BayesLinear: x must be a tensor, got NoneType"):
        layer(None)


@pytest.mark.parametrize("estimator", ["exact", "local"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_dtype_than_the_weights_is_refused(dtype, estimator):
    other = torch.float64 if dtype == torch.float32 else torch.float32
    layer = bnuq.BayesLinear(5, 2, estimator=estimator, dtype=dtype)
    inputs, y = x(3, 5).to(other), torch.zeros(3, dtype=torch.long)
    calls = [
        lambda: layer.train()(inputs),
        lambda: layer.eval()(inputs),
        lambda: bnuq.predict(layer, inputs, likelihood="gaussian"),
        lambda: bnuq.elbo_loss(layer, inputs, y, batch_weight=1.0, num_samples=3),
    ]
    state = torch.get_rng_state()
    for call in calls:
        with pytest.raises(TypeError, match=f"^BayesLinear: x must be {dtype} like the weights, got {other}$"):  # fmt: skip
            call()
    with bnuq.replicas(layer, 2, seed=0), pytest.raises(TypeError, match="^BayesLinear: x must be"):
        layer(inputs)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_beside_float32_weights(dtype, training):
    layer = bnuq.BayesLinear(5, 2).train(training)
    assert layer(x(3, 5).to(dtype)).dtype == dtype


@pytest.mark.parametrize("training", [True, False])
def test_symbolic_trace_keeps_the_layers(training):
    model = nn.Sequential(bnuq.BayesLinear(5, 4, **OPTIONS), nn.Tanh()).train(training)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(samples(traced, x(3, 5)), samples(model, x(3, 5)))
    torch.testing.assert_close(traced.eval()(x(3, 5)), model.eval()(x(3, 5)), rtol=0, atol=0)
    assert not torch.equal(traced.train()(x(3, 5)), traced(x(3, 5)))


@pytest.mark.parametrize("prior", [bnuq.GaussianPrior(0.5), bnuq.ScaleMixturePrior(0.5, 1.0, 0.1)])
def test_divergence_of_a_pruned_layer_is_that_of_the_weights_that_are_left(prior):
    """At the very weights of the forward, in a mixture; and the gradients of the others are 0."""
    torch.manual_seed(0)
    layer = bnuq.BayesLinear(5, 4, prior=prior, **OPTIONS)
    bnuq.prune(layer, 0.4)
    with bnuq.replicas(layer, 3, seed=1):
        layer(x(2, 5))
        kl = bnuq.kl_divergence(layer)
    expected, mask = 0.0, layer.weight_mask
    eps, bias_eps = layer_noise(ops.new_seed(1), 0, 3, 4, 5)
    weight = (layer.weight_mu[mask], layer.weight_rho[mask])
    for parameters, noise in ((weight, eps[:, mask]), ((layer.bias_mu, layer.bias_rho), bias_eps)):
        if isinstance(prior, bnuq.GaussianPrior):
            expected = expected + reference.gaussian_kl(*parameters, prior.std)
        else:
            expected = expected + reference.mixture_kl(*parameters, noise, prior.pi, prior.std1, prior.std2)  # fmt: skip
    torch.testing.assert_close(kl, expected, rtol=1e-6, atol=1e-6)
    parameters = list(layer.parameters())
    grads, wanted = (torch.autograd.grad(v, parameters) for v in (kl, expected))
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_without_the_layer_leaves_it_pruned():
    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), bnuq.BayesLinear(5, 2, **OPTIONS))
    bnuq.prune(model, 0.5)
    before = samples(model, x(3, 5))
    model.load_state_dict(model[0].state_dict(prefix="0."), strict=False)
    assert torch.equal(samples(model, x(3, 5)), before)


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its compiler
@pytest.mark.parametrize("prior", [bnuq.GaussianPrior(0.5), bnuq.ScaleMixturePrior(0.5, 1.0, 0.1)])
def test_a_training_step_compiles_whole(prior):
    """A sample of the weights and their divergence, with the gradients that eager has."""
    torch.manual_seed(0)
    options = OPTIONS | dict(prior=prior)
    model = nn.Sequential(bnuq.BayesLinear(5, 6, **options), nn.ReLU(), bnuq.BayesLinear(6, 2, **options))  # fmt: skip

    def loss(inputs):
        return model(inputs).square().mean() + 0.1 * bnuq.kl_divergence(model, 2, seed=3)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = []
    for step in (loss, compiled):
        torch.manual_seed(4)
        value = step(x(7, 5))
        found.append((value, *torch.autograd.grad(value, list(model.parameters()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


class Masking(nn.Module):
    """Writes into a slice of what a stochastic layer returns, and returns that."""

    def __init__(self, in_place: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.in_place = bnuq.BayesLinear(4, 3, rho_init=-1.0), in_place
        self.register_buffer("mask", torch.tensor([0.0, 1.0, 1.0]))

    def forward(self, x):
        y = self.layer(x)
        if not self.in_place:
            return y * self.mask
        y[:, 0] = 0.0
        return y


@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_a_slice_of_the_output_may_be_written(num_samples):
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    gradients = []
    for in_place in (True, False):
        model = Masking(in_place)
        options = dict(num_samples=num_samples, batch_weight=0.1, seed=5)
        bnuq.elbo_loss(model, x, y, **options).loss.backward()
        with bnuq.replicas(model, num_samples, seed=6):
            model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigma_is_the_softplus(dtype, assert_close):
    rho = torch.linspace(-60, 60, 1201, dtype=dtype, requires_grad=True)
    expected = reference.softplus(rho.detach().double())
    assert_close(sigma_of(rho) / expected, torch.ones_like(expected), dtype=dtype)
    (grad,) = torch.autograd.grad(sigma_of(rho).sum(), rho)
    assert_close(grad, torch.sigmoid(rho.detach().double()), dtype=dtype)


def test_the_same_seed_gives_the_same_weights_beside_batch_norm():
    """In elbo_loss, kl_divergence, replicas and predict, before and after a conversion."""
    torch.manual_seed(0)
    prior = bnuq.ScaleMixturePrior(0.5, 1.0, 0.05)
    model = nn.Sequential(
        bnuq.BayesLinear(4, 8, prior=prior), nn.BatchNorm1d(8), bnuq.BayesLinear(8, 3, prior=prior)
    )
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
    found = [bnuq.kl_divergence(model, 5, seed=4)]
    model = bnuq.convert(model).eval()
    bnuq.collect(model, list(x.split(8)), 8, progress=False)
    found.append(bnuq.kl_divergence(model, 5, seed=4))
    found.append(bnuq.elbo_loss(model, x, y, num_samples=5, seed=4, batch_weight=0.1).kl)
    for sampler in ("bank", "joint", "lognormal"):
        with bnuq.replicas(model, 5, seed=4, sampler=sampler):
            model(x)
            found.append(bnuq.kl_divergence(model))
    assert all(torch.equal(kl, found[0]) for kl in found)
    w = [
        layer.weight_mu + layer.weight_rho.exp().log1p() * ops.philox_normal(ops.new_seed(4), i << 16, (1, *layer.weight_mu.shape))[0]
        for i, layer in enumerate((model[0], model[2]))
    ]  # fmt: skip
    b = [
        layer.bias_mu + layer.bias_rho.exp().log1p() * ops.philox_normal(ops.new_seed(4), i << 16, (1, len(layer.bias_mu)), tag="bias")[0]
        for i, layer in enumerate((model[0], model[2]))
    ]  # fmt: skip
    pred = bnuq.predict(
        model, x, likelihood="gaussian", num_samples=1, seed=4, sampler="bank", keep_samples=True
    )
    row = pred.snapshots[0]
    mean, var = model[1].bank.mean["1"][row], model[1].bank.var["1"][row]
    h = (x @ w[0].T + b[0] - mean) / (var + 1e-5).sqrt()
    torch.testing.assert_close(pred.samples[0], h @ w[1].T + b[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (6,)], ids=str)
def test_the_output_is_no_view(shape):
    """Of a view `fully_shard` loses its hook when an activation writes into it:
    the backward crashed."""
    y = bnuq.BayesLinear(6, 3)(torch.randn(shape))
    assert y.shape == (*shape[:-1], 3) and not y._is_view()
