"""What plug_in, mc_dropout and ensemble refuse, and what they leave alone then."""

import pytest
import torch
from predicting import X, network
from test_baselines import OPTIONS, calls
from torch import nn

import bnuq_ext as bnuq


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"likelihood": "poisson"}, ValueError, "likelihood must be one of categorical, gaussian"),
        ({"noise_var": 0.1}, ValueError, "noise_var must be None with likelihood"),
        (
            {"likelihood": "gaussian", "noise_var": torch.ones(7)},
            ValueError,
            r"noise_var must broadcast to the shape \[9, 5\] of the mean, got \[7\]",
        ),
        ({"output_fn": 3}, TypeError, "output_fn must be callable, got int"),
        ({"x": 3}, TypeError, "x must be a tensor, a tuple, a dict or an iterable of batches"),
        ({"x": X.numpy()}, TypeError, "x must be a tensor, a tuple, .* got ndarray"),
        ({"x": []}, ValueError, "x must yield at least 1 batch, got none"),
        ({"x": X.to("meta")}, ValueError, "x must be on the model's device cpu, got meta"),
        ({"output_fn": lambda o: o[:, 0]}, ValueError, r"the output must be logits"),
    ],
)
@pytest.mark.parametrize("name", ["plug_in", "mc_dropout", "ensemble"])
def test_rejects(model, name, options, error, message):
    options, state = dict(options), torch.get_rng_state()
    x = options.pop("x", X)
    with pytest.raises(error, match=f"{name}: {message}"):
        calls(model)[name](x, **{**OPTIONS, **options})
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"first_replica": -1}, ValueError, "first_replica must be at least 0, got -1"),
        ({"first_replica": 2**63}, ValueError, "first_replica must be at most 2.63 - "),
        ({"seed": 2**63}, ValueError, r"seed must lie in \[-2\^63, 2\^63\)"),
        ({"sampler": "mc"}, ValueError, "sampler must be one of bank, batch, joint"),
        ({"sampler": "batch"}, ValueError, 'sampler must draw from the bank, got "batch"'),
        ({"sampler": None, "batch_size": 4}, ValueError, "batch_size must be None without a sampl"),
        ({"batch_size": 16}, ValueError, 'batch_size must be None with sampler "bank", got 16'),
    ],
)
def test_rejects_replicas(model, options, error, message):
    given = {"sampler": "bank", "num_samples": 2, **OPTIONS, **options}
    with pytest.raises(error, match=f"mc_dropout: {message}"):
        bnuq.mc_dropout(model, X, **given)
    if given["sampler"] is None:
        given["num_samples"] = None
    with pytest.raises(error, match=f"ensemble: {message}"):
        bnuq.ensemble([model], X, **given)


def test_where_nothing_is_drawn_the_generator_stays(model):
    undropped, state = network(), torch.get_rng_state()
    bnuq.plug_in(model, X, **OPTIONS)
    bnuq.ensemble([model, model], X, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="mc_dropout: model must call dropout .* got no call"):
        bnuq.mc_dropout(undropped, X, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), state)
    bnuq.ensemble([model], X, sampler="bank", num_samples=2, **OPTIONS)
    assert not torch.equal(torch.get_rng_state(), state)


def test_rejects_models(model):
    for call in (bnuq.plug_in, bnuq.mc_dropout):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
            call("model", X, **OPTIONS)
    with pytest.raises(TypeError, match="ensemble: model must be a torch.nn.Module, got str"):
        bnuq.ensemble(["model"], X, **OPTIONS)
    for options, message in (
        (
            {"sampler": "bank"},
            r"models\[0\] must contain stochastic batch-norm layers, got none; run bnuq_ext.conv",
        ),
        ({"num_samples": 3}, "num_samples must be None without a sampler, got 3"),
        ({"strategy": "fast"}, "strategy must be one of auto, folded, loop, got 'fast'"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"ensemble: {message}"):
            bnuq.ensemble([network()], X, **options, **OPTIONS)
    with pytest.raises(ValueError, match="ensemble: model must have a bank, got none"):
        bnuq.ensemble([bnuq.convert(network())], X, sampler="bank", **OPTIONS)
    with pytest.raises(ValueError, match="ensemble: models must hold at least 1 member, got none"):
        bnuq.ensemble([], X, **OPTIONS)
    with pytest.raises(TypeError, match="ensemble: models must be a list of modules, got Sequ"):
        bnuq.ensemble(model, X, **OPTIONS)
    with pytest.raises(
        ValueError, match=r"models must have outputs of one shape, got \[\[9, 5\], "
    ):
        bnuq.ensemble([model, nn.Flatten()], X, **OPTIONS)
