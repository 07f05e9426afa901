"""The bar of long-running verbs: on a terminal only, one at a time."""

from __future__ import annotations

import io
import sys

import pytest

from topg.cli.pull import TerminalReport
from topg.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar() as bar:
        bar.show("model", 0, 2000)
        bar.show("model", 2000, 2000)
    assert "model: 100%" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1


def test_notes_and_bars_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar() as bar:
        report = TerminalReport(bar)
        report.progress("first", 500, 2000)
        report.progress("second", 0, 2000)
        report.note("a note")
    lines = terminal.getvalue().split("\n")
    assert [line.split("\r")[-1].split(":")[0] for line in lines] == ["first", "second", "a note", ""]


def test_a_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress_bar() as bar:
        bar.show("model", 2000, 2000)
    assert pipe.getvalue() == ""
