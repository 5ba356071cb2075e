"""Where mini-batches come from: a loader, any iterable of batches, or draws from a data set."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from numbers import Integral

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from .inputs import copied, tensors
from .ops.checks import check_integer, refuse
from .state import attributes_of, generators_in
from .warn import warn


@dataclass
class Source:
    """Mini-batches, and what is known of how they were drawn.

    Attributes:
        start: makes what every pass over the data iterates.
        reshuffles: whether a further pass has other batches; None where its first one has to tell.
        disjoint: whether the batches of one pass share no row.
        with_replacement: whether a batch may have a row twice.
        dataset_size: N, or None where nothing tells.
        batch_size: M, or None where nothing tells but the batches.
        in_order: whether the batches are known to follow the order of the data.
        generators: the data's own random generators, and its samplers'.
        name: of the argument that it came by, for messages.
    """

    start: Callable[[], Iterable]
    reshuffles: bool | None = False
    disjoint: bool = True
    with_replacement: bool = False
    dataset_size: int | None = None
    batch_size: int | None = None
    in_order: bool = False
    generators: tuple = ()
    name: str = "data"

    def batches(self, num_batches: int) -> Iterator[tuple[int, object]]:
        """(number of the pass, batch), at most `num_batches` of them,
        over as many passes as it takes."""
        taken, number, passes, first = 0, 0, self.start(), None
        while taken < num_batches:
            before = taken
            for batch in islice(passes, num_batches - taken):
                if self.reshuffles is None and taken == before:
                    if first is not None and _are_equal(batch, first):
                        return
                    first = copied(batch)
                taken += 1
                yield number, batch
            if self.reshuffles is False or taken == before:
                return
            number += 1


def _are_equal(batch, other) -> bool:
    """Whether the tensors of two batches are the same."""
    pairs = zip_longest(tensors(batch), tensors(other))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def as_dataset(op: str, name: str, data):
    """A tuple of tensors as a TensorDataset, a loader's data set, anything else as it is."""
    if isinstance(data, torch_data.DataLoader):
        unused = _unused(data) if is_dataset(data.dataset) else []
        if unused:
            warn(f"{op}: {name} stands for its data set, without its {' and '.join(unused)}")
        return data.dataset
    if isinstance(data, tuple) and any(isinstance(part, np.ndarray) for part in data):
        refuse(op, name, "hold tensors (torch.from_numpy makes them)", "NumPy arrays", TypeError)
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        if len({part.shape[:1] for part in data}) > 1:
            refuse(op, name, "have as many rows in each tensor", [list(p.shape) for p in data])
        return torch_data.TensorDataset(*data)
    return data


def _unused(loader: torch_data.DataLoader) -> list[str]:
    """What would make its batches others than those drawn from its data set."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    plain = (torch_data.RandomSampler, torch_data.SequentialSampler, torch_data.DistributedSampler)
    collates = torch_data.default_collate, torch_data.default_convert
    parts = {"collate_fn": loader.collate_fn in collates, "sampler": type(sampler) in plain}
    return [part for part, is_plain in parts.items() if not is_plain]


def find_source(op: str, data, batch_size: int | None) -> Source:
    """The source that a user's `data` and `batch_size` mean.

    Args:
        op: who asks, for the messages.
        data: a DataLoader or an iterable of batches; with `batch_size` a map-style data set,
            or its tensors.
        batch_size: rows of a batch that is drawn from a data set; else None.
    """
    return replace(_source(op, data, batch_size), generators=(*generators_in(parts_of(data)),))


def parts_of(data) -> list:
    """A loader or a data set, the samplers that it draws by, and the data sets that it is made of."""
    found: dict[int, object] = {}
    ahead = [data]
    while ahead:
        part = ahead.pop()
        if part is not None and id(part) not in found:
            found[id(part)] = part
            held = attributes_of(part)
            ahead += [held.get(name) for name in ("dataset", "sampler", "batch_sampler")]
            joined = held.get("datasets")
            joined = [*joined.values()] if isinstance(joined, dict) else joined  # of a StackDataset
            ahead += joined if isinstance(joined, (list, tuple)) else []
    return [*found.values()]


def _source(op: str, data, batch_size: int | None) -> Source:
    if isinstance(data, torch_data.DataLoader):
        if batch_size is not None:
            refuse(op, "batch_size", "be None for a loader, which has its own", batch_size)
        return _loader_source(data)
    if batch_size is not None:
        return _dataset_source(op, as_dataset(op, "data", data), batch_size)
    if _needs_batch_size(data):
        refuse(op, "batch_size", "be given for a data set", None)
    if not _gives_batches(data):
        requirement = "be a loader, an iterable of batches, or a data set"
        refuse(op, "data", requirement, type(data).__name__, TypeError)
    return Source(lambda: data)


def find_loader(op: str, loader) -> Source:
    """The source that `predict`'s `loader` means: batches, not a data set."""
    if _needs_batch_size(loader) or not _gives_batches(loader):
        got = type(loader).__name__
        refuse(op, "loader", "be a DataLoader or an iterable of batches", got, TypeError)
    return replace(find_source(op, loader, None), name="loader")


