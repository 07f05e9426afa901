"""`topg chat`: history, commands, interrupts, and what happens when the context is full."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.models import tiny_converted
from topg import LLM, SamplingParams
from topg.cli import chat
from topg.cli.chat import Conversation
from topg.cli.main import main
from topg.config import Config, ExecutionConfig
from topg.errors import PromptTooLongError

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_converted(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_context=200, max_batch_size=2) as loaded:
        yield loaded


def say(conversation: Conversation, text: str) -> str:
    return "".join(delta.text for delta in conversation.answer(text, threading.Event()))


def test_every_turn_sees_the_whole_conversation(llm: LLM) -> None:
    conversation = Conversation(llm, PARAMS, system="Be kind.")
    first = say(conversation, "hello")
    second = say(conversation, "more")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "more"},
    ]
    assert second == llm.chat(messages, PARAMS).text
    assert conversation.messages == [*messages, {"role": "assistant", "content": second}]
    conversation.reset()
    assert conversation.messages == messages[:1]


def test_a_stopped_answer_stays_in_the_conversation(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(max_tokens=100, ignore_eos=True))
    stop = threading.Event()
    said = []
    for delta in conversation.answer("hello", stop):
        said.append(delta.text)
        if len(said) == 3:
            stop.set()
    assert len(said) == 3
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(said)}
    assert llm.status().pages_used == 0


def test_ctrl_c_ends_a_long_prompt_at_the_next_step(model: Path) -> None:
    settings = Config(execution=ExecutionConfig(prefill_chunk=2, max_batch_size=1, max_context=400))
    with LLM(model, config=settings) as small_steps:
        conversation = Conversation(small_steps, PARAMS, system="Be kind.")
        stop = _SetAfter(3)
        assert list(conversation.answer("long " * 50, stop)) == []
        assert stop.looks == 4
        assert conversation.messages == [{"role": "system", "content": "Be kind."}]
        assert small_steps.status().pages_used == 0


class _SetAfter(threading.Event):
    """Set by its `count`-th look, as by an interrupt during a step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks > self.count


def test_an_interrupt_before_the_answer_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def interrupted() -> Iterator[threading.Event]:
        yield _SetAfter(0)

    monkeypatch.setattr(chat, "_interrupt_sets", interrupted)
    assert piped(model, "hello\n", monkeypatch) == 0
    assert "not part of the conversation" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_and_nothing_is_dropped(llm: LLM) -> None:
    conversation = Conversation(llm, PARAMS)
    say(conversation, "hello")
    before = list(conversation.messages)
    with pytest.raises(PromptTooLongError):
        say(conversation, "long " * 200)
    assert conversation.messages == before
    say(conversation, "short")


def test_an_answer_takes_what_the_context_has_left(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0, ignore_eos=True))
    tokens = len(llm.tokenizer.encode_chat([{"role": "user", "content": "a" * 100}]))
    assert tokens < 195
    (*_, last) = conversation.answer("a" * 100, threading.Event())
    assert last.finish_reason == "length" and last.usage is not None and last.usage.total_tokens == 200


def test_ctrl_c_sets_the_event_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with chat._interrupt_sets() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(timeout=5)
    assert signal.getsignal(signal.SIGINT) is before


def piped(model: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    flags = ["--max-context", "100", "--max-tokens", "4", "--temperature", "0", "--ignore-eos"]
    return main(["chat", str(model), *flags, *arguments])


def test_lines_from_a_pipe_are_turns(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(model, "hello\n\n  \nmore\n", monkeypatch) == 0
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    expected = [say(conversation, "hello"), say(conversation, "more")]
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{text}\n" for text in expected)
    assert captured.err.count("cut off") == 2


def test_commands(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert piped(model, "/help\n/reset\n/what\n/exit\nnever answered\n", monkeypatch) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{chat.COMMANDS}\n(the conversation begins anew)\n"
    assert captured.err == "there is no command /what; /help shows them\n"


def test_input_that_is_no_text_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert main(["chat", str(model), "--max-context", "100"]) == 2
    assert "not utf-8 text" in capsys.readouterr().err


def test_a_full_context_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(model, "long " * 200 + "\n/reset\nhi\n", monkeypatch) == 1, "a script must notice"
    captured = capsys.readouterr()
    assert "not answered" in captured.err and "/reset begins anew" in captured.err
    assert captured.out.startswith("(the conversation begins anew)\n") and captured.out.count("\n") >= 2


def test_a_model_without_a_template_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(tiny_converted(tmp_path, chat=False), "hello\n", monkeypatch) == 2
    assert "topg generate" in capsys.readouterr().err


@pytest.mark.slow
def test_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(model: Path) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "topg", "chat", str(model), "--max-context", "500", "--max-tokens", "450"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}
    with subprocess.Popen(
        [*command, "--ignore-eos"], stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
    ) as process:
        os.close(end)
        seen = _read_until(terminal, b"> ")
        os.write(terminal, b"hello\n")
        seen = _read_until(terminal, b"hello\r\n") + os.read(terminal, 1)
        process.send_signal(signal.SIGINT)
        seen += _read_until(terminal, b"(stopped)\r\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=20) == 0, seen
    os.close(terminal)


def _read_until(terminal: int, end: bytes) -> bytes:
    seen = b""
    while end not in seen:
        seen += os.read(terminal, 1024)
    return seen
