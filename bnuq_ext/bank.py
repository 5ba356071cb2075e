"""The bank: the statistics of every stochastic layer for B mini-batches."""

import json
import math
import os
import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from . import bank_file
from .forks import free_in_children
from .ops.checks import (
    AnyPath,
    acc_dtype,
    check_floating,
    check_fraction,
    check_integer,
    check_shape,
    check_tensor,
    refuse,
)
from .ops.modes import has_values
from .restore import without_gradients
from .samplers import Statistics

_LOCK = free_in_children(threading.Lock())  # of the tables of all banks


class Bank:
    """B snapshots: the (mean, biased variance, count) of each batch-norm call for one mini-batch.

    Row b of every tensor comes from mini-batch b, so that correlations between layers are kept. The
    keys are the layers' names; the second call of a layer in one forward has the key `name#1`. A
    bank is not to be changed, but for `dataset_size`: make a new one.

    Args:
        mean: {key: (B, C)} batch means; floating, finite. Copied to the CPU, float32
            (float64 stays).
        var: {key: (B, C)}  biased batch variances; finite, not negative.
        count: {key: (B,)} values a channel behind a statistic (rows times positions), at least 2;
            or one integer for all.
        batch_size: M, rows of a mini-batch; at least 1.
        dataset_size: N, rows that the mini-batches come from; at least M. By default B·M.
        disjoint: fraction of the pairs of snapshots whose mini-batches share no row: 1 for one pass
            over the data (and for rows drawn with replacement, see `bnuq_ext.moments.Rescaling`), 0
            for mini-batches drawn independently.
        unused: names of the stochastic layers that the model does not call.
        metadata: text kept with the bank.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    mean: dict[str, Tensor]
    var: dict[str, Tensor]
    count: dict[str, Tensor]
    batch_size: int

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        var: Mapping[str, Tensor],
        count: Mapping[str, Tensor] | int,
        *,
        batch_size: int,
        dataset_size: int | None = None,
        disjoint: float = 1.0,
        unused: Iterable[str] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        mean, var = _copied("mean", mean), _copied("var", var)
        count = _copied_count(count, mean)
        self._fill(mean, var, count, batch_size, dataset_size, disjoint, unused, metadata or {})

    @classmethod
    def adopt(cls, mean, var, count, **fields) -> "Bank":
        """A bank of these very tensors, checked but not copied: nobody else may hold them."""
        bank = cls.__new__(cls)
        bank._fill(mean, var, count, **fields)
        return bank

    def _fill(self, mean, var, count, batch_size, dataset_size, disjoint, unused, metadata):
        if not mean:
            refuse("Bank", "mean", "hold at least one layer", "none")
        for group, entries in (("var", var), ("count", count)):
            if entries.keys() != mean.keys():
                refuse("Bank", group, f"have the keys of mean {list(mean)}", list(entries))
        self.mean, self.var, self.count = map(_ordinary, (mean, var, count))
        self._check_tensors()
        self.batch_size = check_integer("Bank", "batch_size", batch_size, 1)
        self.dataset_size = len(self) * self.batch_size if dataset_size is None else dataset_size
        self.disjoint, self.unused, self.metadata = disjoint, unused, metadata
        self.check_fields()
        self._start_cache()

    def check(self) -> None:
        """Raises ValueError or TypeError where a tensor or a field is not what `Bank` asks for."""
        self._check_tensors()
        self.check_fields()

    def check_fields(self) -> None:
        """The same for what is no tensor, which is made an int, a float, a tuple and a dict."""
        self.batch_size = check_integer("Bank", "batch_size", self.batch_size, 1)
        least = self.batch_size
        self.dataset_size = check_integer("Bank", "dataset_size", self.dataset_size, least)
        check_fraction("Bank", "disjoint", self.disjoint)
        self.disjoint = float(self.disjoint)
        self.unused = _checked_unused(self.unused, self.mean)
        self.metadata = _checked_metadata(self.metadata)

    def _check_tensors(self) -> None:
        for key in self.mean:
            self._check_statistics(key)

    def _check_statistics(self, key: str) -> None:
        mean, var, count = self.mean[key], self.var[key], self.count[key]
        if mean.dim() != 2 or mean.numel() == 0:
            got = list(mean.shape)
            refuse("Bank", f"mean[{key!r}]", "have shape (B, C) with B and C at least 1", got)
        check_shape("Bank", f"mean[{key!r}]", mean, (len(self), mean.shape[1]))
        check_shape("Bank", f"var[{key!r}]", var, mean.shape)
        check_shape("Bank", f"count[{key!r}]", count, (len(self),))
        if mean.dtype != var.dtype or mean.dtype != acc_dtype(mean.dtype):
            got = f"{mean.dtype} and {var.dtype}"
            refuse("Bank", f"mean[{key!r}] and var[{key!r}]", "be both float32 or float64", got)
        if count.dtype != torch.int64:
            refuse("Bank", f"count[{key!r}]", "be int64", count.dtype, TypeError)
        _check_range(f"mean[{key!r}]", mean, -float("inf"))
        _check_range(f"var[{key!r}]", var, 0)
        _check_range(f"count[{key!r}]", count, 2)

    def _start_cache(self) -> None:
        self._cache: dict[torch.device, tuple[tuple, dict[str, Statistics]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The keys, in the order of the calls."""
        return tuple(self.mean)

    def __len__(self) -> int:
        """B, the number of snapshots."""
        return next(iter(self.mean.values())).shape[0]

    def __repr__(self) -> str:
        channels = sum(mean.shape[1] for mean in self.mean.values())
        last, rows = self.count_last_batches()
        fewer = f" ({last} of {rows})" if last else ""
        return (
            f"Bank({len(self)} snapshots of {self.batch_size} rows{fewer} out of {self.dataset_size}; "
            f"{len(self.mean)} batch-norm calls, {channels} channels)"
        )

    def equal(self, other: "Bank") -> bool:
        """Whether the other bank has the same keys, sizes and numbers, to the last bit.

        Raises:
            TypeError: other is no bank.
        """
        if not isinstance(other, Bank):
            refuse("Bank.equal", "other", "be a Bank", type(other).__name__, TypeError)
        sizes = ("names", "batch_size", "dataset_size", "disjoint", "unused")
        return all(getattr(self, size) == getattr(other, size) for size in sizes) and all(
            mine[key].dtype == theirs[key].dtype and torch.equal(mine[key], theirs[key])
            for mine, theirs in zip(self._groups(), other._groups(), strict=True)
            for key in mine
        )

    def on(self, device: torch.types.Device) -> dict[str, Statistics]:
        """The tables on a device, copied there once; safe from several threads."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with _LOCK:
            stamp = self.stamp()
            known, tables = self._cache.get(device, (None, {}))
            if known != stamp:
                with without_gradients():
                    tables = {
                        key: Statistics(mean.to(device), self.var[key].to(device))
                        for key, mean in self.mean.items()
                    }
                if all(has_values(mean) for mean, _ in tables.values()):  # not in an export
                    self._cache[device] = stamp, tables
            return tables

    def stamp(self) -> tuple:
        """Another one after a change of the bank, of a tensor in place too;
        as a rule there is none."""
        sizes = self.batch_size, self.dataset_size, self.disjoint
        tensors = [tensor for group in self._groups() for tensor in group.values()]
        return sizes, [*map(id, tensors)], [tensor._version for tensor in tensors]

    def of_last_batches(self) -> Tensor:
        """(B,) bool, the snapshots of a loader's last batches: N mod M rows, once a pass."""
        whole, rest = divmod(self.dataset_size, self.batch_size)
        sizes = [n * self.batch_size == n.max() * rest for n in self.count.values()]
        found = torch.stack(sizes).all(0)
        return found & (found.sum() <= math.ceil(len(self) / (whole + 1)))

    def count_last_batches(self) -> tuple[int, int]:
        """How many snapshots are of last batches, and the rows that these have."""
        return int(self.of_last_batches().sum()), self.dataset_size % self.batch_size

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key != "_cache"}

    def __setstate__(self, state):
        vars(self).update(state)
        self.mean, self.var, self.count = map(_ordinary, (self.mean, self.var, self.count))
        self._start_cache()

    def save(self, path: AnyPath) -> None:
        """Write a safetensors file with a SHA-256; `path` holds the old content or all of the new.

        Args:
            path: str or os.PathLike, in a folder that exists; a file there is replaced.

        Raises:
            ValueError: path names a folder or a device,
                or the bank was changed into what no bank holds.
            FileNotFoundError: its folder is missing.
            TypeError: path is neither str nor os.PathLike.
        """
        self.check()
        bank_file.save(path, *self.to_file())

    @classmethod
    def load(cls, path: AnyPath) -> "Bank":
        """The bank in a file that `save` wrote. Nothing in the file is run.

        Args:
            path: str or os.PathLike.

        Raises:
            ValueError: the file is damaged, is no bank, or is of a newer version.
            FileNotFoundError: there is none.
            TypeError: path is neither str nor os.PathLike.
        """
        tensors, fields = bank_file.load(path)
        return cls.from_file(tensors, fields, os.fspath(path))

    def to_file(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the text fields of the file."""
        tensors = {
            f"{group}/{key}": tensor
            for group, entries in zip(_GROUPS, self._groups(), strict=True)
            for key, tensor in entries.items()
        }
        fields = {
            "batch_size": str(self.batch_size),
            "dataset_size": str(self.dataset_size),
            "disjoint": repr(self.disjoint),
            "unused": json.dumps(self.unused),
            "metadata": json.dumps(self.metadata),
        }
        return tensors, fields

    @classmethod
    def from_file(cls, tensors: dict[str, Tensor], fields: dict[str, str], name: str) -> "Bank":
        """The bank that a file's tensors and text fields make; `name` is the file's."""
        try:
            bank = cls.adopt(**_ungrouped(tensors), **_parsed_fields(fields))
            other = {k: fields[k] for k, v in bank.to_file()[1].items() if fields[k] != v}
            if other:  # 08 for 8
                raise ValueError(f"fields {other} as no bank writes them")
            return bank
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"Bank.load: file {name!r} must hold a bank, got {error}") from error

    def _groups(self) -> tuple[dict[str, Tensor], ...]:
        return tuple(getattr(self, group) for group in _GROUPS)


_GROUPS = ("count", "mean", "var")  # the widest elements first keep a file's tensors aligned


def _ordinary(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain tensors; copies of those that were made in inference mode,
    which autograd does not take."""
    with without_gradients():
        plain = {key: t.as_subclass(Tensor) for key, t in entries.items()}
        return {key: t.clone() if t.is_inference() else t for key, t in plain.items()}


def _copied(group: str, entries) -> dict[str, Tensor]:
    """Copies on the CPU, in the type of accumulation,
    so that nothing else changes the bank's tensors."""
    if not isinstance(entries, Mapping):
        refuse("Bank", group, "be a dict of tensors", type(entries).__name__, TypeError)
    for key, tensor in entries.items():
        if not isinstance(key, str):
            refuse("Bank", group, "have names for keys", repr(key), TypeError)
        check_floating("Bank", f"{group}[{key!r}]", tensor)
    with without_gradients():
        return {
            key: t.to("cpu", acc_dtype(t.dtype), copy=True).contiguous()
            for key, t in entries.items()
        }


def _copied_count(count, mean: dict[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(count, Mapping):
        value = check_integer("Bank", "count", count, 2)
        with without_gradients():
            return {key: torch.full(m.shape[:1], value, device="cpu") for key, m in mean.items()}
    for key, tensor in count.items():
        check_tensor("Bank", f"count[{key!r}]", tensor)
    with without_gradients():
        return {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in count.items()}


def _check_range(name: str, value: Tensor, least) -> None:
    # aminmax hands NaN on and needs no memory of the tensor's size.
    low, high = (bound.item() for bound in torch.aminmax(value))
    if not (low > -float("inf") and high < float("inf")):
        refuse("Bank", name, "be finite", "NaN or infinity")
    if low < least:
        refuse("Bank", name, f"be at least {least}", low)


def _checked_unused(unused, mean: dict[str, Tensor]) -> tuple[str, ...]:
    if isinstance(unused, str) or not isinstance(unused, Iterable):
        refuse("Bank", "unused", "be names of layers, in a list", repr(unused), TypeError)
    unused = tuple(unused)
    if not all(isinstance(name, str) and name not in mean for name in unused):
        refuse("Bank", "unused", "be names of layers without statistics", list(unused))
    return unused


def _checked_metadata(metadata) -> dict[str, str]:
    if not isinstance(metadata, Mapping) or not all(
        isinstance(text, str) for item in metadata.items() for text in item
    ):
        refuse("Bank", "metadata", "be a dict of str to str", metadata, TypeError)
    return {str(key): str(text) for key, text in metadata.items()}


def _ungrouped(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{group: {key: tensor}} of tensors called mean/<key>, var/<key>, count/<key>."""
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for name, tensor in tensors.items():
        group, slash, key = name.partition("/")
        if not slash or group not in groups:
            raise ValueError(f"a tensor called {name!r}")
        groups[group][key] = tensor
    return groups


def _parsed_fields(fields: dict[str, str]) -> dict:
    expected = ["format", "version", "batch_size", "dataset_size", "disjoint", "unused", "metadata"]
    if list(fields) != expected:
        raise ValueError(f"fields {list(fields)} instead of {expected}")
    return {
        "batch_size": int(fields["batch_size"]),
        "dataset_size": int(fields["dataset_size"]),
        "disjoint": float(fields["disjoint"]),
        "unused": json.loads(fields["unused"]),
        "metadata": json.loads(fields["metadata"]),
    }