def _gives_batches(data) -> bool:
    return isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping))


def _needs_batch_size(data) -> bool:
    return isinstance(data, (torch_data.Dataset, Tensor)) and not isinstance(
        data, torch_data.IterableDataset
    )


def _dataset_source(op: str, dataset, batch_size: int) -> Source:
    batch_size = check_integer(op, "batch_size", batch_size, 1)
    if not is_dataset(dataset):
        got = type(dataset).__name__
        refuse(op, "data", "be a map-style data set when batch_size is given", got, TypeError)
    size = len(dataset)
    if batch_size > size:
        refuse(op, "batch_size", f"be at most the data set's size {size}", batch_size)
    return Source(
        lambda: _draws(dataset, batch_size),
        disjoint=False,
        dataset_size=size,
        batch_size=batch_size,
    )


def is_dataset(dataset) -> bool:
    """Whether a data set is one of rows by number, and tells how many."""
    streams = isinstance(dataset, torch_data.IterableDataset)
    return not streams and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _draws(dataset, batch_size: int) -> Iterator:
    """Batches without end, each drawn without replacement, independent of each other."""
    fetch = fetcher(dataset)
    rng = np.random.default_rng(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    while True:
        rows = rng.choice(len(dataset), batch_size, replace=False, shuffle=False)
        # In the data's order, so that batches of all rows have bit-identical statistics.
        yield fetch(np.sort(rows).tolist())


def fetcher(dataset) -> Callable[[list[int]], object]:
    """What makes a batch of given rows of a map-style data set."""
    if type(dataset) is torch_data.TensorDataset:  # the same, without a step per row
        return lambda rows: [tensor[rows] for tensor in dataset.tensors]
    fetch = getattr(dataset, "__getitems__", None) or (lambda rows: [dataset[row] for row in rows])
    return lambda rows: torch_data.default_collate(fetch(rows))


def _loader_source(loader: torch_data.DataLoader) -> Source:
    batch_sampler = loader.batch_sampler
    if batch_sampler is None and isinstance(loader.sampler, torch_data.BatchSampler):
        batch_sampler = loader.sampler  # of a data set that takes many rows at once
    start = partial(_with_own_workers, loader)
    if batch_sampler is None or isinstance(loader.dataset, torch_data.IterableDataset):
        # The data set makes its own batches, or its own order: another pass would give the same.
        rows = None if batch_sampler is None else _size(loader.dataset)
        return Source(start, dataset_size=rows)
    sampler = getattr(batch_sampler, "sampler", None)
    subset = isinstance(sampler, torch_data.SubsetRandomSampler)
    torchs = isinstance(sampler, (torch_data.RandomSampler, torch_data.SequentialSampler))
    rows = len(sampler) if subset else _size(sampler.data_source if torchs else loader.dataset)
    batch_size = getattr(batch_sampler, "batch_size", None)
    batch_size = batch_size if isinstance(batch_size, Integral) else None  # one's own: anything
    whole = rows is not None and (batch_size or 0) >= rows
    return Source(
        start,
        reshuffles=_reshuffles(sampler),
        disjoint=type(batch_sampler) is torch_data.BatchSampler and _without_replacement(sampler),
        with_replacement=getattr(sampler, "replacement", False) is True,
        dataset_size=rows,
        batch_size=min(batch_size, rows) if batch_size and rows else None,
        in_order=_in_order(sampler) and not whole,
    )


def _with_own_workers(loader: torch_data.DataLoader) -> torch_data.DataLoader:
    """The loader, or where it keeps its workers one with its own: a loop that is in the middle of a
    pass by those would lose batches, and their generators go on from pass to pass."""
    if not loader.persistent_workers:
        return loader
    loader = copy.copy(loader)
    loader._iterator = None
    return loader


_SHUFFLING = (
    torch_data.RandomSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
)


def _reshuffles(sampler) -> bool | None:
    if isinstance(sampler, (torch_data.SequentialSampler, torch_data.DistributedSampler)):
        return False
    return True if isinstance(sampler, _SHUFFLING) else None


def _in_order(sampler) -> bool:
    if isinstance(sampler, torch_data.DistributedSampler):
        return not sampler.shuffle
    return isinstance(sampler, torch_data.SequentialSampler)


def _without_replacement(sampler) -> bool:
    if isinstance(sampler, torch_data.RandomSampler):
        # More samples than rows: the sampler goes through the rows again within one pass.
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    if isinstance(sampler, torch_data.WeightedRandomSampler):
        return not sampler.replacement
    kinds = (
        torch_data.SequentialSampler,
        torch_data.SubsetRandomSampler,
        torch_data.DistributedSampler,
    )
    return isinstance(sampler, kinds)


def _size(dataset) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's own data pipes have a __len__ that raises
        return None
