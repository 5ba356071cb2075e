"""How near the outputs of two ways must be, and what can be told of none."""

import pytest
import torch
from torch import nn

from bnuq_ext.passes import DoesNotFold
from bnuq_ext.proof.agreement import check_equal, tolerance_of

COARSEST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 0.04}


@pytest.mark.parametrize(("dtype", "expected"), COARSEST.items())
@pytest.mark.parametrize("where", ["output", "input", "parameter"])
def test_the_coarsest_arithmetic_counts(dtype, expected, where):
    fine = torch.ones(2, dtype=torch.float64)
    coarse = fine.to(dtype)
    layer = nn.Linear(2, 2, dtype=dtype if where == "parameter" else torch.float64)
    layer.register_parameter("none", None)
    output, x = (coarse if where == name else fine for name in ("output", "input"))
    assert tolerance_of(output, {"x": x, "rows": torch.arange(2)}, [layer]) == expected


def test_autocast_counts():
    x = torch.ones(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert tolerance_of(x, x, []) == 0.04
    assert tolerance_of(x, x, []) == 1e-4


def test_outputs_without_values_agree_if_their_shapes_do():
    check_equal(torch.ones(3, 0, 2), torch.ones(3, 0, 2), 1e-4)
    with pytest.raises(DoesNotFold, match=r"the output has shape \[3, 2\] instead of \[3, 0\]"):
        check_equal(torch.ones(3, 2), torch.ones(3, 0), 1e-4)
