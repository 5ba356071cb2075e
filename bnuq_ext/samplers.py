"""How the statistics of a replica are drawn: `bank`, `joint`, `lognormal`, `normal`, `batch`.

A sampler turns (key, first replica, T) into a `Draw`. It is a function of these three alone, so a
replica's statistics do not depend on the chunk that it is drawn in, nor, but for the rounding of
normals, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from .inputs import tensors
from .moments import Rescaling, fit
from .ops import new_seed, philox_normal, snapshot_indices
from .ops.batch_norm import fitted_statistics
from .ops.checks import check_integer, check_key_range, check_one_of, refuse
from .ops.modes import has_values, is_captured
from .ops.philox import new_key
from .restore import preserved_rng, unmoved_by_errors, without_gradients
from .warn import warn

if TYPE_CHECKING:
    from .bank import Bank

_BLOCK = 16  # replicas that "joint" draws at a time


class Statistics(NamedTuple):
    """Tables that replica t takes row `snapshot[t]` of: mean (B, C) and biased variance (B, C)."""

    mean: Tensor
    var: Tensor


class Fitted(NamedTuple):
    """Distributions that an op draws from: params (4, C) and family,
    see `ops.batch_norm_fitted`."""

    params: Tensor
    family: str


Tables = dict[str, Statistics]  # of each call


class Draw(NamedTuple):
    """The statistics of T replicas.

    Attributes:
        num_samples: T.
        seed: (2,) int64, key and first replica.
        snapshot: (T,) int64, rows of the tables; None without tables of snapshots.
        tables: {key: Statistics | Fitted}, the key naming a layer's call.
        trial: whether the replicas are made up for a trial, where they have to differ visibly:
            BayesLinear widens its posterior then.
        tap: is shown what every stochastic call gives, (T, rows, ...); a trial's changes it in place.
    """

    num_samples: int
    seed: Tensor
    snapshot: Tensor | None
    tables: dict[str, Statistics | Fitted]
    trial: bool = False
    tap: Callable[[Tensor], None] | None = None

    def statistics(self, key: str, stream: int) -> Statistics:
        """Mean and biased variance (T, C) of each replica in a layer's call."""
        tables = self.tables[key]
        if isinstance(tables, Fitted):
            source = (self.seed, stream, self.num_samples, tables.family)
            return Statistics(*fitted_statistics(tables.params, *source))
        return Statistics(*(table[self.snapshot] for table in tables))


class Sampler(Protocol):
    def draw(self, key: int, first_replica: int, num_samples: int) -> Draw: ...


class _Latest:
    """What a sampler has made last, for calls that take gradients too; in a CUDA graph nothing: its
    memory is the graph's own, and a graph needs what it reads for as long as it is replayed. What has
    no values outside of a transform or mode is not kept either."""

    def __init__(self, device: torch.device):
        self.device, self.made = device, (None, None)

    def get(self, make: Callable, *asked: int):
        if is_captured(self.device):
            return make(*asked)
        known, value = self.made
        if known != asked:
            with without_gradients():
                value = make(*asked)
            if not has_values(tensors(value)[0]):
                return value
            self.made = asked, value
        return value


class BankSampler:
    """`bank`: stored snapshots (MCBN, Teye et al. 2018, with stored statistics).

    Replica t uses snapshot perm_e(t mod B), e = floor(t / B), the same in all layers; see
    `ops.snapshot_indices`.
    """

    def __init__(self, bank: Bank, device: torch.device):
        self.num_snapshots, self.device = len(bank), device
        self.tables = bank.on(device)
        self._latest = _Latest(device)

    def draw(self, key: int, first_replica: int, num_samples: int) -> Draw:
        return self._latest.get(self._draw, key, first_replica, num_samples)

    def _draw(self, key: int, first_replica: int, num_samples: int) -> Draw:
        seed = new_seed(key, first_replica, self.device)
        snapshot = snapshot_indices(seed, self.num_snapshots, num_samples)
        return Draw(num_samples, seed, snapshot, self.tables)


class WeightSampler:
    """Of a model without stochastic batch norm: the layers draw their weights from key
    and replica."""

    def __init__(self, device: torch.device):
        self.device = device

    def draw(self, key: int | Tensor, first_replica: int, num_samples: int) -> Draw:
        return Draw(num_samples, new_seed(key, first_replica, self.device), None, {})


