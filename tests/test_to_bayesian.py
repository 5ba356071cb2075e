"""to_bayesian on models that are more than a chain of linear layers."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.testing._internal.two_tensor import TwoTensor

import bnuq_ext as bnuq


def x():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def samples(model, inputs, num_samples=4):
    options = dict(likelihood="gaussian", num_samples=num_samples, seed=1, keep_samples=True)
    return bnuq.predict(model, inputs, **options).samples


def test_hooks_and_shared_weights_stay():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).eval()
    model[1].weight = model[0].weight
    model[0].register_forward_hook(lambda module, args, y: 2 * y)
    made = bnuq.to_bayesian(model)
    assert torch.equal(made(x()), model(x()))
    assert made[0].weight_mu is made[1].weight_mu is not model[0].weight
    assert not any(hasattr(made[0], name) for name in ("weight", "bias"))


def test_a_shared_weight_is_the_mean_of_two_and_a_shared_layer_is_one():
    """The divergence has a term for each weight that is drawn."""
    linear, other = nn.Linear(5, 5), nn.Linear(5, 5)
    other.weight = linear.weight
    twins = bnuq.to_bayesian(nn.Sequential(linear, other))
    bnuq.elbo_loss(twins, x(), x(), likelihood="gaussian", batch_weight=1.0).loss.backward()
    torch.optim.SGD(twins.parameters(), 0.1).step()
    assert twins[0].weight_mu is twins[1].weight_mu
    assert not torch.equal(twins[0].weight_rho, twins[1].weight_rho)
    each = [bnuq.kl_divergence(layer) for layer in twins]
    torch.testing.assert_close(bnuq.kl_divergence(twins), each[0] + each[1])
    once = bnuq.to_bayesian(nn.Sequential(linear, linear))
    torch.testing.assert_close(bnuq.kl_divergence(once), bnuq.kl_divergence(once[0]))
    with bnuq.replicas(once, 1, seed=3):
        drawn = once(torch.cat([torch.zeros(1, 5), torch.eye(5)]))
    with bnuq.replicas(once[0], 1, seed=3):
        alone = once[0](torch.cat([torch.zeros(1, 5), torch.eye(5)]))
    weight, bias = (alone[1:] - alone[0]).T, alone[0]
    torch.testing.assert_close(drawn, alone @ weight.T + bias)


def test_draws_nothing_and_initialises_like_a_new_layer():
    torch.manual_seed(0)
    linear, state = nn.Linear(5, 3), torch.get_rng_state()
    made = bnuq.to_bayesian(linear)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    made.reset_parameters()
    assert torch.equal(made.weight_mu, linear.weight) and (made.weight_rho == -5).all()


def test_frozen_weights_stay_frozen_and_parametrised_ones_linear():
    model = nn.Sequential(nn.Linear(5, 4), parametrizations.weight_norm(nn.Linear(4, 3))).eval()
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"not turned.*: 1 \(torch.*ParametrizedLinear\)$"):
        made = bnuq.to_bayesian(model)
    assert not made[0].weight_mu.requires_grad and made[0].weight_rho.requires_grad
    assert type(made[1]) is not bnuq.BayesLinear
    torch.testing.assert_close(made(x()), model(x()))


class Cast(nn.Linear):
    """A linear layer in all but class, as timm has one."""


def test_a_subclass_of_linear_is_named():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), Cast(4, 3))
    with pytest.warns(UserWarning) as caught:
        made = bnuq.to_bayesian(model)
    text = f"to_bayesian: not turned, subclasses of torch.nn.Linear: 2 ({__name__}.Cast)"
    assert [str(w.message) for w in caught] == [text]
    assert [type(m) for m in made] == [bnuq.BayesLinear, nn.ReLU, Cast]
    bnuq.to_bayesian(model, lambda name, layer: type(layer) is nn.Linear)  # left out on purpose
    message = rf"accepts, got none but subclasses of it: 2 \({__name__}.Cast\)$"
    with pytest.raises(ValueError, match=message):
        bnuq.to_bayesian(model, lambda name, layer: False)


def test_the_linear_layer_of_timm_is_turned():
    linear = type("Linear", (nn.Linear,), {"__module__": "timm.layers.linear"})
    model = nn.Sequential(linear(5, 3)).eval()
    made = bnuq.to_bayesian(model)
    assert type(made[0]) is bnuq.BayesLinear
    torch.testing.assert_close(made(x()), model(x()))


@pytest.mark.parametrize("change", [spectral_norm, lambda m: prune.l1_unstructured(m, "weight", 0.5)])  # fmt: skip
def test_weights_that_are_made_of_others_are_refused(change):
    model = nn.Sequential(nn.Linear(5, 4), change(nn.Linear(4, 3)))
    message = "to_bayesian: layer '1' must have its weight as a parameter .*, got one made of"
    with pytest.raises(ValueError, match=message):
        bnuq.to_bayesian(model)


def test_what_reads_a_weight_is_told_the_way_out():
    """A network that casts to the dtype of a layer, as T5 does."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x):
            return self.last(x.to(self.last.weight.dtype))

    made = bnuq.to_bayesian(Cast())
    assert not hasattr(made.last, "weight") and getattr(made.last, "weight", None) is None
    with pytest.raises(AttributeError, match="BayesLinear has no `weight` .*; filter_fn of to_bay"):
        made(x())
    with pytest.raises(AttributeError, match="'BayesLinear' object has no attribute 'wait'"):
        _ = made.last.wait
    made.last.weight = nn.Parameter(torch.ones(2))  # of one's own
    assert made.last.weight.sum() == 2


