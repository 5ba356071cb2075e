"""`collect`: the statistics of mini-batches, layer by layer, into a bank."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from statistics import mode
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ._version import __version__
from .attach import attach
from .bank import Bank
from .batches import Source, find_source
from .inputs import (
    Data,
    are_images,
    call,
    copied,
    device_of,
    first_list,
    model_input,
    move,
    num_rows,
    other_sizes,
    tensors,
)
from .interrupts import leaving_nothing_behind
from .nn import require_stochastic_layers
from .ops.checks import (
    check_callable,
    check_dtype,
    check_flags,
    check_has_numbers,
    check_integer,
    check_one_of,
    check_usable_device,
    is_finite,
    refuse,
)
from .passes import Pass, running
from .progress import progress_bar
from .restore import evaluating, preserved_rng, without_gradients
from .state import generators_in, modules_of
from .untraced import untraced
from .warn import warn
from .wrappers import check_unwrapped


@untraced
@leaving_nothing_behind
def collect(
    model: nn.Module,
    data: Data,
    num_batches: int = 64,
    *,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    input_fn: Callable[[Any], Any] | None = None,
    progress: bool = True,
    on_nonfinite: str = "raise",
) -> Bank:
    """The bank of a model: every stochastic layer's statistics for `num_batches` mini-batches.

    Each batch goes through the model with batch statistics in the stochastic layers, the deeper
    ones behind the ones before as in a training step, and everything else in eval. Parameters,
    running statistics, training flags, gradients, hooks and random generators (also those that
    modules, the loader, its samplers and the data set have as attributes) are left as found,
    whatever happens; the bank is attached to the model at the end only. It is that of the
    parameters as they are: collect again when they have been trained further.

    Args:
        model: converted by `convert`.
        data: a DataLoader or any iterable of batches (an input, (input, targets), or a dict with the
            input under "input" or "x"; the input a tensor, or beside targets or in a dict a tuple
            of arguments or a dict of keyword arguments); with `batch_size` a map-style data set, or
            its tensors in a tuple. A loader that shuffles (by a sampler of one's own: whose next pass
            begins otherwise) is gone through again when it has too few batches; anything else that
            ends early gives a smaller bank. Without `batch_size` the tensors of a tuple are batches,
            targets too. A smaller last batch is a snapshot too (drop_last=True leaves it out, and
            so do samplers that rescale to a `batch_size`). Random draws follow torch's generator:
            the same state, the same bank. As it is left as found, two calls in a row give one bank,
            unless it is seeded anew in between.
        num_batches: B, batches to go through; at least 1.
        batch_size: M, rows drawn for a batch from a data set, without replacement within a batch,
            one batch independent of the next; from 1 (where layers see several values a channel of
            a row) to the size of the data set.
        device: where the inputs go; by default that of the model's first parameter or buffer.
        input_fn: batch -> what the model gets: a tensor, a tuple of arguments, a dict of keyword
            arguments. M is the first size of its first tensor. Where a loader's or the given
            batch size is known and that is less, or a layer sees no multiple of that, M is the first
            size of another tensor of which neither is so, or the second size of the first one if it
            is the batch size (sequences with time first). Where layers see multiples of none, or the
            first tensor is in a list, M is that batch size, or how many images (C, H, W), of up to
            four channels, the list holds. N is the number of the data set's items, and where
            a batch has more rows than the loader's batch_size (the nodes of graphs, several crops
            of an image) so many times more; of data that does not tell its size, an iterator or a
            list, the rows that were seen (set `bank.dataset_size` before it is rescaled).
        progress: show a bar on stderr; where that is no terminal, a line a minute.
        on_nonfinite: "raise" or "skip" for a batch with NaN or infinity in the statistics or the
            first tensor of the input; others may be masks.

    Returns:
        the Bank. A batch with fewer than two values a channel is left out, with a warning; one comes
        of a loader that does not shuffle too, and of batches of more than a tenth of the data. A
        StochasticSyncBatchNorm gives the statistics of this process's batch.

    Raises:
        ValueError, TypeError: an argument is refused, or no batch can be used;
            the model keeps the bank that it had.
    """
    require_stochastic_layers("collect", model)
    _check_arguments(model, num_batches, input_fn, on_nonfinite)
    check_flags("collect", progress=progress)
    source = find_source("collect", data, batch_size)
    if source.in_order:
        warn(_IN_ORDER)
    bank, remarks = gather(
        "collect",
        model,
        source,
        num_batches,
        device=_device(model, device),
        input_fn=input_fn,
        progress=progress,
        on_nonfinite=on_nonfinite,
    )
    for remark in remarks:
        warn(remark)
    attach(model, bank)
    return bank


def gather(
    op: str,
    model: nn.Module,
    source: Source,
    num_batches: int,
    *,
    device: torch.device,
    input_fn: Callable | None = None,
    progress: bool = False,
    on_nonfinite: str = "raise",
    max_batches: int | None = None,
) -> tuple[Bank, list[str]]:
    """The bank of a source's batches, not attached, and what its user should be warned of.

    See `collect` for the arguments; snapshot b is the b-th batch that could be used. With
    `max_batches` it goes through so many at most, until `num_batches` could be used.
    """
    record = _Record(op, require_stochastic_layers(op, model), input_fn, device, on_nonfinite)
    modules = modules_of(model)
    generators = *source.generators, *generators_in(modules)
    with preserved_rng(*generators), evaluating(modules), without_gradients():
        # Closed with the body, so that a loader's workers end with it.
        with closing(source.batches(max_batches or num_batches)) as batches:
            shown = progress_bar(batches, op, num_batches, shown=progress)
            for number_of_pass, batch in shown:
                record.add(model, batch, number_of_pass)
                if max_batches is not None and len(record.rows) == num_batches:
                    break
        bank = record.bank(source)
    return bank, list(record.remarks(source, bank))


class CollectPass(Pass):
    """Normalises with the batch's own statistics and notes them.

    `statistics[key]` is (mean (C,), biased var (C,), count) of one call; `too_small` tells of a
    call with fewer than two values a channel, which ends the forward.
    """

    def __init__(self, op: str, layers: dict[str, nn.Module]):
        super().__init__(layers)
        self.op = op
        self.statistics: dict[str, tuple[Tensor, Tensor, int]] = {}
        self.too_small = False

    def normalise(self, layer: nn.Module, x: Tensor, key: str, stream: int) -> Tensor:
        if key in self.statistics:
            refuse(self.op, "names of layers", "differ from those of second calls", repr(key))
        if torch._C._are_functorch_transforms_active():  # whose tensors do not outlive them
            requirement = "call its stochastic layers outside of torch.func's transforms"
            refuse(self.op, "model", requirement, "a call inside one")
        check_dtype(self.op, f"the input of {key!r}", x)
        if x.numel() < 2 * max(x.shape[1], 1):
            self.end_at(key, x)
        self.statistics[key] = layer.batch_statistics(x)
        return layer.normalise_as_in_training(x)

    def end_at(self, key: str, x: Tensor) -> NoReturn:
        """Ends the forward at a call that was given fewer than two values a channel."""
        self.too_small = True
        raise _TooSmall

    def statistic(self, layer: nn.Module, kind: str, own: Tensor) -> Tensor:
        """The batch's, once the layer was called."""
        latest = self.latest_call(layer)
        if latest is None or latest[0] not in self.statistics:
            return own
        return self.statistics[latest[0]][kind == "running_var"].to(own, copy=True)