class BatchSampler:
    """`batch`: fresh mini-batches (MCBN, Algorithm 1 of Teye et al. 2018);
    replica t uses the t-th."""

    def __init__(self, bank: Bank, device: torch.device):
        self.device = device
        self.tables = bank.on(device)

    def draw(self, key: int, first_replica: int, num_samples: int) -> Draw:
        seed = new_seed(key, first_replica, self.device)
        snapshot = torch.arange(first_replica, first_replica + num_samples, device=self.device)
        return Draw(num_samples, seed, snapshot, self.tables)


class JointSampler:
    """`joint`: a Gaussian with the bank's own covariance over the (mean, log spread) of all layers.

        (mean, ln spread)[t] = centre + z[t] (snapshots - centre) / sqrt(B - 1),   z[t] ~ N(0, I_B)

    One z a replica, so the correlations between layers are the bank's. A channel whose spread is 0
    in every snapshot keeps it. Computed in float64, sixteen replicas at a time: the shape of a
    product must not depend on the chunk, for its rounding may.
    """

    def __init__(self, tables: Tables, rescaling: Rescaling, device: torch.device):
        self.num_snapshots, self.device = len(next(iter(tables.values()))[0]), device
        scale = (rescaling.factor / (self.num_snapshots - 1)) ** 0.5
        self.parts = {}
        for key, (mean, var) in tables.items():
            fitted = fit(mean, var, rescaling)
            self.parts[key] = (
                torch.cat([fitted.mean, fitted.log_spread]),
                torch.cat([fitted.mean_deviations, fitted.log_deviations], 1) * scale,
                fitted.spread > 0,
                mean.dtype,
            )
        self._latest = _Latest(device)  # the loop asks for the same block sixteen times

    def draw(self, key: int, first_replica: int, num_samples: int) -> Draw:
        first, last = first_replica // _BLOCK, (first_replica + num_samples - 1) // _BLOCK
        blocks = [self._latest.get(self._block, key, block) for block in range(first, last + 1)]
        tables = blocks[0] if len(blocks) == 1 else {n: _joined(blocks, n) for n in self.parts}
        snapshot = torch.arange(num_samples, device=self.device) + (first_replica - first * _BLOCK)
        return Draw(num_samples, new_seed(key, first_replica, self.device), snapshot, tables)

    def _block(self, key: int, block: int) -> dict[str, Statistics]:
        seed = new_seed(key, block * _BLOCK, self.device)
        z = philox_normal(seed, 0, (_BLOCK, self.num_snapshots), tag="joint").double()
        return {name: _joint_statistics(z, *part) for name, part in self.parts.items()}


def _joined(blocks: list[dict[str, Statistics]], name: str) -> Statistics:
    return Statistics(*map(torch.cat, zip(*(block[name] for block in blocks), strict=True)))


def _joint_statistics(z, centre, deviations, alive, dtype) -> Statistics:
    mean, log_spread = (centre + z @ deviations).chunk(2, 1)
    return Statistics(mean.to(dtype).contiguous(), ((2 * log_spread).exp() * alive).to(dtype))


class FittedSampler:
    """`lognormal` and `normal`: every statistic drawn by itself, moment-matched to the bank.

    Of a channel with batch means m_b and spreads s_b (standard deviations), b = 1..B:
        mean ~ N(mean of m_b, variance of m_b), and
        "lognormal" (Atanov et al. 2019):  ln spread ~ N(mean of ln s_b, variance of ln s_b),
        "normal" (Teye et al. 2018):  spread ~ N(mean of s_b, variance of s_b), held above an
                                      eighth of its mean,
    variances with 1/(B-1). A spread enters the logarithm as at least an eighth of its mean.
    """

    def __init__(self, tables: Tables, rescaling: Rescaling, device: torch.device, family: str):
        self.device, self.tables = device, {}
        for key, (mean, var) in tables.items():
            params = fit(mean, var, rescaling).params(family)
            self.tables[key] = Fitted(params.to(mean.dtype), family)

    def draw(self, key: int, first_replica: int, num_samples: int) -> Draw:
        return Draw(num_samples, new_seed(key, first_replica, self.device), None, self.tables)


_PARAMETRIC: dict[str, Callable[[Tables, Rescaling, torch.device], Sampler]] = {
    "joint": JointSampler,
    "lognormal": partial(FittedSampler, family="lognormal"),
    "normal": partial(FittedSampler, family="normal"),
}
SAMPLERS = ("bank", "batch", *_PARAMETRIC)


