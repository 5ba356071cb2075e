"""Folding in other dtypes, under autocast, and where the precision of float32 products was set."""

import pytest
import torch
from coupled import ROWS, BatchAttention, Gated
from folded import prepared, samples, way

from bnuq_ext import model_cache


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_fold(dtype):
    model = prepared(Gated, ROWS).to(dtype)
    x = ROWS[:16].to(dtype)
    out, expected = samples(model, x), samples(model, x, strategy="loop")
    assert out.dtype == dtype and way(model) == "folded"
    tolerance = {torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_autocast_has_a_plan_of_its_own():
    model = prepared(Gated, ROWS)
    samples(model, ROWS[:16])
    with torch.autocast("cpu", torch.bfloat16):
        out = samples(model, ROWS[:16])
        expected = samples(model, ROWS[:16], strategy="loop")
    assert out.dtype == torch.bfloat16 and len(model_cache._CACHES[model].plans) == 2
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


class FarFromZero(Gated):
    def forward(self, x):
        return super().forward(x) + 100


class CoupledIn16Bits(Gated):
    def forward(self, x):
        y = super().forward(x)
        return y if y.dtype == torch.float32 else y * (30 / y.abs().amax().clamp_min(30))


class TableOfADtype(Gated):
    """Made anew for another dtype, as rotary embeddings are."""

    def __init__(self):
        super().__init__()
        self.table = torch.ones(1)

    def forward(self, x):
        y = super().forward(x)
        if self.table.dtype != y.dtype:
            self.table = torch.ones(1, dtype=y.dtype)
        return y * self.table


@pytest.mark.parametrize(
    "cls,input_dtype,expected",
    [
        (Gated, torch.float32, {"folded"}),
        (Gated, torch.bfloat16, {"folded"}),  # which does not run without autocast
        (FarFromZero, torch.float32, {"folded"}),
        (FarFromZero, torch.bfloat16, set()),  # undecided
        (BatchAttention, torch.float32, {"loop"}),
        (CoupledIn16Bits, torch.float32, {"loop"}),
        (TableOfADtype, torch.float32, {"folded"}),
    ],
)
def test_where_autocast_tells_nothing_the_trial_is_made_without_too(cls, input_dtype, expected):
    model, x = prepared(cls, ROWS), ROWS[:16].to(input_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        samples(model, x)  # which makes the table
        out = samples(model, x)
        assert {plan.way for plan in model_cache._CACHES[model].plans.values()} == expected
        loop = samples(model, x, strategy="loop")
    torch.testing.assert_close(out, loop, rtol=2e-2, atol=2e-2)
