"""Whether replicas that go through a model together are those that go alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..inputs import tensors
from ..interrupts import raise_interrupt
from ..passes import DoesNotFold, Undecided
from ..samplers import Draw
from .probe import ROWS

_APART = 3  # tolerances that outputs must differ by to be told apart
_LARGE = 1e3  # of what batch norm gives
_ROUNDED = 4  # times the rounding of large channels that small ones may show


def check_equal(folded: Tensor, loop: Tensor, tolerance: float) -> None:
    """Raises DoesNotFold unless the two agree, relative to the largest finite value;
    NaN only to NaN.

    Channels (of the second dimension, and of the last) with much smaller values than the largest
    must agree relative to their own, as far as the rounding of the largest can be told
    from a difference.
    """
    if folded.shape != loop.shape:
        raise DoesNotFold(
            f"the output has shape {list(folded.shape)} instead of {list(loop.shape)}"
        )
    if loop.numel() == 0:
        return
    folded, loop = folded.double(), loop.double()
    values = torch.where(loop.isfinite(), loop, 0).abs()
    difference, largest = (folded - loop).abs(), values.max()
    same = (folded == loop) | (folded.isnan() & loop.isnan())
    near = difference <= tolerance * largest
    if not (near | same).all():
        most = (difference[~(near | same)].nan_to_num(math.inf).max() / largest).item()
        raise DoesNotFold(
            "the output differs from that of one replica after another, "
            f"by {most:.1g} of the largest value where {tolerance:.1g} may be rounding"
        )
    difference = difference.nan_to_num(0)
    for dim in {1, loop.dim() - 1} if loop.dim() > 1 else ():
        _check_channels(difference, values, dim, tolerance)


def _check_channels(difference: Tensor, values: Tensor, dim: int, tolerance: float) -> None:
    others = [d for d in range(values.dim()) if d != dim]
    scales, differences = values.amax(others), difference.amax(others)
    if (differences <= tolerance * scales).all():
        return
    largest = scales.max()
    # A small channel may be what is left of large numbers, and rounded as these are.
    rounding = differences[scales >= largest / 10].max().clamp(min=tolerance / 100 * largest)
    far = differences > torch.maximum(tolerance * scales, _ROUNDED * rounding)
    if far.any():
        raise DoesNotFold(
            "a channel of the output differs from that of one replica after another, "
            f"by {(differences / scales)[far].max().item():.1g} of its largest value "
            f"where {tolerance:.1g} may be rounding"
        )


def check_apart(
    run: Callable[[Draw], Tensor], draw: Draw, folded: Tensor, tolerance: float, finite: bool
) -> None:
    """Raises DoesNotFold if values of one of two replicas show in the rows of the other.

    Its stochastic calls give infinities, which pass a gate at zero, a clip or a threshold that the
    trial's own values may leave shut; a forward that takes none, or must not be given any
    (`finite`), is given large values. `folded` is what `run` gives without them.
    """
    expected = folded.chunk(2)
    for replica, sign in product((0, 1), (1, -1)):
        for size in (_LARGE,) if finite else (math.inf, _LARGE):
            try:
                outputs = run(draw._replace(tap=partial(_fill, replica, sign * size))).chunk(2)
            except Exception as error:
                raise_interrupt(error)
                continue
            check_equal(outputs[1 - replica], expected[1 - replica], tolerance)
            break


def _fill(replica: int, value: float, y: Tensor) -> None:
    y[replica] = value


def check_scaled(
    alone: Callable[[Draw], Tensor],
    run: Callable[[Draw], Tensor],
    draws: list[Draw],
    folded: Tensor,
    tolerance: float,
) -> None:
    """Raises DoesNotFold if one of two replicas whose channels are scaled, all up or each by another
    factor, is treated otherwise than alone, or changes what the other is.

    That shows what all rows of a batch decide together: whether to leave early, a mask of columns.

    Args:
        alone: runs a draw of one replica; `run`: one of both together.
        draws: those two, and of both.
        folded: what `run` gives with nothing scaled.
    """
    expected = folded.chunk(2)
    for replica, all_up in ((0, True), (1, False)):
        both = draws[-1]._replace(tap=partial(_scale, replica, all_up))
        one = draws[replica]._replace(tap=partial(_scale, 0, all_up))
        try:
            outputs, own = run(both).chunk(2), alone(one)
        except Exception as error:  # a forward that takes no such values tells nothing
            raise_interrupt(error)
            continue
        try:
            check_equal(outputs[1 - replica], expected[1 - replica], tolerance)
            if own.isfinite().all():
                check_equal(outputs[replica], own, tolerance)
        except DoesNotFold as error:
            if not _magnifies_rounding(alone, one, own, tolerance):
                raise DoesNotFold(f"where a replica is scaled, {error}") from error


def _magnifies_rounding(
    alone: Callable[[Draw], Tensor], draw: Draw, own: Tensor, tolerance: float
) -> bool:
    """Whether an output shows changes that are as small as rounding: a softmax of large numbers,
    the sine of one."""
    # What coarse dtypes may differ by is less.
    share = tolerance / (10 if tolerance > 1e-3 else 100)
    nudged = alone(draw._replace(tap=partial(_nudge, draw.tap, share)))
    try:
        check_equal(nudged, own, tolerance / 4)
    except DoesNotFold:
        return True
    return False


def _nudge(tap: Callable[[Tensor], None], share: float, y: Tensor) -> None:
    tap(y)
    y *= 1 + share * _waves(y)


def _scale(replica: int, all_up: bool, y: Tensor) -> None:
    own = y[replica]
    if not all_up:
        own *= 10 ** (1.5 * _waves(y))
    own *= 100 / own.abs().amax().clamp_min(torch.finfo(y.dtype).tiny)  # in deep layers too


def _waves(y: Tensor) -> Tensor:
    """Numbers from -1 to 1, another one for each value of a row."""
    angles = torch.arange(y[0, 0].numel(), device=y.device, dtype=torch.float64) * 2.4
    return angles.cos().to(y.dtype).view(y.shape[2:])


class Crowd(NamedTuple):
    """What stochastic calls give in a trial of many replicas.

    Attributes:
        first, others: make them of those of the first replica and of the others, in place.
        where: how a message says so.
    """

    first: Callable[[Tensor], None]
    others: Callable[[Tensor], None]
    where: str


def check_crowd(
    alone: Callable[[Draw], Tensor],
    run: Callable[[Draw], Tensor],
    draws: list[Draw],
    tolerance: float,
    twins: bool,
    crowd: Crowd,
) -> None:
    """Raises DoesNotFold if the first replica, or the last ones, are treated otherwise among several.

    Args:
        alone: runs a draw of one replica; `run`: one of all of `draws[:-1]` together, `draws[-1]`.
        twins: whether replicas 0, 2, 4, ... are the same, and so 1, 3, 5, ...: trials take two
            statistics in turns, and no layer draws weights.
    """
    try:
        first = alone(draws[0]._replace(tap=crowd.first))
        last = [alone(draw._replace(tap=crowd.others)) for draw in draws[-3:-1]]
        outputs = run(draws[-1]._replace(tap=crowd.first)).chunk(len(draws) - 1)
    except Exception as error:  # a forward that takes no such values tells nothing
        raise_interrupt(error)
        return
    if not all(output.isfinite().all() for output in (first, *last)):
        return
    try:
        check_equal(outputs[0], first, tolerance)
        for t in range(1, len(outputs) if twins else 3):
            check_equal(outputs[-t], last[-1 - (t - 1) % 2], tolerance)
    except DoesNotFold as error:
        raise DoesNotFold(f"{crowd.where}, {error}") from error


def _outlie(y: Tensor) -> None:
    """Makes all small but the first row of the first replica: a hundred times as large as its other
    rows, and still where activations are not saturated."""
    _shrink(y)
    row, others = y[0, 0], y[0, 1:]
    if others.numel():
        row *= 100 * others.abs().amax() / row.abs().amax().clamp_min(torch.finfo(y.dtype).tiny)


def _shrink(y: Tensor) -> None:
    y *= 0.01


def _near(y: Tensor) -> None:
    """Makes the rows of all replicas one row and a share of their own, another for each of three."""
    shares = torch.tensor([0.02, 0.005, 0.001], device=y.device, dtype=y.dtype)
    shares = shares.repeat(-(-y.shape[1] // 3))[: y.shape[1]]
    y *= shares.view(-1, *[1] * (y.dim() - 2))
    y += _waves(y)


OUTLIER = Crowd(_outlie, _shrink, "where a row lies far out")
"""A mask or a clip by the spread or the median of a batch shows by it: of n rows one lies at most
sqrt(n - 1) standard deviations from their mean."""

ALIKE = Crowd(_near, _near, "where rows are nearly alike")
"""An expert that takes so many rows and no more, or leaves out one of two that are near, shows by
it, where rows are copies."""


def check_gradients(
    parameters: list[Tensor], folded: Tensor, loop: Tensor, tolerance: float
) -> None:
    """Raises DoesNotFold unless the two have the same gradients, as far as autograd gives any."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(loop.shape, generator=generator, device="cpu").to(loop)
    options = {"grad_outputs": weights, "allow_unused": True}
    try:
        with _hooks_aside(parameters):
            both = [torch.autograd.grad(out, parameters, **options) for out in (folded, loop)]
    except Exception as error:  # of reentrant checkpoints, for one
        raise_interrupt(error)
        return
    flat = []
    for gradients in both:
        filled = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(parameters, gradients, strict=True)
        ]
        flat.append(torch.cat([g.double().flatten() for g in filled]))
    check_equal(*flat, tolerance)