def check_sampler(op: str, name: str, batch_size) -> int | None:
    """Checks a sampler's name and whether it takes a batch size, which it returns."""
    check_one_of(op, "sampler", name, SAMPLERS)
    if batch_size is None:
        return None
    if name not in _PARAMETRIC:
        refuse(op, "batch_size", f'be None with sampler "{name}"', batch_size)
    return check_integer(op, "batch_size", batch_size, 1)


def check_key(op: str, seed) -> None:
    """Checks a seed: None, or an integer in [-2^63, 2^63)."""
    if isinstance(seed, Tensor):
        refuse(op, "seed", "be an integer, not a tensor", seed, TypeError)
    if seed is not None:
        check_key_range(op, seed)


def draw_key(seed: int | None, device: torch.device) -> int:
    """The seed, or one from torch's generator of the device."""
    return int(seed) if seed is not None else new_key(device).item()


@contextmanager
def key_of_body(seed: int | None, *generators):
    """`draw_key` on the CPU, for a body whose own draws are put back, those from the given generators
    too; an error in it takes back that of the key as well."""
    with unmoved_by_errors():
        key = draw_key(seed, torch.device("cpu"))
        with preserved_rng(*generators):
            yield key


def make_sampler(
    op: str, name: str, bank: Bank, batch_size: int | None, device: torch.device
) -> Sampler:
    """The sampler of a bank.

    Args:
        op: who asks, for messages.
        name: one of `SAMPLERS`.
        bank: the snapshots; for "batch" those of the loader's first batches, in their order.
        batch_size: M that the parametric ones rescale the bank to, see `Rescaling`; None leaves it.
        device: where the draws are needed.

    Raises:
        ValueError: unknown name, a batch size that the bank or the sampler cannot have, or a
            parametric sampler over a single snapshot.
    """
    batch_size = check_sampler(op, name, batch_size)
    bank.check_fields()  # the user may have set dataset_size
    if name == "bank":
        return BankSampler(bank, device)
    if name == "batch":
        return BatchSampler(bank, device)
    if len(bank) < 2:
        refuse(op, "bank", f'hold at least 2 snapshots for sampler "{name}"', len(bank))
    rescaling = _rescaling(op, bank, batch_size)
    tables = bank.on(device)
    if batch_size is not None:
        tables = _of_one_size(op, bank, tables)
    return _PARAMETRIC[name](tables, rescaling, device)


def _of_one_size(op: str, bank: Bank, tables: Tables) -> Tables:
    """Without the snapshots of a loader's last batches: theirs is the spread of another M0."""
    last = bank.of_last_batches()
    others = [count[~last] for count in bank.count.values()]
    if any((n != n[0]).any() and (n % bank.batch_size).any() for n in others):
        warn(
            f"{op}: the bank's batches are of many sizes, and rescaled to batch_size as if all had "
            f"{bank.batch_size} rows"
        )
    if not last.any() or len(others[0]) < 2:
        return tables
    ends = [i + k for i in last.nonzero().flatten().tolist() for k in (0, 1)]
    return {  # by slices: a mask would wait for a GPU
        key: tuple(torch.cat(table.tensor_split(ends)[::2]) for table in pair)
        for key, pair in tables.items()
    }


def _rescaling(op: str, bank: Bank, batch_size: int | None) -> Rescaling:
    if batch_size is None:
        return Rescaling(1.0, 1.0)
    M0, N = bank.batch_size, bank.dataset_size
    if batch_size > N:
        refuse(op, "batch_size", f"be at most the size of the data set {N}", batch_size)
    if M0 == N and batch_size != N:
        refuse(op, "bank", "hold batches smaller than the data set to be rescaled", M0)
    return Rescaling.between(M0, batch_size, N, bank.disjoint)


def snapshots_of(sampler: Sampler, key: int, first_replica: int, num_samples: int) -> Tensor | None:
    """(T,) int64, the row of the bank that each replica uses;
    None for another sampler than "bank"."""
    if not isinstance(sampler, BankSampler):
        return None
    return sampler.draw(key, first_replica, num_samples).snapshot.clone()


def warn_of_rescaling(op: str, bank: Bank, batch_size: int) -> None:
    """Warns of a batch size far from the bank's; at every call,
    however long the sampler is known."""
    M0 = bank.batch_size
    if not M0 / 2 <= batch_size <= 16 * M0:
        warn(
            f"{op}: batch_size {batch_size} is outside [M0/2, 16 M0] of a bank with M0 = {M0}, "
            "beyond which rescaled statistics are not to be relied on; collect a bank with such batches"
        )