def test_a_forward_on_the_object_is_refused():
    """It would be kept, and call the weights of the model that was given."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[1].forward = model[1].forward
    message = "to_bayesian: layer '1' must have the forward of its class .*, got one that is set on"
    with pytest.raises(ValueError, match=message):
        bnuq.to_bayesian(model)
    assert type(bnuq.to_bayesian(model, lambda name, layer: name == "0")[0]) is bnuq.BayesLinear


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_layers_without_weights_are_refused(sizes):
    message = (
        f"to_bayesian: layer '' must have at least one input and one output, got {sizes[0]} and"
    )
    with pytest.raises(ValueError, match=message):
        bnuq.to_bayesian(nn.Linear(*sizes))


def test_a_spread_that_the_weights_dtype_cannot_hold_is_refused():
    message = (
        "^to_bayesian: rho_init must be at most 3.4028e.38 in size for torch.float32, got 1e.39"
    )
    with pytest.raises(ValueError, match=message):
        bnuq.to_bayesian(nn.Linear(3, 2), rho_init=1e39)
    assert bnuq.to_bayesian(nn.Linear(3, 2).double(), rho_init=1e39).weight_rho.max() == 1e39


def test_layers_of_16_bits_and_lazy_ones_are_refused():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).bfloat16())
    message = (
        "to_bayesian: layer '1' must have its weight in float32 or float64, got torch.bfloat16"
    )
    with pytest.raises(TypeError, match=message):
        bnuq.to_bayesian(model)
    model[1] = nn.LazyLinear(3)
    message = (
        r"to_bayesian: layer '1' must have a shape \(run one forward first\), got a LazyLinear"
    )
    with pytest.raises(ValueError, match=message):
        bnuq.to_bayesian(model)
    assert type(bnuq.to_bayesian(model, lambda name, layer: name == "0")[0]) is bnuq.BayesLinear
    model(x())
    assert type(bnuq.to_bayesian(model)[1]) is bnuq.BayesLinear


def test_weights_that_wrap_others_are_refused():
    """As quantised ones do, which look like float32."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    halves = torch.randn(3, 4), torch.randn(3, 4)
    model[1].weight = nn.Parameter(TwoTensor(*halves))
    message = (
        r"to_bayesian: layer '1' must have its weight as an ordinary tensor \(not quantised or "
        r"sharded\), got torch.testing._internal.two_tensor.TwoTensor"
    )
    with pytest.raises(TypeError, match=message):
        bnuq.to_bayesian(model)


