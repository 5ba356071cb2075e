"""elbo_loss and kl_divergence."""

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drawn import layer_noise
from torch import nn
from torch.nn.functional import cross_entropy, softplus

import bnuq_ext as bnuq
from bnuq_ext import ops, reference

RHO = -2.0


def network(prior=None, dtype=torch.float64, last=4, extra=()):
    torch.manual_seed(0)
    kwargs = dict(prior=prior or bnuq.GaussianPrior(0.7), rho_init=RHO, dtype=dtype)
    return nn.Sequential(
        bnuq.BayesLinear(6, 9, **kwargs), *extra, nn.Tanh(), bnuq.BayesLinear(9, last, **kwargs)
    )


def data(rows=8, classes=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator, dtype=dtype)
    return x, torch.randint(classes, (rows,), generator=generator)


def by_hand(model, x, seed, num_samples):
    """Outputs (T, N, K) in plain torch, with the layers' noise."""
    key, outputs = ops.new_seed(seed), x.expand(num_samples, *x.shape)
    layers = [m for m in model if isinstance(m, bnuq.BayesLinear)]
    for stream, layer in enumerate(layers):
        noise = layer_noise(key, stream << 16, num_samples, *layer.weight_mu.shape)
        parameters = (layer.weight_mu, layer.weight_rho, layer.bias_mu, layer.bias_rho)
        outputs = reference.bayes_linear(outputs, *parameters, *(eps.to(x.dtype) for eps in noise))
        outputs = outputs.tanh() if layer is not layers[-1] else outputs
    return outputs


