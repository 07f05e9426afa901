"""What is said on standard error: one line, nothing that steers the terminal, plain words."""

from __future__ import annotations

import errno
import os

import pytest

from topg.cli.messages import explain, say
from topg.cli.pull import TerminalReport
from topg.progress import progress_bar

PLAIN = {
    errno.ENOTDIR: "a file stands where a folder is needed",
    errno.EEXIST: "exists already",
    errno.ENAMETOOLONG: "too long",
    errno.EROFS: "read-only",
    errno.EACCES: "no permission",
    errno.ENOSPC: "no space left",
}


@pytest.mark.parametrize("number", PLAIN)
def test_errors_of_the_system_name_the_path_and_say_what_to_do(number: int) -> None:
    said = explain(OSError(number, os.strerror(number), "/some/path"))
    assert said.startswith("/some/path: ")
    assert PLAIN[number] in said
    assert "Errno" not in said


def test_errors_of_the_system_with_two_paths_one_or_none() -> None:
    assert explain(OSError(errno.EXDEV, "Invalid link", "a", None, "b")) == "a -> b: Invalid link"
    assert explain(OSError(errno.ENOSPC, "x")).startswith("there is no space left")
    assert explain(OSError(errno.EIO, "Input/output error", b"a")) == "a: Input/output error"
    assert explain(OSError("the connection was lost")) == "the connection was lost"


def test_a_message_is_one_line_that_steers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\nb\x1b[2J\u202e\u2028\x9b")
    assert capsys.readouterr().err == "a\\nb\\x1b[2J\\u202e\\u2028\\x9b\n"


def test_notes_of_a_pull_steer_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as bar:
        TerminalReport(bar).note("copying a\x1b]0;owned\x07")
    assert capsys.readouterr().err == "copying a\\x1b]0;owned\\x07\n"
