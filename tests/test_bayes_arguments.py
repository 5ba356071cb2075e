"""Arguments that are no numbers, no sizes or no labels, in the house form; and those that are,
in other types."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import bnuq_ext as bnuq


def network():
    torch.manual_seed(0)
    return nn.Sequential(bnuq.BayesLinear(5, 8), nn.ReLU(), bnuq.BayesLinear(8, 3))


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: bnuq.GaussianPrior("wide"), "GaussianPrior: std must be a number, got 'wide'"),
        (lambda: bnuq.GaussianPrior(torch.tensor(1.0)), r"std must be a number, got tensor\(1.\)$"),
        (lambda: bnuq.GaussianPrior(True), "GaussianPrior: std must be a number, got True"),
        (lambda: bnuq.GaussianPrior(math.inf), "GaussianPrior: std must be finite, got inf"),
        (lambda: bnuq.GaussianPrior(math.nan), "GaussianPrior: std must be positive, got nan"),
        (
            lambda: bnuq.GaussianPrior(10**400),
            "GaussianPrior: std must fit into a float, got a larger",
        ),
        (lambda: bnuq.BayesLinear(2, 2, mu_init=10**400), "mu_init must fit into a float, got a"),
        (lambda: bnuq.ScaleMixturePrior(None), "ScaleMixturePrior: pi must be a number, got None"),
        (lambda: bnuq.ScaleMixturePrior(0.5, math.inf), "std1 must be finite, got inf"),
        (lambda: bnuq.ScaleMixturePrior(0.5, 1, math.nan), "std2 must be positive, got nan"),
        (lambda: bnuq.BayesLinear(2, 2, prior=bnuq.GaussianPrior), "BayesLinear: prior must be"),
        (lambda: bnuq.BayesLinear(2.5, 2), "in_features must be an integer, got 2.5"),
        (lambda: bnuq.BayesLinear(2, "2"), "out_features must be an integer, got '2'"),
        (lambda: bnuq.BayesLinear(2, 2, mu_init=(1, -1)), "mu_init must have low at most high"),
        (
            lambda: bnuq.BayesLinear(2, 2, mu_init=(1, 2, 3)),
            r"mu_init must be a number or \(low, h",
        ),
        (lambda: bnuq.BayesLinear(2, 2, rho_init=math.nan), "rho_init must be finite, got nan"),
        (lambda: bnuq.BayesLinear(2, 2, rho_init=None), "rho_init must be a number, got None"),
        (lambda: bnuq.to_bayesian(network(), rho_init="a"), "rho_init must be a number, got 'a'"),
        (lambda: bnuq.prune(network(), "half"), "prune: fraction must be a number, got 'half'"),
        (lambda: bnuq.prune(network(), math.nan), r"prune: fraction must lie in \[0, 1\], got nan"),
    ],
)
def test_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(2, 4), (4,), ()], ids=str)
def test_features_of_another_number(shape, training):
    layer = bnuq.BayesLinear(5, 3).train(training)
    with pytest.raises(
        ValueError, match=r"^BayesLinear: x must have shape \(N, \*, 5\), got "
    ) as e:
        layer(torch.ones(shape))
    assert str(e.value).endswith(str(list(shape)))


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(batch_weight=math.nan), "batch_weight must be finite and not negative, got nan"),
        (dict(batch_weight=-0.5), "batch_weight must be finite and not negative, got -0.5"),
        (dict(batch_weight="all"), "batch_weight must be a number, got 'all'"),
        (dict(noise_std=torch.tensor(1j)), "noise_std must be real, got torch.complex64"),
        (dict(noise_std="one"), "noise_std must be a number, got 'one'"),
        (dict(noise_std=math.inf), "noise_std must be finite, got inf"),
        (
            dict(noise_std=torch.ones(340, 1)),
            r"noise_std must be a number or a tensor with one, got a tensor of shape \[340, 1\]$",
        ),
        (dict(y=[0, 1]), "y must be a tensor, got list"),
        (dict(x=[torch.zeros(4, 5)]), "x must be a tensor, a tuple or a dict, got list"),
        (dict(y=torch.zeros(4)), "y must hold integer labels, got torch.float32"),
        (
            dict(y=torch.zeros(4, 3, dtype=torch.complex64), likelihood="gaussian"),
            "y must be real, got torch.complex64",
        ),
        (
            dict(y=torch.zeros(4, 3, dtype=torch.bool), likelihood="gaussian"),
            "y must be real, got torch.bool",
        ),
        (dict(y=torch.zeros(4, dtype=torch.long, device="meta")), "y must be on cpu, got meta"),
    ],
)
def test_elbo_refuses_before_it_draws_or_moves_anything(change, message):
    model = nn.Sequential(bnuq.BayesLinear(5, 3), nn.BatchNorm1d(3))
    arguments = dict(x=torch.randn(4, 5), y=torch.zeros(4, dtype=torch.long), batch_weight=1.0)
    state, running = torch.get_rng_state(), model[1].running_mean.clone()
    with pytest.raises((ValueError, TypeError), match=f"elbo_loss: {message}"):
        bnuq.elbo_loss(model, **(arguments | change))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[1].running_mean, running) and model[1].num_batches_tracked == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_labels_of_any_integer_type(dtype):
    model, x, y = network(), torch.randn(4, 5), torch.tensor([0, 2, 1, 1])
    losses = [
        bnuq.elbo_loss(model, x, labels, batch_weight=0.1, seed=0).loss
        for labels in (y, y.to(dtype))
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("number", [np.uint8(3), np.int64(3), torch.tensor(3, dtype=torch.uint8)])
def test_kl_weight_takes_any_integer(number):
    """-(3 + 1) is 252 in eight bits without a sign."""
    weight = bnuq.kl_weight(number, 7, "geometric")
    assert type(weight) is float and weight == bnuq.kl_weight(3, 7, "geometric")


def test_initial_values():
    layer = bnuq.BayesLinear(4, 3, mu_init=0.0, rho_init=[-3.0, -2.0])
    assert (layer.weight_mu == 0).all() and (layer.bias_mu == 0).all()
    assert layer.weight_rho.min() >= -3 and layer.weight_rho.max() <= -2
    assert bnuq.BayesLinear(np.int64(4), 3).weight_mu.shape == (3, 4)


@pytest.mark.parametrize("initial", [np.float32(-3), np.float16(-3), np.int64(-3), Fraction(-3)])
def test_initial_values_may_be_any_number(initial):
    layer = bnuq.BayesLinear(2, 2, mu_init=(initial, np.float32(-2)), rho_init=initial)
    assert (layer.weight_rho == -3).all() and layer.weight_mu.min() >= -3
    assert (bnuq.to_bayesian(nn.Linear(2, 2), rho_init=initial).weight_rho == -3).all()


LINEAR = nn.Linear(2, 2)
LARGE = [
    (lambda: bnuq.BayesLinear(2, 2, mu_init=1e39), r"mu_init must be at most 3.4028e\+38 in size for torch.float32, got 1e\+39"),
    (lambda: bnuq.BayesLinear(2, 2, mu_init=10**39), "mu_init must be at most"),
    (lambda: bnuq.BayesLinear(2, 2, rho_init=(-1e300, 0.0)), r"rho_init must be at most 1.7014e\+38"),
    (lambda: bnuq.BayesLinear(2, 2, mu_init=(-3e38, 3e38)), r"mu_init must be at most 1.7014e\+38"),
    (lambda: bnuq.BayesLinear(2, 2, mu_init=(-1e308, 1e308), dtype=torch.float64), r"8.9885e\+307 in size for torch.float64"),
    (lambda: bnuq.to_bayesian(LINEAR, rho_init=1e39), "to_bayesian: rho_init must be at most"),
]  # fmt: skip


@pytest.mark.parametrize("call,message", LARGE)
def test_initial_values_beyond_the_dtype_are_refused_before_anything_is_drawn(call, message):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        call()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_largest_initial_values_are_taken():
    largest = torch.finfo(torch.float32).max
    assert (bnuq.BayesLinear(2, 2, mu_init=largest).weight_mu == largest).all()
    assert (bnuq.BayesLinear(2, 2, mu_init=10**38).weight_mu == 1e38).all()
    assert bnuq.BayesLinear(2, 2, rho_init=(-largest / 2, largest / 2)).weight_rho.isfinite().all()
    wide = bnuq.BayesLinear(2, 2, rho_init=(-1e300, 0.0), dtype=torch.float64)
    assert wide.weight_rho.isfinite().all()


class Normalised(nn.Module):
    """Batch norm by hand."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x):
        if not self.training:
            return x - self.running_mean
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