def test_what_else_a_layer_holds_stays():
    linear = nn.Linear(5, 3).eval()
    linear.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
    linear.register_parameter("gain", nn.Parameter(torch.ones(3)))
    linear.inner, linear.note, linear.prior, linear.estimator = nn.ReLU(), "kept", "mine", 5
    linear.register_forward_hook(lambda m, args, y: m.inner(y * m.scale * m.gain))
    made = bnuq.to_bayesian(linear, prior=bnuq.GaussianPrior(0.5))
    assert torch.equal(made(x()), linear(x())) and made.note == "kept"
    assert made.prior == bnuq.GaussianPrior(0.5) and made.estimator == "exact"
    names = {"weight_mu", "weight_rho", "bias_mu", "bias_rho", "gain"}
    assert made.state_dict().keys() == names


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_transformers_are_sampled(depth, masked):
    """Their fused path in eval() would read the weights instead of calling the layers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = model if depth is None else nn.TransformerEncoder(model, depth)
    made = bnuq.to_bayesian(model.eval(), rho_init=-3.0)
    inputs = {"src": torch.randn(3, 4, 8)}
    if masked:
        inputs["src_key_padding_mask"] = torch.tensor([[False] * 3 + [True]] * 3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its nested tensors
        expected = model(**inputs)[:, :3]
    with torch.no_grad():
        torch.testing.assert_close(made(**inputs)[:, :3], expected, rtol=1e-4, atol=1e-5)
    drawn = samples(made, inputs)[:, :, :3]
    assert drawn.std(0).min() > 0
    with torch.no_grad():
        for t in range(2):
            with bnuq.replicas(made, 1, seed=1, first_replica=t):
                torch.testing.assert_close(drawn[t], made(**inputs)[:, :3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turned", ["linear1", "linear2"])
@pytest.mark.parametrize("depth", [None, 2])
def test_one_layer_of_a_transformer_is_sampled(depth, turned):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = model if depth is None else nn.TransformerEncoder(model, depth)
    made = bnuq.to_bayesian(model.eval(), lambda name, layer: name.endswith(turned), rho_init=-3.0)
    inputs = torch.randn(3, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(made(inputs), model(inputs), rtol=1e-4, atol=1e-5)
        with bnuq.replicas(made, 2, seed=1):
            first, second = made(inputs).chunk(2)
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("rho", [-12.0, -100.0])
@pytest.mark.parametrize("estimator", ["exact", "local"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_posterior_that_hardly_spreads_folds_too(bias, rho, estimator):
    """Replicas that differ by no more than rounding:
    the trial of folding widens the posterior by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(
        bnuq.BayesLinear(5, 6, bias, rho_init=rho, estimator=estimator),
        nn.LayerNorm(6),
        bnuq.BayesLinear(6, 3, rho_init=rho, bias=False, estimator=estimator),
    )
    with torch.no_grad():
        model[2].weight_mu.mul_(1000)
    bnuq.prune(model, 0.3)
    with bnuq.replicas(model, 3, seed=1):
        together = model(x()).view(3, 4, 3)
    mean = model.eval()(x())
    torch.testing.assert_close(together, mean.expand(3, 4, 3), rtol=1e-3, atol=0.1)
    one_by_one = []
    for t in range(3):
        with bnuq.replicas(model, 1, seed=1, first_replica=t):
            one_by_one.append(model(x()))
    torch.testing.assert_close(together, torch.stack(one_by_one), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("estimator", ["exact", "local"])
def test_a_posterior_of_zeros_folds_too(estimator):
    """Its weights have no size to widen it by."""
    model = bnuq.BayesLinear(5, 3, mu_init=0.0, rho_init=-200.0, estimator=estimator)
    with bnuq.replicas(model, 3, seed=1):
        assert torch.equal(model(x()), torch.zeros(12, 3))


@pytest.mark.parametrize("fraction", [0.95, 1.0])
def test_a_network_whose_last_layer_is_pruned_away_folds_too(fraction):
    """Its outputs tell neither rows nor replicas apart."""
    model = nn.Sequential(bnuq.BayesLinear(5, 20), nn.ReLU(), bnuq.BayesLinear(20, 3, bias=False))
    with torch.no_grad():
        model[2].weight_mu.mul_(1e-3)
    bnuq.prune(model, fraction, by="magnitude")
    assert not model[2].weight_mask.any()
    with bnuq.replicas(model, 3, seed=1):
        assert torch.equal(model(x()), torch.zeros(12, 3))


class Centred(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


def test_a_posterior_that_hardly_spreads_does_not_hide_coupled_rows():
    model = nn.Sequential(bnuq.BayesLinear(5, 3, rho_init=-30.0), Centred())
    loop = bnuq.predict(model, x(), likelihood="gaussian", num_samples=3, seed=1, strategy="loop")
    auto = bnuq.predict(model, x(), likelihood="gaussian", num_samples=3, seed=1)
    torch.testing.assert_close(auto.mean, loop.mean)
    torch.testing.assert_close(auto.mean, model.eval()(x()))
    with pytest.raises(ValueError, match="replicas: model must give the same folded as one by one"):
        with bnuq.replicas(model, 3, seed=1):
            model(x())


class Learned(nn.Module):
    """A Gaussian prior of a width that is learned."""

    def __init__(self):
        super().__init__()
        self.std = nn.Parameter(torch.tensor(0.5))

    def divergence(self, mu, rho, seed, stream, num_samples):
        prior = torch.distributions.Normal(0.0, self.std)
        own = torch.distributions.Normal(mu, nn.functional.softplus(rho))
        return torch.distributions.kl_divergence(own, prior).sum()


def test_a_prior_with_parameters_stays():
    model = bnuq.to_bayesian(nn.Sequential(nn.Linear(5, 3)), prior=Learned())
    fixed = bnuq.to_bayesian(nn.Sequential(nn.Linear(5, 3)), prior=bnuq.GaussianPrior(0.5))
    fixed.load_state_dict(model.state_dict(), strict=False)
    kl = bnuq.kl_divergence(model)
    torch.testing.assert_close(kl, bnuq.kl_divergence(fixed))
    kl.backward()
    assert model[0].prior.std.grad != 0 and "0.prior.std" in model.state_dict()


class Enclosed(nn.Module):
    """Calls its layer by way of a closure, which a copy of the model shares with it."""

    def __init__(self):
        super().__init__()
        self.layer = layer = nn.Linear(5, 3)
        self.head = lambda x: layer(x.relu())

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize("T", [1, 3])
def test_a_forward_that_samples_nothing_is_refused(T):
    model = bnuq.to_bayesian(Enclosed())
    x, y = torch.randn(4, 5), torch.zeros(4, dtype=torch.long)
    text = "model must call a stochastic layer in its forward, got no call"
    with pytest.raises(ValueError, match=f"predict: {text}"):
        bnuq.predict(model, x, likelihood="categorical", num_samples=T)
    with pytest.raises(ValueError, match=f"elbo_loss: {text}"):
        bnuq.elbo_loss(model, x, y, batch_weight=1.0, num_samples=T)
    with (
        pytest.raises(ValueError, match=f"replicas: {text}"),
        bnuq.replicas(model, num_samples=T),
    ):
        model(x)


def test_encoders_whose_layers_stay_keep_their_fused_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    made = bnuq.to_bayesian(
        nn.Sequential(encoder, nn.Linear(8, 2)), lambda name, layer: name == "1"
    )
    assert made[0].use_nested_tensor is encoder.use_nested_tensor is True
    fused = [part.activation_relu_or_gelu for part in made[0].layers]
    assert fused == [layer.activation_relu_or_gelu] * 2 != [0, 0]
