"""torch.utils.swap_tensors, by which torch moves and loads weights of some kinds, after a prediction."""

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq

X, Y = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 2


class Net(nn.Module):
    """No chain, so that its way is remembered beside what its forward depends on."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.shift = torch.zeros(8)  # neither parameter nor buffer

    def forward(self, x):
        return self.head(self.norm(self.first(x)).relu() + self.shift)


def with_bank():
    model = bnuq.convert(Net().eval())
    bnuq.collect(model, [torch.randn(8, 6) for _ in range(3)], progress=False)
    return model


def predicted(model, **options):
    options = {"likelihood": "categorical", "num_samples": 4, "seed": 0, **options}
    return bnuq.predict(model, X.to(model.head.weight.dtype), **options).mean


def in_replicas(model):
    with bnuq.replicas(model, 4, seed=0), torch.no_grad():
        model(X)


CALLS = {
    "predict": predicted,
    "loop": lambda model: predicted(model, strategy="loop"),
    "replicas": in_replicas,
    "plug_in": lambda model: bnuq.plug_in(model, X, likelihood="categorical"),
}


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_tensors_can_be_swapped(call):
    model = with_bank()
    call(model)
    before = predicted(model)
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(8, 6)))
    torch.utils.swap_tensors(model.shift, torch.ones(8))
    after = predicted(model)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, predicted(model, strategy="loop"))


def test_a_model_that_swaps_is_moved_and_loaded(swapping):
    model = with_bank()
    state, before = {k: v.clone() for k, v in model.state_dict().items()}, predicted(model)
    model.double()
    torch.testing.assert_close(predicted(model).float(), before)
    model.float().load_state_dict({k: v + 1 for k, v in state.items()})
    assert not torch.allclose(predicted(model), before)
    model.load_state_dict(state)
    torch.testing.assert_close(predicted(model), before)


def test_weights_of_a_fused_optimizer_can_be_swapped():
    """Its steps are counted, by parameter."""
    model = bnuq.to_bayesian(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    for _ in range(2):
        bnuq.elbo_loss(model, X, Y, num_samples=3, batch_weight=0.1).loss.backward()
        optimizer.step()
    torch.utils.swap_tensors(model.first.weight_mu, nn.Parameter(torch.zeros(8, 6)))
    elbo = [
        bnuq.elbo_loss(model, X, Y, num_samples=3, batch_weight=0.1, seed=seed).loss
        for seed in (0, 0)
    ]
    assert elbo[0] == elbo[1]
