"""Units of work, tables and reports of a protocol, and how measured numbers stand beside printed
ones."""

from __future__ import annotations

import csv
import io
import math
import os
import zlib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ..metrics.significance import mean_and_error
from ..ops.checks import refuse


class Unit(NamedTuple):
    """A part of the work that is computed by itself.

    Attributes:
        name: of its file; letters, digits, - and _.
        arguments: JSON values.
    """

    name: str
    arguments: dict


class Table(NamedTuple):
    """A table of a report.

    Attributes:
        name: of its file.
        title: one line.
        columns: their headings.
        rows: cells by column; None is an empty one.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list]

    def csv(self) -> str:
        """With the digits that were measured, and the errors in columns of their own."""
        text = io.StringIO()
        parts = [_parts(*column) for column in zip(self.columns, *self.rows, strict=True)]
        lines = zip(*(part for pair in parts for part in pair), strict=True)
        csv.writer(text, lineterminator="\n").writerows(lines)
        return text.getvalue()

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


class Report(NamedTuple):
    """What a protocol shows.

    Attributes:
        tables: ours beside the paper's.
        figures: names of files in the folder.
        remarks: sentences: where the two agree and where not.
    """

    tables: list[Table]
    figures: list[str]
    remarks: list[str]


def required_folder(op: str, data_root: str | None, name: str, source: str) -> Path:
    """The folder of a data set; `source` tells in the message where it is to be had."""
    folder = Path(data_root or "") / name
    if data_root is None or not folder.is_dir():
        requirement = f"hold the folder {name} (to be had from {source})"
        refuse(op, "data_root", requirement, data_root)
    return folder


def crc32_of_files(paths: Iterable[Path]) -> int:
    """CRC-32 of files, and of all files in folders, with their names."""
    crc = 0
    for path in paths:
        inside = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
        for file in sorted(inside):
            crc = zlib.crc32(os.fsencode(file.relative_to(path.parent)), crc)
            with open(file, "rb") as content:
                while block := content.read(2**20):
                    crc = zlib.crc32(block, crc)
    return crc


def _cell(value) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


class Estimate(str):
    """A cell "mean ± standard error", or the mean alone where the error is not known (NaN).

    Of `digits` decimals, or as many as it takes to tell the error from 0; behind a mark. A mean or
    an error of a million or more puts both into four significant digits.
    """

    mean: float
    error: float

    def __new__(cls, mean: float, error: float, digits: int = 2, mark: str = "") -> Estimate:
        # Equal values have an error of rounding.
        while 1e-12 * abs(mean) < error < math.inf and round(error, digits) == 0:
            digits += 1
        form = ".3e" if abs(mean) >= 1e6 or error >= 1e6 else f".{digits}f"
        text = f"{mean:{form}}"
        text = text.removeprefix("-") if float(text) == 0 else text  # of what rounds to 0
        text = mark + text + ("" if math.isnan(error) else f" ± {error:{form}}")
        cell = super().__new__(cls, text)
        cell.mean, cell.error = mean, error
        return cell

    @classmethod
    def of(cls, values, digits: int = 2) -> Estimate:
        """The mean of values and its standard error."""
        return cls(*mean_and_error(values), digits)


def _parts(heading: str, *cells) -> list[list]:
    """A column as it stands in a file: one of estimates as two."""
    if not any(isinstance(cell, Estimate) for cell in cells):
        return [[heading, *cells]]
    pairs = [(c.mean, c.error) if isinstance(c, Estimate) else (c, "") for c in cells]
    means, errors = zip(*pairs, strict=True)
    return [[heading, *means], [f"{heading} ±", *errors]]


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of a paper's table, `tables/<name>.csv`, by column."""
    text = (files(__package__) / "tables" / f"{name}.csv").read_text()
    return list(csv.DictReader(io.StringIO(text)))