def are_unused(parameters: list[Tensor], output: Tensor) -> bool:
    """Whether an output has no gradients with respect to parameters that could have some."""
    if not output.requires_grad:
        return True
    try:
        with _hooks_aside(parameters):
            given = torch.ones_like(output)
            gradients = torch.autograd.grad(output, parameters, given, allow_unused=True)
    except Exception as error:  # see check_gradients
        raise_interrupt(error)
        return False
    return all(g is None for g in gradients)


@contextmanager
def _hooks_aside(parameters: list[Tensor]):
    """Hooks of parameters, which see sums over all rows,
    are for the user's gradients and not those of a trial."""
    hooks = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    try:
        for p, _ in hooks:
            p._backward_hooks = None
        yield
    finally:
        for p, own in hooks:
            p._backward_hooks = own


def check_informative(loop: Tensor, tolerance: float) -> None:
    """Raises Undecided unless replicas and rows of (2, 3, ...)
    outputs differ enough to tell them apart."""
    values = loop.double().unsqueeze(-1).flatten(2)
    if not values.isfinite().all():
        raise Undecided("the outputs of the trial are not finite")
    least, largest = _APART * tolerance, values.abs().max()
    pairs = [
        (values[0], values[1]),
        *((values[:, i], values[:, j]) for i, j in combinations(range(ROWS), 2)),
    ]
    closest = min((a - b).abs().max() for a, b in pairs)
    if not closest > least * largest:
        share = closest / largest.clamp_min(torch.finfo(values.dtype).tiny)
        raise Undecided(
            "the outputs of the trial do not tell replicas and rows apart: two differ by "
            f"{share.item():.1g} of the largest value, not by more than {least:.1g}"
        )