def test_batch_norm_of_one_s_own_sees_each_sample_alone():
    model = nn.Sequential(bnuq.BayesLinear(5, 8, rho_init=-1.0), Normalised(), nn.Linear(8, 3))
    x, y, losses = torch.randn(6, 5), torch.zeros(6, dtype=torch.long), []
    for first in range(3):
        with bnuq.replicas(model, 1, seed=0, first_replica=first):
            losses.append(nn.functional.cross_entropy(model(x), y))
    together = bnuq.elbo_loss(model, x, y, num_samples=3, batch_weight=0.0, seed=0).nll
    torch.testing.assert_close(together, torch.stack(losses).mean())
    with (
        bnuq.replicas(model, 2, seed=0),
        pytest.raises(ValueError, match=r"must be in eval\(\), got 1 in train"),
    ):
        model(x)


def test_elbo_of_a_converted_network_does_not_warn():
    """Its batch norm is meant to do in training what it always did;
    a prediction still says what is uncovered."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = bnuq.BayesLinear(5, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return nn.functional.batch_norm(self.norm(self.layer(x)), torch.zeros(3), torch.ones(3))

    model = bnuq.convert(Net())
    x, y = torch.randn(8, 5), torch.zeros(8, dtype=torch.long)
    for mode in (True, False):
        bnuq.elbo_loss(model.train(mode), x, y, num_samples=2, batch_weight=0.1).loss.backward()
    with pytest.warns(UserWarning, match="1 batch-norm calls of the forward belong to no"):
        bnuq.collect(model, [torch.randn(8, 5) for _ in range(3)], progress=False)
        bnuq.predict(model, x, likelihood="categorical", num_samples=2)


def test_elbo_of_an_output_that_is_no_tensor():
    model = network()
    model.forward = lambda x: {"logits": model[0](x)}
    with pytest.raises(
        TypeError,
        match="elbo_loss: the model's output must be a tensor, got dict; output_fn takes one",
    ):
        bnuq.elbo_loss(model, torch.randn(4, 5), torch.zeros(4, dtype=torch.long), batch_weight=1.0)


@pytest.mark.parametrize("T", [1, 2, 3])
def test_elbo_of_an_output_without_rows(T):
    model, y = network(), torch.zeros(4, dtype=torch.long)
    model.forward = lambda x: model[0](x).sum()
    with pytest.raises(
        ValueError, match=r"elbo_loss: the output must have rows \(N, ...\), got \[\]"
    ):
        bnuq.elbo_loss(model, torch.randn(4, 5), y, batch_weight=1.0, num_samples=T)


def test_elbo_of_samples_with_other_numbers_of_rows():
    """17 and 15 rows are not twice 16."""
    model, y, left = network(), torch.zeros(16, dtype=torch.long), [15, 17]
    model.forward = lambda x: model[0](x[: left.pop()])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        bnuq.elbo_loss(model, torch.randn(18, 5), y, batch_weight=1.0, num_samples=2)


def test_a_refused_call_draws_nothing():
    layer, state = bnuq.BayesLinear(5, 3), torch.get_rng_state()
    with pytest.raises(
        ValueError, match=r"BayesLinear: x must have shape \(N, \*, 5\), got \[4, 6\]"
    ):
        layer(torch.randn(4, 6, generator=torch.Generator()))
    with pytest.raises(ValueError, match="BayesLinear: x must"):
        bnuq.elbo_loss(layer, torch.ones(4, 6), torch.zeros(4, dtype=torch.long), batch_weight=1.0)
    assert torch.equal(torch.get_rng_state(), state)


class Steps(nn.Module):
    """Logits (N, K, L) of L steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = bnuq.BayesLinear(5, 3, rho_init=-2.0, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x).transpose(1, 2)


