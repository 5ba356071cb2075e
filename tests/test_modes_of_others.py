"""Inside a mode of the user's, torch's functions and operations may couple rows: a plan is made for
it."""

import pytest
import torch
from folded import assert_goes_as_the_loop, samples, way
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bnuq_ext as bnuq
from bnuq_ext.chain_folding import is_stochastic_chain
from bnuq_ext.state import modules_of


def rounded(t):
    """To a fraction of the largest value of all rows."""
    scale = t.abs().max() / 7
    return (t / scale).round() * scale


class Functions(TorchFunctionMode):
    """Rounds what every product is given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            args = rounded(args[0]), *args[1:]
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Rounds what every product gives."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return rounded(result) if func is torch.ops.aten.addmm.default else result


def prepared():
    torch.manual_seed(0)
    model = bnuq.convert(
        nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)).eval()
    )
    bnuq.collect(model, list(torch.randn(8, 16, 6)), 8, progress=False)
    return model, torch.randn(7, 6)


@pytest.mark.parametrize("mode", [Functions, Operations])
def test_a_chain(mode):
    model, x = prepared()
    with mode():
        assert_goes_as_the_loop(model, x)
        with pytest.raises(ValueError, match="for a model that does not fold"):
            samples(model, x, strategy="folded")
        with pytest.raises(ValueError, match="replicas: model must"), bnuq.replicas(model, 3, 0):
            model(x)


@pytest.mark.parametrize("mode", [Functions, Operations])
def test_a_plan_that_was_made_outside(mode):
    model, x = prepared()
    model.register_forward_hook(lambda *args: None)  # no chain
    before = samples(model, x, strategy="folded")
    assert way(model) == "folded"
    with mode():
        assert_goes_as_the_loop(model, x)
        assert (samples(model, x) - before).abs().max() > 0.01
    assert torch.equal(samples(model, x, strategy="folded"), before)


@pytest.mark.parametrize("mode", [Functions, Operations])
def test_a_training_step(mode):
    torch.manual_seed(0)
    model = nn.Sequential(bnuq.BayesLinear(6, 9, rho_init=-1.0), nn.Tanh(), nn.Linear(9, 3))
    x, y = torch.randn(7, 6), torch.arange(7) % 3
    for inside in (False, True):
        with mode() if inside else torch.device("cpu"):
            loss = bnuq.elbo_loss(model, x, y, num_samples=3, batch_weight=0.1, seed=0)
            singly = [logits(model, x, replica) for replica in range(3)]
        nll = [nn.functional.cross_entropy(t, y) for t in singly]
        torch.testing.assert_close(loss.nll, sum(nll) / 3, rtol=1e-5, atol=1e-5)


def logits(model, x, replica):
    pred = bnuq.predict(
        model,
        x,
        likelihood="categorical",
        num_samples=1,
        first_replica=replica,
        seed=0,
        strategy="loop",
        keep_samples=True,
    )
    return pred.samples[0]


@pytest.mark.parametrize("harmless", [lambda: torch.device("cpu"), allow_mutation_on_saved_tensors])
def test_modes_of_torch_leave_a_chain_one(harmless):
    model, x = prepared()
    with harmless():
        assert is_stochastic_chain(modules_of(model), x)


def test_a_plan_that_was_made_in_a_mode_of_the_kind_with_another_flag():
    class Switched(Operations):
        def __init__(self, on):
            super().__init__()
            self.on = on

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if self.on:
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    model, x = prepared()
    with Switched(False):
        samples(model, x, strategy="folded")
        assert way(model) == "folded"
    with Switched(True):
        assert_goes_as_the_loop(model, x)
