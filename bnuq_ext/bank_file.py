"""The file of a bank: safetensors, sealed with a SHA-256, and replaced as a whole.

    length of the header (8 bytes) | header: JSON, spaces up to 8 bytes | the tensors' bytes

The header is `_encode` of what it says, byte for byte, so that one content has one file. The
SHA-256 goes over the header with an empty digest (names, shapes, dtypes, metadata) and over the
data. It finds damage; it is no signature. Nothing in a file is ever run.
"""

import hashlib
import json
import math
import os
import secrets
import stat
from contextlib import suppress
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from .ops.checks import check_path, refuse

FORMAT, VERSION = "bnuq_bank", 1
OPENING = f'{{"__metadata__":{{"format":"{FORMAT}"'.encode()
# Room for 5,000 calls of layers; parsing an untrusted file's header takes up to 50 times as much.
LARGEST_HEADER = 2 << 20
_DTYPES = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}
_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


def save(path, tensors: dict[str, Tensor], fields: dict[str, str]) -> None:
    """Write the tensors and the text fields to `path`,
    which holds either its old content or all of the new.

    Args:
        path: str or os.PathLike; a symbolic link is followed. Its folder must exist. A file that
            exists keeps its permissions; a new one gets those of any new file.
        tensors: float32, float64 or int64, contiguous, on the CPU.
        fields: text for the header.
    """
    target = os.path.realpath(_check_path("Bank.save", path))
    if not os.path.isdir(os.path.dirname(target)):
        refuse("Bank.save", "path", "lie in a folder that exists", repr(path), FileNotFoundError)
    replace_whole("Bank.save", target, lambda stream: write(stream, tensors, fields))


