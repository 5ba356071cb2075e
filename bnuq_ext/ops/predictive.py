"""What T replicas' logits say: mean, variance, entropy and expected entropy
of the probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import formulas
from .checks import (
    acc_dtype,
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
    check_within,
    refuse,
)
from .modes import is_differentiated, lacks_rule, mark_written, past_autograd


class PredictiveStatistics(NamedTuple):
    """See `predictive_statistics`."""

    mean: Tensor
    variance: Tensor
    entropy: Tensor
    expected_entropy: Tensor


def predictive_statistics(logits: Tensor) -> PredictiveStatistics:
    """Statistics of p_t = softmax(logits[t]) over T replicas, in one pass over the logits.

        mean = sum_t p_t / T,      variance = sum_t (p_t - mean)^2 / T,
        entropy = H[mean],         expected_entropy = sum_t H[p_t] / T

    The mutual information between class and replica is `entropy - expected_entropy`.

    Args:
        logits: (T, N, K, *), T at least 1; float32, float64, float16 or bfloat16.

    Returns:
        mean (N, K, *), variance (N, K, *), entropy (N, *), expected_entropy (N, *), entropies in
        nats; float32, or float64 for float64. The replicas are taken one after another (Welford's
        recursion); where they take few different values, float32 means are off by up to 1e-9 T
        and entropies by 3e-9 T, so that more than some 10,000 replicas want float64 logits (in
        `predict`: output_fn=torch.Tensor.double). Deterministic. Gradients with respect to the logits.

    Raises:
        ValueError, TypeError: logits have the wrong shape or dtype.
    """
    _check_logits("predictive_statistics", logits)
    if lacks_rule(logits):
        return PredictiveStatistics(*formulas.predictive_statistics(logits))
    with past_autograd():
        return PredictiveStatistics(*torch.ops.bnuq.predictive_statistics.default(logits))


def predictive_accumulate_(
    mean: Tensor, m2: Tensor, expected_entropy: Tensor, logits: Tensor, count: int
) -> None:
    """Takes T replicas more into running predictive statistics, in place.

    Start from zeros with count 0. After T replicas in all, in chunks of any size and with the same
    bits: variance = m2 / T (T a tensor, for the last bit:
    by a number torch multiplies with 1/T on a GPU). No gradients.

    Args:
        mean: (N, K, *), mean probability so far; contiguous, float32 (float64 for float64 logits).
        m2: (N, K, *), sum of squared deviations from it.
        expected_entropy: (N, *), mean of the replicas' entropies so far, in nats.
        logits: (T, N, K, *), T at least 1.
        count: replicas already taken in; at least 0.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, device, layout, value or dtype.
    """
    op = "predictive_accumulate_"
    _check_logits(op, logits)
    check_within(op, "count", count, 0, 2**63, "[0, 2^63)")
    shape = logits.shape[1:]
    for name, value, own_shape in (
        ("mean", mean, shape),
        ("m2", m2, shape),
        ("expected_entropy", expected_entropy, shape[:1] + shape[2:]),
    ):
        check_tensor(op, name, value)
        if value.dtype != acc_dtype(logits.dtype):
            refuse(op, name, f"be {acc_dtype(logits.dtype)}", value.dtype, TypeError)
        check_shape(op, name, value, own_shape)
        check_device(op, name, value, logits.device)
        if not value.is_contiguous():
            refuse(op, name, "be contiguous", f"strides {value.stride()}")
        if value.requires_grad and torch.is_grad_enabled():
            refuse(op, name, "need no gradient", "requires_grad=True")
    torch.ops.bnuq.predictive_accumulate_.default(mean, m2, expected_entropy, logits, count)
    mark_written(mean, m2, expected_entropy)


def _check_logits(op: str, logits: Tensor) -> None:
    check_dtype(op, "logits", logits)
    if logits.dim() < 3:
        refuse(op, "logits", "have at least 3 dimensions (T, N, K, *)", list(logits.shape))
    if logits.shape[0] < 1:
        refuse(op, "logits", "hold at least 1 replica", list(logits.shape))


@torch.library.register_fake("bnuq::predictive_statistics")
def _(logits):
    shape, acc = logits.shape[1:], acc_dtype(logits.dtype)
    positions = shape[:1] + shape[2:]
    return tuple(logits.new_empty(s, dtype=acc) for s in (shape, shape, positions, positions))


@torch.library.register_fake("bnuq::predictive_statistics_backward")
def _(logits, mean, *grads):
    return logits.new_empty(logits.shape)


@torch.library.register_fake("bnuq::predictive_accumulate_")
def _(mean, m2, expected_entropy, logits, count):
    return None


@torch.library.register_vmap("bnuq::predictive_accumulate_")
def _(info, in_dims, mean, m2, expected_entropy, logits, count):
    """Rows of the transform are further rows N; the states are made inside it, of the logits."""
    *dims, of_logits = in_dims[:4]
    if None in dims:
        states = "mean, m2 and expected_entropy"
        raise NotImplementedError(
            f"predictive_accumulate_: {states} must be made inside vmap, of its logits"
        )
    inside = [t.movedim(d, 0) for t, d in zip((mean, m2, expected_entropy), dims, strict=True)]
    # Copies, which share no memory with what they are written back to.
    states = [t.flatten(0, 1).clone(memory_format=torch.contiguous_format) for t in inside]
    if of_logits is None:
        logits, of_logits = logits.expand(info.batch_size, *logits.shape), 0
    rows = logits.movedim(of_logits, 1).flatten(1, 2)
    torch.ops.bnuq.predictive_accumulate_(*states, rows, count)
    for t, state in zip(inside, states, strict=True):
        t.copy_(state.view_as(t))
    return None, None


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[0])
    ctx.set_materialize_grads(False)


def _backward(ctx, *grads):
    logits, mean = ctx.saved_tensors
    if is_differentiated(*grads):
        (grad,) = formulas.gradients_by(formulas.predictive_statistics, (logits,), grads, (True,))
        return grad
    return torch.ops.bnuq.predictive_statistics_backward(logits, mean, *grads)


torch.library.register_autograd(
    "bnuq::predictive_statistics", _backward, setup_context=_setup_context
)
