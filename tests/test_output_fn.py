"""A plan is remembered for one output_fn: for its code, and for what that holds and names."""

import copy
import gc
import operator
import weakref
from functools import partial

import pytest
import torch
from coupled import ROWS, Gated
from folded import assert_goes_as_the_loop, prepared, samples, way
from test_folding import Counting, count_passes
from training import Net, data

import bnuq_ext as bnuq


def test_a_lambda_written_anew_is_known():
    model = prepared(Counting, ROWS)
    samples(model, ROWS[:8], output_fn=lambda out: out[:, :2])
    for _ in range(2):
        passes = count_passes(
            lambda: samples(model, ROWS[:8], output_fn=lambda out: out[:, :2] * 2)
        )
    assert passes == [8]


def test_another_output_fn_is_proved_by_itself():
    model = prepared(Gated, ROWS)
    samples(model, ROWS[:6], output_fn=lambda out: out * 2)
    options = {"output_fn": lambda out: out - out.mean(0)}
    assert_goes_as_the_loop(model, ROWS[:6], **options)


def test_outputs_that_are_refused_do_not_end_the_folding():
    model, options = prepared(Counting, ROWS), {"output_fn": lambda out: out[:, :1]}
    with pytest.raises(ValueError, match="must have at least 2 classes"):
        samples(model, ROWS[:8], likelihood="categorical", **options)
    assert way(model) == "folded"
    assert count_passes(lambda: samples(model, ROWS[:8], **options)) == [8]


class Heads(Gated):
    """A head that folds, and one of the same shape whose rows meet."""

    def forward(self, x):
        out = super().forward(x)
        return out, out - out.mean(0)


HEAD, HEADS = 0, [0]


class Head:
    def __init__(self, number):
        self.number = number

    def __call__(self, outputs):
        return outputs[self.number]

    def take(self, outputs):
        return outputs[self.number]


def by_global(number):
    globals()["HEAD"] = number
    return lambda outputs: outputs[HEAD]


def by_global_in_a_partial(number):
    globals()["HEAD"] = number
    return partial(lambda outputs: outputs[HEAD])


def by_nested(number):
    globals()["HEAD"] = number
    return lambda outputs: (lambda: outputs[HEAD])()


def by_item(number):
    HEADS[0] = number
    return lambda outputs: outputs[HEADS[0]]


def by_default(number):
    return lambda outputs, *, number=number: outputs[number]


def by_closure(number):
    return lambda outputs: outputs[number]


def attribute(outputs):
    return outputs[attribute.number]


def by_attribute(number):
    attribute.number = number
    return attribute


HEAD_OBJECT = Head(0)


def by_object(number):
    HEAD_OBJECT.number = number
    return HEAD_OBJECT


def by_method(number):
    HEAD_OBJECT.number = number
    return HEAD_OBJECT.take


OF_ANOTHER_PACKAGE = type("Foreign", (Head,), {"__module__": "elsewhere.heads"})(0)


def by_object_of_another_package(number):
    OF_ANOTHER_PACKAGE.number = number
    return OF_ANOTHER_PACKAGE


def take(number, outputs):
    return outputs[number]


KEPT = [by_global, by_nested, by_item, by_default, by_closure, by_attribute, by_object, by_method]
KEPT += [by_object_of_another_package, by_global_in_a_partial]


@pytest.mark.parametrize("by", [*KEPT, operator.itemgetter, partial(partial, take)])
def test_one_that_has_changed_is_proved_again(by):
    model = prepared(Heads, ROWS)
    samples(model, ROWS[:6], output_fn=by(0))
    coupled = samples(model, ROWS[:6], output_fn=by(1))
    expected = samples(model, ROWS[:6], output_fn=by(1), strategy="loop")
    torch.testing.assert_close(coupled, expected, rtol=1e-5, atol=1e-5)


def by_attribute_name(number):
    globals()["mT"] = torch.zeros(2)  # another one each time, which the function does not mean
    return lambda outputs: outputs[number].mT.mT


class Two(Counting):
    def forward(self, x):
        return (super().forward(x),)


STORED = [partial(take, 0), operator.itemgetter(0)]


@pytest.mark.parametrize("by", [*KEPT, by_attribute_name, *(lambda n, f=f: f for f in STORED)])
def test_one_that_stays_is_known(by):
    model = prepared(Two, ROWS)
    for _ in range(2):
        passes = count_passes(lambda: samples(model, ROWS[:8], output_fn=by(0)))
    assert passes == [8]


def test_plans_hold_neither_the_model_nor_what_output_fn_holds():
    model = prepared(Gated, ROWS)
    samples(model, ROWS[:6], output_fn=lambda out, m=model: out)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_elbo_takes_one_too(num_samples):
    """For a model that returns more than its logits; the loss is that of the logits."""
    net, options = Net(), dict(num_samples=num_samples, batch_weight=0.1, seed=3)
    (x, y), several = data(), copy.deepcopy(net)
    several.register_forward_hook(lambda module, args, out: {"logits": out, "twice": 2 * out})
    expected = bnuq.elbo_loss(net, x, y, **options)
    actual = bnuq.elbo_loss(several, x, y, output_fn=lambda out: out["logits"], **options)
    torch.testing.assert_close(actual, expected)
    actual.loss.backward(), expected.loss.backward()
    for a, e in zip(several.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad)
    with pytest.raises(TypeError, match="elbo_loss: output_fn must be callable, got str"):
        bnuq.elbo_loss(several, x, y, output_fn="logits", **options)
    with pytest.raises(TypeError, match="elbo_loss: output_fn's result must be a tensor, got dict"):
        bnuq.elbo_loss(several, x, y, output_fn=dict, **options)


@pytest.mark.parametrize("num_samples", [2, 4])
def test_elbo_with_one_that_couples_rows(num_samples):
    """Of a chain, whose layers need no proof."""
    chain, (x, y) = torch.nn.Sequential(Net().first, torch.nn.Tanh(), Net().last), data()
    options = dict(batch_weight=0.0, output_fn=lambda out: out - out.mean(0))
    actual = bnuq.elbo_loss(chain, x, y, num_samples=num_samples, seed=3, **options)
    with bnuq.replicas(chain, num_samples, seed=3):
        logits = chain(x).unflatten(0, (num_samples, len(x)))
    log_p = (logits - logits.mean(1, keepdim=True)).log_softmax(2)
    expected = -log_p.gather(2, y[None, :, None].expand(num_samples, -1, -1)).mean()
    torch.testing.assert_close(actual.nll, expected)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_elbo_of_an_output_without_classes(num_samples):
    """As of a binary classifier: the output is at fault, not y, which has its shape."""
    options = dict(num_samples=num_samples, batch_weight=0.1, output_fn=lambda out: out[:, 0])
    requirement = r"be logits \(N, K, \*\) for a categorical likelihood, got \[8\]"
    with pytest.raises(ValueError, match=f"elbo_loss: the output must {requirement}"):
        bnuq.elbo_loss(Net(), *data(), **options)
