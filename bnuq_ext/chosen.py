"""Tensors whose length depends on values, as `h[mask]`: who asks for it reads a value."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .inputs import tensors

MASKS = {torch.bool, torch.uint8}
# What asks for the length of every dimension.
_SIZES = {Tensor.size, Tensor.numel, Tensor.nelement, Tensor.shape.__get__, torch.numel}
# What asks for that of one, or takes a part of it: where it is told which.
_DIM_AT = {
    **dict.fromkeys((Tensor.size, Tensor.unbind, torch.unbind), 1),
    **dict.fromkeys((Tensor.narrow, Tensor.narrow_copy, torch.narrow, torch.narrow_copy), 1),
    **dict.fromkeys((Tensor.split, Tensor.split_with_sizes, Tensor.unsafe_split), 2),
    **dict.fromkeys((torch.split, torch.unsafe_split, Tensor.tensor_split, torch.tensor_split), 2),
    **dict.fromkeys((Tensor.chunk, Tensor.unsafe_chunk, torch.chunk, torch.unsafe_chunk), 2),
}
_OF_DIM = {
    **dict.fromkeys((Tensor.__len__, Tensor.vsplit, torch.vsplit), 0),
    **dict.fromkeys((Tensor.hsplit, torch.hsplit), 1),
    **dict.fromkeys((Tensor.dsplit, torch.dsplit), 2),
}
_REPEATS = {Tensor.repeat_interleave, torch.repeat_interleave}
_ITEMS = {Tensor.__getitem__, Tensor.__setitem__}
# What takes rows out of its first argument, and it may be all of them.
_TAKES = {Tensor.__getitem__, Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere}
_TAKES |= {Tensor.index_select, torch.index_select, Tensor.gather, torch.gather}
# Their results are as long as they are told to be.
_TOLD = {
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
    *(nn.functional.embedding_bag, torch.segment_reduce, torch.sparse_coo_tensor),
}


class Chosen:
    """Tensors that are as long along one dimension as values have chosen, and what is made of them."""

    def __init__(self):
        self._along = WeakTensorKeyDictionary()

    def among(self, given) -> list[tuple[tuple[int, ...], int]]:
        """Of those among the arguments of a function the shape, and the dimension that was chosen."""
        found = [t for t in tensors(given) if t in self._along]
        return [(tuple(t.shape), self._along[t]) for t in found]

    def are_counted(self, func, args: tuple, kwargs: dict) -> bool:
        """Whether a function asks how many there are, or takes some of them by their numbers."""
        subject = [*args, *kwargs.values()][0]
        if not isinstance(subject, Tensor) or subject not in self._along:
            return False
        along = self._along[subject]
        if func in _ITEMS:
            return _cuts(subject, args[1], along)
        dim = _dim(func, args, kwargs, subject)
        return func in _SIZES if dim is None else dim % max(subject.dim(), 1) == along

    def follow(self, func, args: tuple, kwargs: dict, sources: list, result) -> None:
        """Notes what a function has chosen, or made of `sources`: as long as they are, unless it is
        what that was written into, or added to."""
        if func in _TOLD:
            return
        into = args[0] if args and isinstance(args[0], Tensor) else None
        of_itself = into is None or into in self._along or func in _TAKES
        whole, place = None if of_itself else into.shape, _place(func, args, kwargs)
        for t in tensors(result):
            if t.shape != whole:
                self._along[t] = _along(tuple(t.shape), sources, place) % max(t.dim(), 1)


def _along(shape: tuple[int, ...], sources, place: int) -> int:
    """The dimension of a result that is as long as its sources."""
    for source, along in sources:
        if shape[:along] == source[:along] and shape[along + 1 :] == source[along + 1 :]:
            return along
    lengths = {source[along] for source, along in sources if source}
    return next((dim for dim, length in enumerate(shape) if length in lengths), place)


def _dim(func, args: tuple, kwargs: dict, subject: Tensor) -> int | None:
    """The dimension that a function counts or divides; None for all, or none."""
    if func in (Tensor.hsplit, torch.hsplit) and subject.dim() == 1:
        return 0
    if func is Tensor.size and len(args) + len(kwargs) == 1:
        return None
    if func in _DIM_AT:
        place = _DIM_AT[func]
        return args[place] if len(args) > place else kwargs.get("dim", 0)
    return _OF_DIM.get(func)


def _cuts(t: Tensor, index, along: int) -> bool:
    """Whether an index takes some of what lies along a dimension by their numbers."""
    index, dim = _parts(index), 0
    for part, width in zip(index, _widths(t, index), strict=True):
        if dim == along and isinstance(part, slice):
            return part != slice(None)
        dim += width
    return False


def _place(func, args: tuple, kwargs: dict) -> int:
    """The dimension of the result that a mask in an index, or a repetition, has made."""
    if func in _REPEATS:
        return (args[2] if len(args) > 2 else kwargs.get("dim")) or 0
    if func is not Tensor.__getitem__:
        return 0
    index, place = _parts(args[1]), 0
    if _are_apart(index):
        return 0
    for part, width in zip(index, _widths(args[0], index), strict=True):
        if _is_mask(part):
            return place
        if part is Ellipsis:
            place += width
        elif part is None or isinstance(part, slice):
            place += 1
    return 0


def _are_apart(index: tuple) -> bool:
    """Whether slices part the tensors of an index: what they choose comes first then."""
    places = [place for place, part in enumerate(index) if isinstance(part, (Tensor, list))]
    between = index[places[0] : places[-1]] if places else ()
    return any(part is None or part is Ellipsis or isinstance(part, slice) for part in between)


def _parts(index) -> tuple:
    return index if isinstance(index, tuple) else (index,)


def _widths(t: Tensor, index: tuple) -> list[int]:
    """How many dimensions of t each part of an index takes."""
    rest = t.dim() - sum(map(_width, index))
    return [rest if part is Ellipsis else _width(part) for part in index]


def _width(part) -> int:
    """`_widths` of one part by itself, and 0 for an ellipsis."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if _is_mask(part) else 1


def _is_mask(part) -> bool:
    return isinstance(part, Tensor) and part.dtype in MASKS