@pytest.mark.parametrize("num_samples", [1, 2, 3])
@pytest.mark.parametrize("steps", [3, 4])
def test_labels_of_every_step(steps, num_samples):
    model, x = Steps(), torch.randn(6, steps, 5, dtype=torch.float64)
    y = torch.randint(3, (6, steps))
    options = dict(num_samples=num_samples, batch_weight=0.0, reduction="sum", seed=4)
    nll = bnuq.elbo_loss(model, x, y, **options).nll
    with bnuq.replicas(model, num_samples, seed=4):
        log_p = model(x).log_softmax(1).unflatten(0, (num_samples, 6))
    labels = y[None, :, None].expand(num_samples, -1, -1, -1)
    torch.testing.assert_close(nll, -log_p.gather(2, labels).sum() / num_samples)
    with pytest.raises(ValueError, match=rf"y must have shape \[6, {steps}\], got \[6\]"):
        bnuq.elbo_loss(model, x, y[:, 0], **options)


def test_what_is_labelled_minus_100_adds_nothing_to_nll():
    layer, x, y = bnuq.BayesLinear(5, 3), torch.randn(4, 5), torch.tensor([0, -100, 2, -100])
    options = dict(batch_weight=0.0, reduction="sum", seed=3)
    marked = bnuq.elbo_loss(layer, x, y, **options)
    torch.testing.assert_close(marked.nll, bnuq.elbo_loss(layer, x[::2], y[::2], **options).nll)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_nll_of_outputs_in_float16_does_not_overflow(likelihood):
    """65504 is the largest; the nll of 5,000 rows is above."""
    torch.manual_seed(0)
    model = nn.Sequential(bnuq.BayesLinear(4, 3, rho_init=-9.0))
    with torch.no_grad():
        model[0].weight_mu.mul_(40)
    x, y = torch.randn(5000, 4).half(), torch.randint(3, (5000,))
    if likelihood == "gaussian":
        y = torch.randn(5000, 3).half()
    options = dict(likelihood=likelihood, batch_weight=0.0, num_samples=2, seed=1)
    actual = bnuq.elbo_loss(model, x, y, **options)
    expected = bnuq.elbo_loss(
        model, x.float(), y.float() if y.is_floating_point() else y, **options
    )
    assert actual.nll.dtype == torch.float32 and 5000 * expected.nll > 65504
    torch.testing.assert_close(actual.nll, expected.nll, rtol=1e-3, atol=0)