def check_replica(outputs: Tensor, replica: int, alone: Tensor, tolerance: float) -> None:
    """Raises unless that replica of outputs (T, N, ...) is the one run alone, and Undecided where
    the one before it is nearly the same, so that an influence of the others would not show."""
    check_equal(outputs[replica], alone, tolerance)
    difference = (outputs[replica - 1].double() - alone.double()).abs().max()
    if not difference > _APART * tolerance * alone.double().abs().max():
        raise Undecided("the replicas are nearly the same")


def tolerance_of(output: Tensor, inputs, modules: list[nn.Module]) -> float:
    """How far the folded output may be from the loop's:
    rounding of the coarsest arithmetic involved."""
    dtypes = {t.dtype for t in tensors(inputs) if t.is_floating_point()}
    dtypes |= {p.dtype for m in modules for p in m._parameters.values() if p is not None}
    dtypes.add(output.dtype)
    device = output.device.type
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    if torch.bfloat16 in dtypes:
        return 0.04
    if torch.float16 in dtypes:
        return 5e-3
    if torch.float32 not in dtypes:
        return 1e-9
    # allow_tf32 cannot be read where these were set by themselves.
    switches = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    tf32 = any(switch.fp32_precision == "tf32" for switch in switches)
    # Through the fifty layers of a ResNet TF32 was emulated to differ by 5.5e-3 between two orders
    # of summation.
    return 1.5e-2 if device == "cuda" and tf32 else 1e-4
