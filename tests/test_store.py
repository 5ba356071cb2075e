"""Runs that are killed go on, half a file is never seen, and other settings are refused."""

import errno
import json
import os
import re
import stat

import pytest

from bnuq_ext.experiments import store as store_file
from bnuq_ext.experiments.store import Store, save_figures, write_json


def test_finished_units_are_not_computed_again(tmp_path):
    assert Store(tmp_path, {"a": 1}).unit("one", lambda: {"x": [1.5]}) == {"x": [1.5]}

    def never():
        raise AssertionError

    assert Store(tmp_path, {"a": 1}).unit("one", never) == {"x": [1.5]}


def test_an_error_of_the_disk_names_the_file_that_was_to_be_written(tmp_path):
    path = tmp_path / "missing" / "a.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_json(path, {})
    assert caught.value.filename == str(path)


def test_a_unit_that_fails_leaves_nothing(tmp_path):
    store = Store(tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        store.unit("one", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(TypeError):
        store.unit("one", lambda: {"not": object()})
    assert list((tmp_path / "units").iterdir()) == []
    assert store.unit("one", lambda: {"x": 2}) == {"x": 2}


def test_a_crash_before_the_rename_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_json(path, [1])

    def crash(*_):
        raise OSError("no power")

    monkeypatch.setattr(store_file.os, "replace", crash)
    with pytest.raises(OSError, match="no power"):
        write_json(path, [2])
    assert json.loads(path.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_of_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file.json"
    monkeypatch.setattr(store_file.os, "fsync", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{path}'")):
        write_json(path, [1])
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    (tmp_path / "pipe").symlink_to(tmp_path / "fifo")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(
        ValueError, match="store: path must name a regular file, got a special file"
    ):
        write_json(tmp_path / "pipe", [1])
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode) and len(list(tmp_path.iterdir())) == 2


def test_a_figure_that_fails_leaves_the_old_one(tmp_path):
    class Figure:
        def savefig(self, stream, **_):
            stream.write(b"half of it")
            raise OSError("no power")

    (tmp_path / "a.png").write_bytes(b"old")
    with pytest.raises(OSError, match="no power"):
        save_figures(tmp_path, {"a.png": Figure()})
    assert (tmp_path / "a.png").read_bytes() == b"old"


def test_other_settings_are_refused(tmp_path):
    Store(tmp_path, {"epochs": 1, "widths": (2, 3)}).claim()
    Store(tmp_path, {"epochs": 1, "widths": (2, 3)}).claim()
    for other, name in (
        ({"epochs": 1}, "widths"),
        ({"epochs": 1, "widths": (2, 3), "rate": 1}, "rate"),
    ):
        with pytest.raises(ValueError, match=f"got one with {name} [^;]*$"):
            Store(tmp_path, other)
    many = {"epochs": 2, "widths": [4], "rate": 1, "seed": 0}
    for other, text in (
        (many, "epochs 1, not 2; rate None, not 1; seed None, not 0; ..."),
        ({**many, "protocol": "ood"}, "protocol None, not 'ood'"),
    ):
        with pytest.raises(ValueError, match=f"got one with {re.escape(text)}$"):
            Store(tmp_path, other)
    with pytest.raises(ValueError) as caught:
        Store(tmp_path, {"epochs": 2, "widths": (2, 3)})
    assert str(caught.value) == (
        f"store: folder must hold no run but one of the same settings ({tmp_path}; choose another, "
        "or delete it), got one with epochs 1, not 2"
    )


def test_a_run_without_a_result_stands_in_no_other_s_way(tmp_path):
    def fail():
        raise ValueError("no data")

    with pytest.raises(ValueError, match="^no data$"):
        Store(tmp_path, {"data": None}).unit("one", fail)
    assert Store(tmp_path, {"data": "d"}).unit("one", dict) == {}
    assert json.loads((tmp_path / "settings.json").read_text()) == {"data": "d"}


def test_of_two_runs_in_one_folder_the_slower_is_refused(tmp_path):
    slower, faster = (Store(tmp_path, {"data": name}) for name in "ab")
    faster.unit("one", dict)
    with pytest.raises(ValueError, match="got one with data [^;]*$"):
        slower.unit("two", dict)
    assert [path.name for path in (tmp_path / "units").iterdir()] == ["one.json"]


def test_damaged_unit_is_named(tmp_path):
    store = Store(tmp_path, {})
    path = tmp_path / "units" / "one.json"
    path.write_text('{"x"')
    with pytest.raises(ValueError) as caught:
        store.unit("one", dict)
    assert str(caught.value).startswith(
        f"store: {path} must hold JSON (delete it to compute it again), got "
    )


@pytest.mark.parametrize(
    "content", ["{}", "[]", "null", '{"x": [2.5], "sha256": "%s"}', '{"x": [1.5]}']
)
def test_a_unit_of_other_content_is_named(tmp_path, content):
    store = Store(tmp_path, {})
    store.unit("one", lambda: {"x": (1.5,)})
    path = tmp_path / "units" / "one.json"
    stated = json.loads(path.read_text())["sha256"]
    path.write_text(content.replace("%s", stated))
    with pytest.raises(ValueError) as caught:
        store.unit("one", dict)
    assert str(caught.value) == (
        f"store: {path} must hold what was computed (delete it to compute it again), got other "
        "content than its SHA-256 states"
    )


def test_any_numbers_come_back(tmp_path):
    result = {"x": [0.1, 1e-300, float("inf"), 2**70], 3: {"é": None}}
    assert Store(tmp_path, {}).unit("one", lambda: result) == {"x": result["x"], "3": {"é": None}}


def test_a_folder_without_a_name_is_refused():
    with pytest.raises(ValueError, match="^store: folder must have a name, got ''$"):
        Store("", {})


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert Store(tmp_path, {}).unit("one", dict) == {}
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="^store: folder must be a folder to write to, got "):
        Store(tmp_path / "file", {})


@pytest.mark.parametrize("content", ["[]", "3", "null"])
def test_settings_that_are_none(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    refusal = "settings.json must hold the settings of a run .delete .* to begin anew"
    with pytest.raises(ValueError, match=refusal):
        Store(tmp_path, {"a": 1})
    assert (tmp_path / "settings.json").read_text() == content


def test_results_without_settings_are_no_other_run_s(tmp_path):
    Store(tmp_path, {"a": 1}).unit("one", dict)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError) as caught:
        Store(tmp_path, {"a": 2})
    assert str(caught.value) == (
        f"store: {tmp_path / 'settings.json'} must lie beside the results of a run "
        f"(delete {tmp_path} to begin anew), got 1 without it"
    )
