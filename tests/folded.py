"""A converted model, and whether its predictions are those of the loop over its replicas."""

import copy

import torch

import bnuq_ext as bnuq
from bnuq_ext import model_cache


def prepared(cls, x, num_batches=8):
    """A converted model with a bank of batches of six rows."""
    torch.manual_seed(0)
    model = bnuq.convert(cls()).eval()
    batches = [x[6 * i : 6 * i + 6] * (1 + 0.1 * i) + 0.1 * i for i in range(num_batches)]
    bnuq.collect(model, batches, num_batches, progress=False)
    return model


def samples(model, x, **options):
    torch.manual_seed(3)
    options = {"num_samples": 6, "seed": 5, "likelihood": "gaussian", **options}
    return bnuq.predict(model, x, keep_samples=True, **options).samples


def way(model):
    """How the last plan sends replicas through."""
    return list(model_cache._CACHES[model].plans.values())[-1].way


def assert_goes_as_the_loop(model, *inputs, **options):
    """The answers are those of a copy that runs the loop."""
    for x in inputs:
        expected = samples(copy.deepcopy(model), x, strategy="loop", **options)
        torch.testing.assert_close(samples(model, x, **options), expected, rtol=1e-5, atol=1e-5)


def assert_right_or_refused(model, x, **options):
    """Auto gives the loop's answer, and so does folded unless it refuses;
    each on a model of its own."""
    loop, auto, folded = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    expected = samples(loop, x, strategy="loop", **options)
    torch.testing.assert_close(samples(auto, x, **options), expected, rtol=1e-5, atol=1e-5)
    try:
        actual = samples(folded, x, strategy="folded", **options)
    except ValueError as error:
        assert "does not fold" in str(error)
        return None
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    return way(auto)
