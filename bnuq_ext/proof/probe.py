"""Inputs and statistics of the trial that a model must pass before replicas are folded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import torch
from torch import Tensor

from ..inputs import has_rows, map_tensors, num_rows, tensors
from ..passes import Undecided
from ..samplers import Draw, Fitted, Statistics

ROWS = 3
CROWD = 9  # replicas of three rows, among which one may lie 5.1 standard deviations from the mean of all
_LOOKED_AT = 16  # rows of the input
_ALONE = 8  # of what is varied
# Of the same bits, for torch.where, which knew no others up to torch 2.11.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def leading(inputs, rows: int) -> list[Tensor]:
    """The tensors of an input whose first dimension is that of the rows, each once."""
    return list({id(t): t for t in tensors(inputs) if has_rows(t, rows)}.values())


def probe_inputs(op: str, inputs) -> tuple:
    """The input cut to three rows that differ from each other,
    and whether integers in them are made up.

    Rows of the input itself; then, of floating-point ones, these with their values weighted from a
    quarter to one, so that they stay in their range; then one half of one and the other of another;
    then one half of their values, each twice, and these flipped along their dimensions, which
    leaves integers valid where all are of one kind; last, for constant rows,
    these with a ramp added.
    """
    rows = num_rows(op, inputs)
    cut = leading(inputs, rows)
    firsts = [[t[i : i + 1] for t in cut] for i in _spread(rows)]
    chosen: list[list[Tensor]] = []
    for candidate in _candidates(firsts):
        if all(_differ(candidate, other) for other in chosen):
            chosen.append(candidate)
        if len(chosen) == ROWS:
            break
    else:
        raise Undecided("the input has too few different rows to find out")
    made = iter([torch.cat(parts) for parts in zip(*chosen, strict=True)])
    probe = map_tensors(inputs, lambda t: next(made) if has_rows(t, rows) else t)
    own = all(any(row is first for first in firsts) for row in chosen)
    return probe, not own and not all(t.is_floating_point() for t in firsts[0])


def copies_of_last(probe):
    """A probe of three rows that are all its last one."""
    cut = {id(t) for t in leading(probe, ROWS)}
    return map_tensors(
        probe, lambda t: t[-1:].repeat(ROWS, *[1] * (t.dim() - 1)) if id(t) in cut else t
    )


def varied_probes(probe) -> Iterator:
    """Probes of three rows with flags set otherwise: in columns with at most two values these change
    in some of the rows, and in tensors with equal rows in all of them. Each first in all
    tensors, then in one of the first tensors at a time, see `together_and_alone`.
    """
    given = leading(probe, ROWS)
    for vary in (_varied, _opposite):
        made = {id(t): varied for t in given if (varied := vary(t)) is not None}
        for keys in together_and_alone(list(made)):
            yield map_tensors(probe, lambda t, m=made, keys=keys: m[id(t)] if id(t) in keys else t)


def together_and_alone(keys: list) -> list[list]:
    """What to vary: all at once, and each of the first by itself, for a model may not take one
    beside another, or one may hide another."""
    alone = [[key] for key in keys[:_ALONE]] if len(keys) > 1 else []
    return [keys, *alone] if keys else []


def _opposite(t: Tensor) -> Tensor | None:
    """Of a tensor whose columns have one value each: a one for zero and zero for others."""
    signed = _SIGNED.get(t.dtype, t.dtype)
    if not t.numel() or not torch.equal(t[:1].expand_as(t).view(signed), t.view(signed)):
        return None
    return (t.view(signed) == 0).to(signed).view(t.dtype)


def _varied(t: Tensor) -> Tensor | None:
    """The two values of a column change places; where there is one, two of the rows get a one for
    zero and zero for others, in about half of these columns each. None where all columns have three
    values."""
    signed = _SIGNED.get(t.dtype, t.dtype)
    rows = t.reshape(ROWS, -1).view(signed)
    first, second, third = rows
    other = torch.where(second == first, third, second)
    two = (second == first) | (third == first) | (third == second)
    same = other == first
    other = torch.where(same, (first == 0).to(signed), other)
    half = same.cumsum(0) * 2 <= same.sum() + 1
    changes = two & torch.stack([~same | half, ~same, ~same | ~half])
    varied = torch.where(changes, torch.where(rows == first, other, first), rows)
    return varied.view(t.dtype).view(t.shape) if two.any() else None


def _spread(rows: int) -> list[int]:
    """Numbers of rows all over the input, the first three far apart: neighbours may be alike."""
    count = min(rows, _LOOKED_AT)
    order = sorted(range(count), key=lambda i: f"{i:04b}"[::-1])
    return [i * rows // count for i in order]


def _candidates(firsts: list[list[Tensor]]):
    yield from firsts
    yield from (made for row in firsts for made in _weighted(row))
    for row, other in product(firsts, firsts):
        yield [_crossed(s, t) for s, t in zip(row, other, strict=True)]
    for make in (_stretched, _flipped, _ramped):
        yield from (made for row in firsts for made in make(row))


def _weighted(row: list[Tensor]):
    for first, last in ((0.25, 1), (1, 0.25)):
        yield [t * _ramp(t, first, last) if t.is_floating_point() else t for t in row]


def _crossed(s: Tensor, t: Tensor) -> Tensor:
    half = s.numel() // 2
    return torch.cat([s.flatten()[:half], t.flatten()[half:]]).view(s.shape)


def _stretched(row: list[Tensor]):
    for half in (0, 1):
        yield [_twice(t, half) for t in row]


def _twice(t: Tensor, half: int) -> Tensor:
    values = t.flatten()
    places = torch.arange(len(values), device=t.device) // 2 + half * (len(values) // 2)
    return values[places].view(t.shape)


def _flipped(row: list[Tensor]):
    most = max(t.dim() for t in row)
    for count in range(1, most):
        for dims in combinations(range(1, most), count):
            yield [t.flip([d for d in dims if d < t.dim()]) for t in row]


def _ramped(row: list[Tensor]):
    for last in (0.5, 1):
        yield [t + _ramp(t, last / 5, last) if t.is_floating_point() else t for t in row]


def _ramp(t: Tensor, first: float, last: float) -> Tensor:
    return torch.linspace(first, last, t.numel(), device=t.device).view(t.shape).to(t.dtype)


def _differ(a: list[Tensor], b: list[Tensor]) -> bool:
    return not all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def probe_draws(draw: Draw, num_samples: int = 2) -> list[Draw]:
    """Replicas that differ from the one before in every layer: each alone, and last all together.

    The first has the statistics of a replica of `draw`; in every second each mean is moved by half
    a standard deviation, up or down from channel to channel, and each variance is half as large
    again; Bayesian layers widen their posterior. So the trial does not depend on how different the
    snapshots of the bank are, or the samples of a posterior.
    """
    tables = {key: _spread_out(draw, statistics) for key, statistics in draw.tables.items()}
    rows = torch.arange(num_samples, device=draw.seed.device) % 2
    one_on = torch.arange(2, device=draw.seed.device)  # key, next replica
    alone = [
        Draw(1, draw.seed + t * one_on, rows[t : t + 1], tables, trial=True)
        for t in range(num_samples)
    ]
    return [*alone, Draw(num_samples, draw.seed, rows, tables, trial=True)]


def _spread_out(draw: Draw, statistics: Statistics | Fitted) -> Statistics:
    if isinstance(statistics, Fitted):
        mean, spread = statistics.params[:1], statistics.params[2:3]
        var = (spread.exp() if statistics.family == "lognormal" else spread).square()
    else:
        mean, var = (table[draw.snapshot[:1]] for table in statistics)
    sign = torch.ones_like(mean)
    sign[:, 1::2] = -1
    moved = mean + 0.5 * sign * (var + 1e-5).sqrt()
    return Statistics(torch.cat([mean, moved]), torch.cat([var, 1.5 * var + 1e-5]))
