"""Arguments that are True or False take nothing else, and leave everything as it was then."""

import pytest
import torch
from predicting import DATA, X, make_model
from torch import nn
from torch.utils.data import TensorDataset

import bnuq_ext as bnuq

LIKELIHOOD = {"likelihood": "categorical"}
ROWS = TensorDataset(DATA, torch.zeros(len(DATA), dtype=torch.int64))
CALLS = {
    "convert": (lambda m, **f: bnuq.convert(nn.BatchNorm1d(3), **f), ["inplace", "strict"]),
    "revert": (bnuq.revert, ["inplace"]),
    "collect": (lambda m, **f: bnuq.collect(m, [DATA], 1, **f), ["progress"]),
    "predict": (
        lambda m, **f: bnuq.predict(m, X, **LIKELIHOOD, **f),
        ["keep_samples", "progress"],
    ),
    "plug_in": (
        lambda m, **f: bnuq.plug_in(m, X, **LIKELIHOOD, **f),
        ["keep_samples", "progress"],
    ),
    "freeze": (bnuq.freeze, ["statistics", "affine"]),
    "fit_batch_size": (
        lambda m, **f: bnuq.fit_batch_size(m, ROWS, [8], **LIKELIHOOD, **f),
        ["progress"],
    ),
    "statistics_normality": (
        lambda m, **f: bnuq.statistics_normality(m, ROWS, batch_size=4, **f),
        ["progress"],
    ),
    "BayesLinear": (lambda m, **f: bnuq.BayesLinear(2, 3, **f), ["bias"]),
}
FLAGS = [(op, flag) for op, (_, flags) in CALLS.items() for flag in flags]


@pytest.mark.parametrize("value", ["no", 2, None, torch.tensor(True)])
@pytest.mark.parametrize("op, flag", FLAGS)
def test_what_is_no_truth_value_is_refused(op, flag, value):
    model = make_model()
    classes, random = [type(m) for m in model.modules()], torch.get_rng_state()
    with pytest.raises(TypeError) as caught:
        CALLS[op][0](model, **{flag: value})
    assert str(caught.value) == f"{op}: {flag} must be True or False, got {value!r}"
    assert [type(m) for m in model.modules()] == classes
    assert not any(layer.frozen for layer in bnuq.nn.named_stochastic_layers(model).values())
    assert torch.equal(torch.get_rng_state(), random)