def replace_whole(op: str, target: str, fill) -> None:
    """Let `fill` write a binary stream: `target`, no link, holds its old content or all of the new,
    and its mode. An error of the disk names it; what is no regular file is refused."""
    if os.path.exists(target):
        _check_regular(op, target)
    folder = os.path.dirname(target)
    # In the same folder, so that the renaming stays inside one file system.
    temporary = os.path.join(folder, f".bnuq-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as stream:
            if os.path.exists(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        _sync_folder(folder)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, target) from error
        raise


def load(path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the text fields of a file that `save` wrote; ValueError for any other.

    Takes no more memory than the file's size and a constant.
    """
    name = _check_path("Bank.load", path)
    _check_regular("Bank.load", name)
    with open(name, "rb") as stream:
        return read(stream, os.fstat(stream.fileno()).st_size, name)


def write(stream, tensors: dict[str, Tensor], fields: dict[str, str]) -> None:
    """The file's bytes, to a binary stream."""
    arrays = {name: _array(tensor) for name, tensor in tensors.items()}
    entries, start = {}, 0
    for name, array in arrays.items():
        end = start + array.nbytes
        kind = _NAMES[tensors[name].dtype]
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    fields = {"format": FORMAT, "version": str(VERSION), **fields}
    digest = _digest(entries, fields)
    for array in arrays.values():
        digest.update(array)
    header = _encode(entries, fields, digest.hexdigest())
    if len(header) > LARGEST_HEADER:
        refuse("Bank.save", "header", f"take at most {LARGEST_HEADER} bytes", len(header))
    stream.write(len(header).to_bytes(8, "little") + header)
    for array in arrays.values():
        stream.write(array)


def read(stream, size: int, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the fields in a binary stream of `size` bytes; `name` is for the messages."""
    raw = _read_header(stream, size, name)
    entries, fields, stated = _parse(raw, name)
    data_size = _check_entries(entries, name)
    if 8 + len(raw) + data_size != size:
        _bad(name, f"hold {8 + len(raw) + data_size} bytes as its header says", size)
    digest = _digest(entries, fields)
    tensors = {}
    for key, entry in entries.items():
        array = np.empty(entry["shape"], _DTYPES[entry["dtype"]])
        if stream.readinto(memoryview(array).cast("B")) != array.nbytes:
            _bad(name, f"hold all of {key!r}", "its end")
        digest.update(array)
        tensors[key] = torch.from_numpy(array)
    if digest.hexdigest() != stated:
        _bad(name, f"have the SHA-256 that it states, {stated!r}", digest.hexdigest())
    return tensors, fields


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.numpy().astype(_DTYPES[_NAMES[tensor.dtype]], copy=False)


def _encode(entries: dict, fields: dict[str, str], digest: str) -> bytes:
    header = {"__metadata__": {**fields, "sha256": digest}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _digest(entries: dict, fields: dict[str, str]):
    header = _encode(entries, fields, "")
    return hashlib.sha256(len(header).to_bytes(8, "little") + header)


def _read_header(stream, size: int, name: str) -> bytes:
    prefix = stream.read(8)
    if len(prefix) < 8:
        _bad(name, "hold at least 8 bytes", size)
    length = int.from_bytes(prefix, "little")
    limit = min(size - 8, LARGEST_HEADER)
    if not 0 < length <= limit:
        # A bank that was damaged or cut short goes on as banks begin; anything else is no bank.
        if not OPENING.startswith(stream.read(len(OPENING))):
            _bad(name, "be a bank that Bank.save wrote", "another kind of file")
        _bad(name, f"have a header of 1 to {limit} bytes", length)
    return stream.read(length)


def _parse(raw: bytes, name: str) -> tuple[dict, dict[str, str], str]:
    """(entries of the tensors, fields, stated digest)
    of a header that has this format and this form."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        _bad(name, "have a JSON header", error)
    fields = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        _bad(name, f"state the format {FORMAT!r}", "another or none")
    version = fields.get("version")
    if version != str(VERSION):
        _bad(name, f"have version {VERSION} (a newer one needs a newer bnuq_ext)", repr(version))
    entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
    stated = fields.pop("sha256", None)
    if not all(isinstance(value, str) for value in (stated, *fields.values())):
        _bad(name, "have a header of text fields with a SHA-256", sorted(fields))
    if _encode(entries, fields, stated) != raw:
        _bad(name, "have its header in canonical form", "other bytes")
    return entries, fields, stated


def _check_entries(entries: dict, name: str) -> int:
    """Size of the data in bytes, where each entry begins at the end of the one before."""
    start = 0
    for key, entry in entries.items():
        if not isinstance(entry, dict) or list(entry) != ["dtype", "shape", "data_offsets"]:
            _bad(name, f"have dtype, shape and data_offsets for {key!r}", entry)
        shape, kind = entry["shape"], entry["dtype"]
        if not isinstance(kind, str) or kind not in _DTYPES:
            _bad(name, f"have one of the dtypes {', '.join(_DTYPES)} for {key!r}", kind)
        if not _is_shape(shape):
            _bad(name, f"have a shape of one or two positive integers for {key!r}", shape)
        end = start + math.prod(shape) * _DTYPES[kind].itemsize
        if entry["data_offsets"] != [start, end]:
            _bad(name, f"have {key!r} at bytes {start} to {end}", entry["data_offsets"])
        start = end
    return start


def _is_shape(shape) -> bool:
    return (
        isinstance(shape, list)
        and 1 <= len(shape) <= 2
        and all(type(n) is int and n >= 1 for n in shape)
    )


def _check_path(op: str, path) -> str:
    check_path(op, "path", path)
    if "\0" in (name := os.fsdecode(path)):
        refuse(op, "path", "be without null characters", repr(path))
    return name


def _check_regular(op: str, name: str) -> None:
    """A file must be a regular one: reading from a pipe or replacing a device is refused."""
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        refuse(op, "path", "name a file that exists", repr(name), FileNotFoundError)
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a special file"
        refuse(op, "path", "name a regular file", f"{kind}, {name!r}")


def _sync_folder(folder: str) -> None:
    # The new name is on the disk only when its folder is, which it may not be possible to ask for.
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _bad(name: str, requirement: str, got) -> NoReturn:
    # What an untrusted file says may be long.
    text = str(got)
    refuse("Bank.load", f"file {name!r}", requirement, text[:100] + "..." * (len(text) > 100))
