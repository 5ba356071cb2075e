"""Tensors that hooks and globals keep of a forward: a trial's own values must not come there."""

from functools import partial

import pytest
import torch
from coupled import ROWS
from test_folding import prepared, samples, way
from torch import nn

import bnuq_ext as bnuq

TABLE = {}


def absmax(table, module, args, out):
    """Scales by the largest value that was ever seen, which no row of these tests reaches."""
    table["most"] = torch.maximum(table["most"], out.detach().abs().amax())
    return out / table["most"]


class Observer:
    def __init__(self):
        self.most = torch.tensor(100.0)

    def __call__(self, module, args, out):
        self.most = torch.maximum(self.most, out.detach().abs().amax())
        return out / self.most

    def method(self, module, args, out):
        return self(module, args, out)


class ScaledByGlobal(nn.Module):
    def forward(self, h):
        TABLE["most"] = torch.maximum(TABLE["most"], h.abs().amax())
        return h / TABLE["most"]


def in_place(most):
    return lambda module, args, out: out / most.copy_(torch.maximum(most, out.abs().amax()))


def by_data(most):
    def hook(module, args, out):
        most.data.copy_(torch.maximum(most, out.abs().amax()))  # of which no version tells
        return out / most

    return hook


def with_table(add):
    def build(model):
        table = {"most": torch.tensor(100.0)}
        add(model[2], table)
        return lambda: table["most"]

    return build


def with_observer(hook_of):
    def build(model):
        observer = Observer()
        model[2].register_forward_hook(hook_of(observer))
        return lambda: observer.most

    return build


def with_tensor(hook_of):
    def build(model):
        most = torch.tensor(100.0)
        model[2].register_forward_hook(hook_of(most))
        return lambda: most

    return build


def with_global(model):
    TABLE["most"] = torch.tensor(100.0)
    model.insert(3, ScaledByGlobal().eval())
    return lambda: TABLE["most"]


KEEPERS = {
    "closure": with_table(
        lambda layer, table: layer.register_forward_hook(lambda *args: absmax(table, *args))
    ),
    "partial": with_table(lambda layer, table: layer.register_forward_hook(partial(absmax, table))),
    "in place": with_tensor(in_place),
    "by .data": with_tensor(by_data),
    "object": with_observer(lambda observer: observer),
    "method": with_observer(lambda observer: observer.method),
    "global": with_global,
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


@pytest.fixture(params=KEEPERS)
def kept(request):
    """A model that computes with what its forwards leave outside of it, and what that is now."""
    model = prepared(network, ROWS)
    return model, KEEPERS[request.param](model)


def test_what_is_kept_stays_as_the_loop_leaves_it(kept):
    model, now = kept
    expected = samples(model, ROWS[:6], strategy="loop")
    assert now() == 100
    actual = samples(model, ROWS[:6])
    assert now() == 100 and way(model) == "loop"
    assert torch.equal(actual, expected)


def test_replicas_refuse_and_leave_it(kept):
    model, now = kept
    before = model(ROWS[:6])
    with pytest.raises(ValueError, match="left outside of the model, in a hook or a global"):
        with bnuq.replicas(model, 3, 0):
            model(ROWS[:6])
    assert now() == 100
    assert torch.equal(model(ROWS[:6]), before)


def test_an_output_fn_that_keeps_what_it_computes_with_is_looped():
    model, table = prepared(network, ROWS), {"most": torch.tensor(100.0)}
    output_fn = partial(absmax, table, None, None)
    expected = samples(model, ROWS[:6], strategy="loop", output_fn=output_fn)
    assert torch.equal(samples(model, ROWS[:6], output_fn=output_fn), expected)
    assert table["most"] == 100 and way(model) == "loop"


def test_what_is_kept_and_not_computed_with_folds():
    model, taken, table = prepared(network, ROWS), {}, {}
    model[2].register_forward_hook(lambda module, args, out: taken.update(features=out))

    def scaled(module, args, out):
        return out * table.setdefault("scale", torch.tensor(2.0))  # made once, as a cache is

    model[3].register_forward_hook(scaled)
    expected = samples(model, ROWS[:6], strategy="loop")
    for _ in range(2):  # the first compares with replicas alone
        torch.testing.assert_close(samples(model, ROWS[:6]), expected, rtol=1e-5, atol=1e-5)
    assert len(taken["features"]) == 6 * len(expected)
