"""Folding where the precision of float32 products was set."""

import pytest
import torch
from coupled import ROWS, Gated
from test_folding import prepared, samples, way


@pytest.fixture(params=["ieee", "tf32"])
def precision_of_convolutions(request):
    """Set by torch's newer switch; after that torch refuses to say whether TF32 is allowed."""
    switches = torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [switch.fp32_precision for switch in switches]
    switches[0].fp32_precision, switches[1].fp32_precision = request.param, "ieee"
    yield
    for switch, value in zip(switches, before, strict=True):
        switch.fp32_precision = value


def test_models_fold_with_a_precision_of_their_own(precision_of_convolutions):
    with pytest.raises(RuntimeError, match="allow_tf32"):
        assert torch.backends.cudnn.allow_tf32
    model = prepared(Gated, ROWS)
    samples(model, ROWS[:16])
    assert way(model) == "folded"
