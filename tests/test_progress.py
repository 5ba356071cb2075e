"""Progress where stderr is no terminal; that of a terminal is tested with what shows it."""

import io
import itertools
import sys

import pytest

from bnuq_ext import progress


def test_a_line_a_minute_where_stderr_is_no_terminal(capsys, monkeypatch):
    with progress.progress_bar(desc="outer", total=200, shown=True) as bar:
        monkeypatch.setattr(bar, "_time", itertools.count(1.0).__next__)  # a second for every look
        bar.start_t = bar.last_print_t = 0.0
        for _ in range(200):
            bar.update()
    printed = capsys.readouterr().err
    lines = printed.splitlines()
    assert 3 <= len(lines) <= 5  # 200 seconds and more, the first minute silent, one at the end
    assert all(line.startswith("outer: ") and "/200 [" in line for line in lines)
    assert lines[-1].startswith("outer: 100%|")
    assert "\r" not in printed and "\x1b" not in printed


def test_nothing_within_a_minute_and_nothing_unless_shown(capsys):
    for shown in (True, False):
        assert list(progress.progress_bar(range(5), "short", shown=shown)) == list(range(5))
    assert capsys.readouterr() == ("", "")


def test_a_stderr_that_is_no_file(monkeypatch, capsys):
    class Tee:
        def write(self, text):
            print(text)

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Tee())
    assert list(progress.progress_bar(range(5), "tee", shown=True)) == list(range(5))


@pytest.mark.parametrize("closed", [False, True])
def test_no_stderr_at_all(monkeypatch, closed):
    gone = io.StringIO() if closed else None
    if closed:
        gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    assert list(progress.progress_bar(range(5), "none", shown=True)) == list(range(5))


def test_bars_in_bars_are_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 0)
    with progress.progress_bar(range(2), "outer", shown=True) as outer:
        for _ in outer:
            list(progress.progress_bar(range(2), "inner", shown=True))
    printed = capsys.readouterr().err
    assert "inner" in printed and "\x1b" not in printed
