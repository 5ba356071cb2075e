"""`replicas` of Bayesian layers that are called one after another:
known to fold without a trial."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import bnuq_ext as bnuq

T, X = 8, torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def chain(*first):
    torch.manual_seed(5)
    return nn.Sequential(*first, bnuq.BayesLinear(8, 64), nn.ReLU(), bnuq.BayesLinear(64, 1))


def alone(model, x, **options):
    arguments = {"likelihood": "gaussian", "num_samples": T, "seed": 5, "keep_samples": True}
    return bnuq.predict(model, x, strategy="loop", **arguments, **options).samples.flatten(0, 1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("first", [[], [nn.LayerNorm(8), nn.Linear(8, 8)]], ids=["", "shared"])
def test_one_forward_and_the_replicas_of_predict(first, training, monkeypatch):
    model, sampled = chain(*first).train(training), []
    sample = bnuq.BayesLinear.sample

    def counted(layer, x, *args):
        sampled.append(len(x))
        return sample(layer, x, *args)

    monkeypatch.setattr(bnuq.BayesLinear, "sample", counted)
    with bnuq.replicas(model, T, 5):
        y = model(X)
    assert sampled == [32, T * 32]
    torch.testing.assert_close(y, alone(model, X), rtol=1e-5, atol=1e-5)


def test_sixteen_bits_are_not_refused_where_they_cannot_tell_replicas_apart():
    for seed in range(40):
        torch.manual_seed(seed)
        model = chain()
        for module in model[::2]:
            module.reset_parameters()
        with torch.autocast("cpu", torch.bfloat16), bnuq.replicas(model, T, 5):
            y = model(torch.randn(32, 8))
        assert y.shape == (T * 32, 1)


def test_dropout_before_the_first_layer_has_masks_for_each_replica():
    model = chain(nn.Dropout(0.5)).train()
    with torch.no_grad(), bnuq.replicas(model, T, 5):
        y = model(torch.ones(1, 8))
    masks = []
    model[0].register_forward_hook(lambda module, args, out: masks.append(out.clone()))
    with torch.no_grad(), bnuq.replicas(model, T, 5):
        model(torch.ones(64, 8))
    assert y.shape == (T, 1)
    assert masks[-1].shape == (T * 64, 8)
    assert masks[-1].view(T, -1).unique(dim=0).shape[0] == T


def test_a_hook_is_a_reason_for_a_trial():
    model = chain()
    model[1].register_forward_hook(lambda module, args, out: out - out.mean(0))
    with (
        pytest.raises(ValueError, match="replicas: model must give the same folded as one by one"),
        bnuq.replicas(model, T, 5),
    ):
        model(X)


def test_a_norm_over_rows_is_no_layer_of_a_chain():
    model = chain(nn.Linear(8, 8), nn.LayerNorm((32, 8)))
    with pytest.raises(ValueError, match="replicas: model must"), bnuq.replicas(model, T, 5):
        model(X)


class Centred(TorchFunctionMode):
    """What tanh gives is centred over the rows."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result - result.mean(0) if func is torch.tanh else result


@pytest.mark.parametrize("device", [nullcontext, lambda: torch.device("cpu")])
def test_functions_that_a_mode_replaces_are_a_reason_for_a_trial(device):
    model = chain(nn.Linear(8, 8), bnuq.BayesLinear(8, 8), nn.Tanh())
    with device(), Centred(), bnuq.replicas(model, T, 5):
        with pytest.raises(ValueError, match="replicas: model must"):
            model(X)
