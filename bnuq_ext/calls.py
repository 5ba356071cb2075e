"""How the calls of a model's stochastic layers are named and numbered."""

from collections.abc import Iterable

from torch import nn


def call_key(name: str, call: int) -> str:
    """`name` for the first call of a layer, `name#1` for the next."""
    return name if call == 0 else f"{name}#{call}"


def split_key(key: str) -> tuple[str, int]:
    """Layer and number of the call of `name` or `name#1`."""
    name, mark, call = key.rpartition("#")
    return (name, int(call)) if mark and call.isdigit() else (key, 0)


def stream_of(number: int) -> int:
    """The stream of a first call: of a model's n-th layer of its kind, from 0; see `streams_of`."""
    return number << 16


def streams_of(layers: dict[str, nn.Module], bank: Iterable[str] = ()) -> dict[str, int]:
    """The stream of each layer's first call. Batch norm is numbered as in the bank, so that a part of
    a model draws what the whole does; other layers, whose noise has tags of its own, in this order."""
    number = {key: n for n, key in enumerate(bank)}
    others = [name for name, layer in layers.items() if not layer.needs_bank]
    number |= {name: n for n, name in enumerate(others)}
    return {name: stream_of(number.get(name, 0)) for name in layers}  # 0: of what has no draw