def test_a_mask_is_loaded_in_its_own_shape_and_dtype():
    pruned, layer = bnuq.BayesLinear(6, 4), bnuq.BayesLinear(6, 4)
    bnuq.prune(pruned, 0.5)
    state = pruned.state_dict()
    layer.load_state_dict({name: value.half() for name, value in state.items()})
    assert layer.weight_mask.dtype == torch.bool and torch.equal(
        layer.weight_mask, pruned.weight_mask
    )
    kept = layer.weight_mask.clone()
    one = bnuq.BayesLinear(6, 1)
    bnuq.prune(one, 0.5)
    for wrong in (one.state_dict(), state | {"weight_mask": one.weight_mask}):
        with pytest.raises(
            RuntimeError, match="size mismatch for weight_mask|size mismatch for weight_mu"
        ):
            layer.load_state_dict(wrong)
        assert torch.equal(layer.weight_mask, kept)
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(state | {"weight_mask": one.weight_mask})
    assert str(error.value).count("weight_mask") == 1
    fresh = bnuq.BayesLinear(6, 4)
    with pytest.raises(RuntimeError, match="size mismatch for weight_mask"):
        fresh.load_state_dict(state | {"weight_mask": one.weight_mask})
    assert fresh.weight_mask is None


def test_a_closed_divergence_draws_nothing():
    model = bnuq.BayesLinear(3, 2)
    before = torch.get_rng_state()
    first = bnuq.kl_divergence(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, bnuq.kl_divergence(model, seed=3))
    mixture = bnuq.BayesLinear(3, 2, prior=bnuq.ScaleMixturePrior())
    before = torch.get_rng_state()
    assert not torch.equal(bnuq.kl_divergence(mixture), bnuq.kl_divergence(mixture))
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prior", [bnuq.GaussianPrior(1.0), bnuq.ScaleMixturePrior()], ids=repr)
def test_divergence_of_16_bit_weights_is_refused(prior):
    model = nn.Sequential(bnuq.BayesLinear(3, 2, prior=prior)).half()
    before = torch.get_rng_state()
    text = "kl_divergence: layer '0' must have its weights in one dtype, float32 or float64, got torch.float16"
    with pytest.raises(TypeError, match=text):
        bnuq.kl_divergence(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_subclass_has_a_divergence_of_its_own():
    class Doubled(bnuq.BayesLinear):
        def kl_divergence(self, *noise):
            return 2 * super().kl_divergence(*noise)

    layer = Doubled(3, 2)
    plain = bnuq.BayesLinear(3, 2)
    plain.load_state_dict(layer.state_dict())
    expected = 2 * bnuq.kl_divergence(plain)
    torch.testing.assert_close(bnuq.kl_divergence(layer), expected)
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(bnuq.elbo_loss(layer, x, y, batch_weight=1.0).kl, expected)


def test_a_batch_weight_may_be_a_tensor():
    model, x, y = bnuq.BayesLinear(3, 2), torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    expected = bnuq.elbo_loss(model, x, y, batch_weight=0.1, seed=0).loss
    for weight in (torch.tensor(0.1), torch.tensor([0.1])):
        loss = bnuq.elbo_loss(model, x, y, batch_weight=weight, seed=0).loss
        assert loss.shape == ()
        torch.testing.assert_close(loss, expected)
    for weight in (torch.tensor(-1.0), torch.tensor(torch.nan), torch.tensor(torch.inf)):
        with pytest.raises(
            ValueError, match="elbo_loss: batch_weight must be finite and not negative"
        ):
            bnuq.elbo_loss(model, x, y, batch_weight=weight)
    with pytest.raises(TypeError, match="elbo_loss: batch_weight must be real, got torch.bool"):
        bnuq.elbo_loss(model, x, y, batch_weight=torch.tensor(True))


@pytest.mark.parametrize("estimator", ["exact", "local"])
def test_weights_of_16_bits_are_not_sampled(estimator):
    model = nn.Sequential(bnuq.BayesLinear(5, 3, estimator=estimator)).to(torch.bfloat16)
    x, y = torch.randn(4, 5, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    assert model.eval()(x).dtype == torch.bfloat16
    text = "^BayesLinear: the weights must be float32 or float64 where .*, got torch.bfloat16"
    state = torch.get_rng_state()
    for run in (
        lambda: model.train()(x),
        lambda: bnuq.elbo_loss(model, x, y, batch_weight=1.0),
        lambda: bnuq.predict(model, x, likelihood="categorical"),
    ):
        with pytest.raises(TypeError, match=text):
            run()
    assert torch.equal(torch.get_rng_state(), state)