def gaussian_kl_by_hand(model, prior_std):
    return sum(
        reference.gaussian_kl(mu, rho, prior_std)
        for m in model
        if isinstance(m, bnuq.BayesLinear)
        for mu, rho in ((m.weight_mu, m.weight_rho), (m.bias_mu, m.bias_rho))
    )


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_categorical_matches_plain_torch(num_samples, reduction):
    model, (x, y) = network(), data()
    out = bnuq.elbo_loss(
        model, x, y, num_samples=num_samples, batch_weight=0.3, reduction=reduction, seed=5
    )
    logits = by_hand(model, x, 5, num_samples)
    nll = sum(cross_entropy(z, y, reduction="sum") for z in logits) / num_samples
    kl = gaussian_kl_by_hand(model, 0.7)
    rows = len(x) if reduction == "mean" else 1
    expected = ((nll + 0.3 * kl) / rows, nll / rows, kl)
    for actual, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-8)
    parameters = list(model.parameters())
    for a, e in zip(
        torch.autograd.grad(out.loss, parameters),
        torch.autograd.grad(expected[0], parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def test_gaussian_matches_plain_torch():
    model, (x, _) = network(last=2), data()
    y = torch.randn(8, 2, dtype=torch.float64)
    out = bnuq.elbo_loss(
        model, x, y, num_samples=2, likelihood="gaussian", noise_std=0.5, batch_weight=1.0,
        reduction="sum", seed=3,
    )  # fmt: skip
    means = by_hand(model, x, 3, 2)
    density = 0.5 * ((y - means) / 0.5).square() + math.log(0.5) + 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(out.nll, density.sum() / 2)


@pytest.mark.parametrize("to", [(8,), (8, 1)], ids=str)
def test_gaussian_targets_of_one_output(to):
    """(N,) and (N, 1) are the same, in the outputs too; no other shape is made to fit."""
    model, (x, _) = network(last=1), data()
    options = dict(likelihood="gaussian", batch_weight=1.0, seed=3, num_samples=2)
    fn = lambda z: z.view(-1, *to[1:])  # noqa: E731
    y = torch.randn(8, dtype=torch.float64)
    losses = [bnuq.elbo_loss(model, x, t, output_fn=fn, **options).nll for t in (y, y[:, None])]
    expected = -torch.distributions.Normal(by_hand(model, x, 3, 2)[..., 0], 1.0).log_prob(y)
    for nll in losses:
        torch.testing.assert_close(nll, expected.sum() / 16)
    for wrong in (y[None], y[:4], y.expand(8, 8)):
        with pytest.raises(ValueError, match="^elbo_loss: y must have shape"):
            bnuq.elbo_loss(model, x, wrong, output_fn=fn, **options)


def test_mixture_is_taken_at_the_weights_of_the_forward():
    prior = bnuq.ScaleMixturePrior(0.25, 1.0, 0.1)
    model, (x, y) = network(prior), data()
    out = bnuq.elbo_loss(model, x, y, num_samples=3, batch_weight=1.0, seed=4)
    key, expected = ops.new_seed(4), 0.0
    for stream, layer in enumerate(m for m in model if isinstance(m, bnuq.BayesLinear)):
        eps, bias_eps = layer_noise(key, stream << 16, 3, *layer.weight_mu.shape)
        for mu, rho, noise in (
            (layer.weight_mu, layer.weight_rho, eps),
            (layer.bias_mu, layer.bias_rho, bias_eps),
        ):
            expected += reference.mixture_kl(mu, rho, noise, 0.25, 1.0, 0.1)
    torch.testing.assert_close(out.kl, expected, rtol=1e-6, atol=1e-6)
    with bnuq.replicas(model, 3, seed=4):
        model(x)
        inside = bnuq.kl_divergence(model)
        with bnuq.replicas(network(), 2, seed=5):
            assert torch.equal(bnuq.kl_divergence(model), inside)
    torch.testing.assert_close(inside, out.kl)


def test_weight_defaults_to_the_share_of_the_data():
    model, (x, y) = network(), data()
    by_size = bnuq.elbo_loss(model, x, y, dataset_size=80, seed=0)
    by_weight = bnuq.elbo_loss(model, x, y, batch_weight=0.1, seed=0)
    assert torch.equal(by_size.loss, by_weight.loss)


def test_samples_together_equal_one_after_another(monkeypatch):
    from bnuq_ext import vi

    model, (x, y) = network(extra=(nn.Dropout(0.0),)), data()
    together = bnuq.elbo_loss(model, x, y, num_samples=4, batch_weight=0.1, seed=2)
    monkeypatch.setattr(vi, "is_chain", lambda *args: False)
    monkeypatch.setattr(vi, "_together", lambda *args: None)
    apart = bnuq.elbo_loss(model, x, y, num_samples=4, batch_weight=0.1, seed=2)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b)


def test_a_plain_chain_folds_without_a_trial(monkeypatch):
    from bnuq_ext import vi

    tried, run = [], vi.run_together
    monkeypatch.setattr(vi, "run_together", lambda *args: tried.append(1) or run(*args))
    x, y = data()
    by_row = nn.Flatten(), nn.LayerNorm(9, dtype=torch.float64)
    for extra, trials in (((), 0), (by_row, 0), ((nn.Softmax(1),), 1)):
        bnuq.elbo_loss(network(extra=extra), x, y, num_samples=3, batch_weight=0.1, seed=0)
        assert len(tried) == trials


def test_chains_that_are_not_plain_are_tried(monkeypatch):
    from bnuq_ext import vi

    def is_tried(model, x):
        tried = []
        monkeypatch.setattr(vi, "run_together", lambda *args: tried.append(1))
        with contextlib.suppress(ValueError):  # of a single row
            bnuq.elbo_loss(model, x, y, num_samples=3, batch_weight=0.1, seed=0)
        return bool(tried)

    model, (x, y) = network(), data()
    assert not is_tried(model, x)
    assert is_tried(model, x[0])
    assert is_tried(nn.Sequential(model[0], model[1], model[1]), x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: y - y.mean(0))
    assert is_tried(model, x)
    handle.remove()
    assert not is_tried(model, x)
    model[1].register_forward_hook(lambda module, args, y: y - y.mean(0))
    assert is_tried(model, x)


def test_batch_norm_in_training_sees_each_sample_alone():
    """The statistics of the T samples' rows together would not be those of any sample."""
    model, (x, y) = network(extra=(nn.BatchNorm1d(9, dtype=torch.float64),)), data()
    out = bnuq.elbo_loss(model, x, y, num_samples=2, batch_weight=0.0, seed=6, reduction="sum")
    key, nll = ops.new_seed(6), 0.0
    first, norm, _, last = model
    for t in range(2):
        weights = []
        for stream, layer in enumerate((first, last)):
            seed = key + torch.tensor([0, t])
            eps, bias_eps = layer_noise(seed, stream << 16, 1, *layer.weight_mu.shape)
            weights.append(layer.weight_mu + softplus(layer.weight_rho) * eps[0])
            weights.append(layer.bias_mu + softplus(layer.bias_rho) * bias_eps[0])
        h = x @ weights[0].T + weights[1]
        h = (h - h.mean(0)) / (h.var(0, correction=0) + norm.eps).sqrt()
        nll = nll + cross_entropy(h.tanh() @ weights[2].T + weights[3], y, reduction="sum") / 2
    torch.testing.assert_close(out.nll, nll, rtol=1e-6, atol=1e-8)
    assert int(norm.num_batches_tracked) == 2


def test_leaves_flags_and_draws_as_found():
    model, (x, y) = network(), data()
    flags = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    bnuq.elbo_loss(model, x, y, num_samples=3, batch_weight=1.0, seed=0)
    assert flags == [m.training for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(7)
    first = bnuq.elbo_loss(model, x, y, batch_weight=1.0).loss
    assert not torch.equal(first, bnuq.elbo_loss(model, x, y, batch_weight=1.0).loss)
    torch.manual_seed(7)
    assert torch.equal(first, bnuq.elbo_loss(model, x, y, batch_weight=1.0).loss)


def test_steps_from_a_checkpoint_reproduce():
    model, (x, y) = network(dtype=torch.float32), data(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step(i):
        optimizer.zero_grad()
        bnuq.elbo_loss(model, x, y, num_samples=2, batch_weight=0.01, seed=i).loss.backward()
        optimizer.step()

    step(0)
    saved = [
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.optim.SGD.state_dict(optimizer),
    ]
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    for i in (1, 2):
        step(i)
    expected = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(saved[0])
    for p, m in zip(model.parameters(), momentum, strict=True):
        optimizer.state[p]["momentum_buffer"] = m
    for i in (1, 2):
        step(i)
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_training_finds_a_known_posterior():
    """One weight, gaussian data: the posterior is N(sum xy / (n + s), 1 / (n + s)) with unit noise.

    2,000 steps of 16 samples; Adam's last steps wander by about 0.005, so a bias of 0.03 is found.
    """
    torch.manual_seed(0)
    x = torch.ones(20, 1, dtype=torch.float64)
    y = 1.5 + torch.randn(20, 1, dtype=torch.float64)
    layer = bnuq.BayesLinear(1, 1, bias=False, rho_init=-2.0, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 2000)
    for i in range(2000):
        optimizer.zero_grad()
        bnuq.elbo_loss(
            layer, x, y, num_samples=16, likelihood="gaussian", dataset_size=20, seed=i
        ).loss.backward()
        optimizer.step()
        schedule.step()
    mean, std = float(y.sum() / 21), 21**-0.5
    assert abs(layer.weight_mu.item() - mean) < 0.03
    assert abs(softplus(layer.weight_rho).item() - std) < 0.03


def test_threads_do_not_meet():
    model, (x, y) = network(), data()

    def loss(seed):
        return bnuq.elbo_loss(model, x, y, num_samples=2, batch_weight=1.0, seed=seed).loss.item()

    expected = [loss(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(loss, range(8))) == expected


# ---- kl_divergence ------------------------------------------------------------------------------


def test_divergence_is_the_sum_over_weights_and_biases():
    model = network()
    torch.testing.assert_close(
        bnuq.kl_divergence(model), gaussian_kl_by_hand(model, 0.7), rtol=1e-6, atol=1e-6
    )


def test_divergence_outside_a_pass_draws_its_own_noise():
    model = network(bnuq.ScaleMixturePrior(0.5, 1.0, 0.1))
    same = [bnuq.kl_divergence(model, 2, seed=3) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], bnuq.kl_divergence(model, 2, seed=4))
    expected = sum(
        layer.kl_divergence(ops.new_seed(3), stream << 16, 2)
        for stream, layer in enumerate((model[0], model[2]))
    )
    torch.testing.assert_close(same[0], expected)
    with bnuq.replicas(model[0], 3, seed=5):  # a pass of which the other layer is no part
        torch.testing.assert_close(bnuq.kl_divergence(model, 2, seed=3), expected)
    grads = torch.autograd.grad(same[0], list(model.parameters()))
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize(
    "change,error,message",
    [
        (dict(num_samples=0), ValueError, "num_samples must be at least 1, got 0"),
        (dict(likelihood="poisson"), ValueError, "likelihood must be one of categorical, gaussian"),
        (dict(reduction="none"), ValueError, "reduction must be one of mean, sum, got 'none'"),
        (dict(noise_std=0.0), ValueError, "noise_std must be positive, got 0.0"),
        (dict(batch_weight=None), ValueError, "batch_weight must be given, or dataset_size, got"),
        (dict(batch_weight=None, dataset_size=3), ValueError, "dataset_size must be at least the"),
        (dict(seed=2**63), ValueError, r"seed must lie in \[-2\^63, 2\^63\)"),
        (
            dict(y=torch.zeros(5, dtype=torch.long)),
            ValueError,
            r"y must have shape \[8\], got \[5\]",
        ),
        (dict(y=torch.arange(8)), ValueError, r"y must hold labels in \[0, 4\), got 0 to 7"),
        (dict(y=torch.arange(8).to(torch.uint16)), ValueError, "y must hold labels .*, got 0 to 7"),
        (dict(y=torch.arange(8) - 5), ValueError, r"y must hold labels in \[0, 4\), got -5 to 2"),
        (dict(likelihood="gaussian"), ValueError, r"y must have shape \[8, 4\], got \[8\]"),
        (
            dict(model=network(last=1), y=torch.zeros(8).long()),
            ValueError,
            r"the output must have at least 2 classes \(of one logit z, .*, got \[8, 1\]",
        ),
        (dict(model=nn.Linear(6, 4)), ValueError, "model must contain a BayesLinear, got none"),
        (dict(model=3), TypeError, "model must be a torch.nn.Module, got int"),
    ],
)
def test_elbo_rejects(change, error, message):
    x, y = data()
    arguments = dict(model=network(), x=x, y=y, batch_weight=1.0) | change
    state = torch.get_rng_state()
    model, x, y = (arguments.pop(k) for k in ("model", "x", "y"))
    with pytest.raises(error, match=f"elbo_loss: {message}"):
        bnuq.elbo_loss(model, x, y, **arguments)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "args,error,message",
    [
        ((nn.Linear(2, 2),), ValueError, "model must contain a BayesLinear, got none"),
        ((None, 0), ValueError, "num_samples must be at least 1, got 0"),
    ],
)
def test_divergence_rejects(args, error, message):
    model = args[0] or network()
    with pytest.raises(error, match=f"kl_divergence: {message}"):
        bnuq.kl_divergence(model, *args[1:])


def test_layers_with_other_priors_stand_beside_gaussian_ones():
    """A mixture, a pruned layer and a Gaussian one: the sum of what each has by itself."""
    torch.manual_seed(0)
    layers = [
        bnuq.BayesLinear(4, 6, prior=bnuq.ScaleMixturePrior()),
        bnuq.BayesLinear(6, 5),
        bnuq.BayesLinear(5, 3, bias=False, prior=bnuq.GaussianPrior(0.3)),
    ]
    model = nn.Sequential(*layers)
    bnuq.prune(layers[1], 0.5)
    own = [layer.kl_divergence(ops.new_seed(3), k << 16, 1) for k, layer in enumerate(layers)]
    torch.testing.assert_close(bnuq.kl_divergence(model, seed=3), sum(own))


class Doubled(bnuq.GaussianPrior):
    def divergence(self, *args):
        return 2 * super().divergence(*args)


def test_a_prior_that_is_derived_from_the_gaussian_has_its_own_divergence():
    twice = bnuq.kl_divergence(network(Doubled(0.7)))
    torch.testing.assert_close(twice, 2 * bnuq.kl_divergence(network(bnuq.GaussianPrior(0.7))))


@pytest.mark.parametrize("num_samples", [1, 3])
def test_elbo_leaves_its_input_alone(num_samples):
    model = nn.Sequential(nn.ReLU(inplace=True), bnuq.BayesLinear(5, 3))
    x = torch.randn(8, 5)
    before = x.clone()
    for _ in range(2):
        bnuq.elbo_loss(model, x, torch.zeros(8).long(), batch_weight=0.1, num_samples=num_samples)
        assert torch.equal(x, before)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_elbo_takes_inputs_of_inference_mode(num_samples):
    """Autograd would not save them."""
    model = nn.Sequential(bnuq.BayesLinear(5, 4), nn.ReLU(), bnuq.BayesLinear(4, 3))
    with torch.inference_mode():
        features = torch.randn(8, 5)
    losses = []
    for x in (features, features.clone(), features):
        losses.append(
            bnuq.elbo_loss(
                model, x, torch.zeros(8).long(), batch_weight=0.1, num_samples=num_samples, seed=1
            ).loss
        )
        losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]
