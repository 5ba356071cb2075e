"""What bayes_linear keeps for its backward, and holds at most, does not grow with T."""

import pytest
import torch
from test_linear import FEW, make, run

from benchmarks.memory import peak_extra_bytes
from bnuq_ext import ops


def test_saves_only_its_inputs_whatever_T():
    inputs = make(FEW + 2, 64, 48, 50, True, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(inputs, ops.new_seed(0), 50)
    x, mu, rho, _, bias_rho = inputs
    allowed = {t.data_ptr() for t in (x, mu, rho, bias_rho)}
    assert {t.data_ptr() for t in kept if t.numel() > 2} <= allowed


def held(N, shared, T):
    """Bytes that a forward and backward hold at most, beyond x, the outputs and the gradients."""
    inputs = [t.detach() for t in make(N, 300, 20, T, shared, torch.float32, bias=False)[:3]]
    inputs = [t.requires_grad_() for t in inputs]
    outputs = []

    def step():
        y = run([*inputs, None, None], ops.new_seed(0), T)
        y.backward(torch.ones_like(y))
        outputs.append(y)

    return peak_extra_bytes(step) - 2 * outputs[0].nbytes - sum(t.nbytes for t in inputs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("N", [1, FEW, FEW + 4])
def test_holds_no_more_for_more_replicas(N, shared):
    """One more of a shared x's size each, from 32 replicas to 64, would be 38 KiB for one row."""
    assert held(N, shared, 64) <= held(N, shared, 32) + 4096