class _TooSmall(Exception):
    """Ends the forward of a batch with fewer than two values a channel."""


class _Record:
    """What the batches gave so far: per call a list over batches, and what was left out."""

    def __init__(self, op: str, layers, input_fn, device, on_nonfinite: str):
        self.op, self.layers = op, layers
        self.input_fn, self.device, self.on_nonfinite = input_fn, device, on_nonfinite
        self.mean: dict[str, list[Tensor]] = {}
        self.var: dict[str, list[Tensor]] = {}
        self.count: dict[str, list[int]] = {}
        self.called: set[str] = set()
        self.rows: list[int] = []
        self.others: list[list[int]] = []  # what else may be the rows of each batch
        self.passes: Counter[int] = Counter()
        self.seen = self.small = self.nonfinite = 0
        self.listed = False  # whether the model takes a list of rows
        self.missed: list[str] = []
        self.likelier = 0

    def add(self, model: nn.Module, batch, number_of_pass: int) -> None:
        """Put a batch through the model and keep its statistics, unless it is of no use."""
        self.seen += 1
        inputs = move(model_input(self.op, batch, self.input_fn), self.device)
        rows = num_rows(self.op, inputs)
        if rows == 0:
            self.small += 1
            return
        # The others may hold what is meant, as a mask of -inf; the statistics are looked at below.
        if not is_finite(tensors(inputs)[0]):
            self._leave_out("the input")
            return
        active = CollectPass(self.op, self.layers)
        with running(active), suppress(_TooSmall):
            call(model, copied(inputs))
        if active.too_small:
            self.small += 1
            return
        statistics = {k: (m.cpu(), v.cpu(), n) for k, (m, v, n) in active.statistics.items()}
        bad = [k for k, (m, v, _) in statistics.items() if not (is_finite(m) and is_finite(v))]
        if bad:
            self._leave_out(f"the statistics of layer {bad[0]!r}")
            return
        self._keep(statistics)
        self.called.update(active.calls)
        self.missed = active.remarks() or self.missed
        listed = first_list(inputs)
        self.listed |= bool(listed)
        self.rows.append(len(listed) if are_images(listed) else rows)
        self.others.append(other_sizes(inputs))
        self.passes[number_of_pass] += 1

    def _leave_out(self, where: str) -> None:
        if self.on_nonfinite == "raise":
            refuse_nonfinite(self.op, self.seen - 1, where)
        self.nonfinite += 1

    def _keep(self, statistics: dict[str, tuple[Tensor, Tensor, int]]) -> None:
        if self.rows and statistics.keys() != self.mean.keys():
            advice = "their number may depend on that of the rows (drop_last=True), or on values"
            requirement = f"make the {len(self.mean)} calls of the ones before ({advice})"
            lacking = [key for key in self.mean if key not in statistics]
            more = [key for key in statistics if key not in self.mean]
            got = f"none of {lacking[0]!r}" if lacking else f"one more, of {more[0]!r}"
            refuse(self.op, f"batch {self.seen - 1}", requirement, got)
        for key, (mean, var, count) in statistics.items():
            self.mean.setdefault(key, []).append(mean)
            self.var.setdefault(key, []).append(var)
            self.count.setdefault(key, []).append(count)

    def bank(self, source: Source) -> Bank:
        """The bank of what was kept; the lists are used up, so that it is never there twice."""
        if not self.rows:
            got = f"{self.seen}, of which {self.small} too small and {self.nonfinite} not finite"
            refuse(self.op, source.name, "hold a batch with two finite values a channel", got)
        if not self.called:
            got = "calls of none (it may run another network than the one that was converted)"
            refuse(self.op, "model", "call its stochastic layers in eval", got)
        items = source.batch_size or 0
        rows = self._rows(items)
        batch_size = self._batch_size(items, rows)
        names = list(self.mean)
        self.likelier = self._likelier(rows) if source.batch_size is None else 0
        return Bank.adopt(
            {key: torch.stack(self.mean.pop(key)) for key in names},
            {key: torch.stack(self.var.pop(key)) for key in names},
            {key: torch.tensor(self.count.pop(key), device="cpu") for key in names},
            batch_size=batch_size,
            dataset_size=self._dataset_size(source, batch_size, sum(rows)),
            disjoint=self._disjoint(source),
            unused=[name for name in self.layers if name not in self.called],
            metadata={"torch": torch.__version__, "bnuq_ext": __version__},
        )

    def _rows(self, items: int) -> list[int]:
        """Those of each batch: the first size of the first tensor, or one of `other_sizes`, the first
        of these that is not less than the items of most batches and of which layers see multiples."""
        if items < 2:  # not known, or of items that are batches
            return self.rows
        seconds, *firsts = zip(*self.others, strict=False)
        for sizes in (self.rows, *firsts):
            if self._divide_counts(sizes) and mode(sizes) >= items:
                return list(sizes)
        # Of images it is that of channels, of which pixels may be a multiple.
        if self._divide_counts(seconds) and mode(seconds) == items:
            return list(seconds)
        return self.rows

    def _likelier(self, rows: list[int]) -> int:
        """The second size of the first tensor, if layers see multiples of it and not of the rows; or
        0."""
        seconds = [sizes[0] for sizes in self.others]
        likelier = min(seconds) > 1 and self._divide_counts(seconds)
        return mode(seconds) if likelier and not self._divide_counts(rows) else 0

    def _divide_counts(self, sizes: Sequence[int]) -> bool:
        pairs = (zip(counts, sizes, strict=True) for counts in self.count.values())
        return not any(size == 0 or count % size for pair in pairs for count, size in pair)

    def _batch_size(self, items: int, rows: list[int]) -> int:
        """M, the rows of most batches; the loader's batch_size where no size is that of rows:
        it is one row of a list, or a layer saw no multiple of it."""
        # A loader of one item a batch may have whole batches for items.
        if items > 1 and (self.listed or not self._divide_counts(rows)):
            return items
        return mode(rows)

    def _dataset_size(self, source: Source, rows: int, seen: int) -> int:
        """N, in what M counts: of a data set whose items have several rows each, their rows."""
        known, items = source.dataset_size or 0, source.batch_size or rows
        if rows > items:
            return known * rows // items
        return known if known >= rows else seen

    def _disjoint(self, source: Source) -> float:
        """Fraction of the pairs of snapshots that come from one pass, whose batches share no row;
        see `Bank`."""
        snapshots = len(self.rows)
        if not (source.disjoint or source.with_replacement):
            return 0.0
        if source.with_replacement or snapshots == 1:
            return 1.0
        return sum(math.comb(n, 2) for n in self.passes.values()) / math.comb(snapshots, 2)

    def remarks(self, source: Source, bank: Bank) -> Iterator[str]:
        """What the user should know of the bank."""
        for text in self.missed:
            yield f"{self.op}: {text}"
        if self.small:
            yield (
                f"{self.op}: {self.small} of {self.seen} batches were left out: they have fewer than two "
                "values a channel"
            )
        if self.nonfinite:
            yield f"{self.op}: {self.nonfinite} of {self.seen} batches were left out: NaN or infinity"
        if self.likelier:
            yield (
                f"{self.op}: M is taken as {bank.batch_size}, the first size of the input, but layers see "
                f"multiples of {self.likelier}; if those are the rows, give a DataLoader of that "
                "batch_size before a sampler rescales to another"
            )
        if source.dataset_size is not None and 10 * bank.batch_size > bank.dataset_size:
            yield (
                f"{self.op}: the batches have {bank.batch_size} rows, more than a tenth of the data's "
                f"{bank.dataset_size}: the larger they are the less their statistics vary, and "
                "the mutual information vanishes"
            )


_IN_ORDER = (
    "collect: the loader does not shuffle, and batches in the order of the data (often sorted by class) have "
    "other statistics than those of training; give it shuffle=True"
)


def _check_arguments(model: nn.Module, num_batches, input_fn, on_nonfinite) -> None:
    check_unwrapped("collect", model)
    check_integer("collect", "num_batches", num_batches, 1)
    check_callable("collect", "input_fn", input_fn)
    check_one_of("collect", "on_nonfinite", on_nonfinite, ("raise", "skip"))


def _device(model: nn.Module, device) -> torch.device:
    found = device_of(model.modules()) if device is None else check_usable_device("collect", device)
    check_has_numbers("collect", "model" if device is None else "device", found)
    return found


def refuse_nonfinite(op: str, batch: int, where: str) -> NoReturn:
    refuse(op, f"batch {batch}", "be finite", f"NaN or infinity in {where}")
