"""`topg chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from topg.cli.messages import say
from topg.cli.sampling_options import (
    CUT_OFF,
    add_model_arguments,
    add_sampling_arguments,
    escape_unprintable,
    given_sampling,
    load_model,
    sampling_params,
)
from topg.errors import ChatTemplateError, RequestError

if TYPE_CHECKING:
    from topg.llm import LLM
    from topg.sampling_params import SamplingParams
    from topg.types import Delta

PROMPT = "> "
COMMANDS = """\
/help    show this
/reset   forget the conversation, begin anew
/exit    leave (Ctrl-D does too); Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message at the start of the conversation")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until /exit or the end of the input.

    The exit status is 1 when the input is no terminal, so that nobody watches, and a message was not answered.
    """
    escape_unprintable()
    failed = False
    given = given_sampling(args)
    with load_model(args) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ChatTemplateError(f"{args.model} has no chat template; use `topg generate`, which needs none")
        conversation = Conversation(llm, sampling_params(given, llm), args.system)
        if sys.stdin.isatty():
            print(f"{llm.model.manifest.name}, {llm.max_context} tokens of context.  /help shows the commands.")
        for line in _lines():
            if line.strip() == "/exit":
                break
            failed |= not _answer_line(conversation, line)
    return 1 if failed and not sys.stdin.isatty() else 0


class Conversation:
    """The messages so far, and how the next is made.

    Nothing is ever dropped from it by itself: a message that does not fit is refused, and `reset` begins anew.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._system)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def answer(self, text: str, stop: threading.Event) -> Iterator[Delta]:
        """The answer to a message, piece by piece, until it ends or `stop` is set.

        The message and what was answered join the conversation, also when it was stopped.  It is as before when it was
        stopped while the prompt was computed, and after a RequestError (it no longer fits the context).
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        said = []
        with self._llm.stream(messages, self._params) as stream:
            while not (stop.is_set() or stream.ended):
                delta = stream.poll()
                if delta is not None:
                    said.append(delta.text)
                    yield delta
        if said:
            self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]


def _answer_line(conversation: Conversation, line: str) -> bool:
    """Carry out a command or answer a message; False when the message was not answered."""
    command = line.strip()
    if not command.startswith("/"):
        return not command or _print_answer(conversation, line)
    if command == "/help":
        print(COMMANDS)
    elif command == "/reset":
        conversation.reset()
        print("(the conversation begins anew)")
    else:
        say(f"there is no command {command.split()[0]}; /help shows them")
    return True


def _print_answer(conversation: Conversation, text: str) -> bool:
    last: Delta | None = None
    try:
        with _interrupt_sets() as stop:
            for last in conversation.answer(text, stop):
                print(last.text, end="", flush=True)
    except RequestError as error:
        say(f"not answered: {error}")
        say("The message is not part of the conversation; /reset begins anew.")
        return False
    print()
    note = _note(last)
    if note:
        say(note)
    return last is None or last.finish_reason != "error"


def _note(last: Delta | None) -> str:
    """What a reader must know about how an answer ended."""
    if last is None:
        return "(stopped before an answer; the message is not part of the conversation)"
    if last.finish_reason is None:
        return "(stopped)"
    notes = {"length": CUT_OFF, "error": f"(failed: {last.error})"}
    return notes.get(last.finish_reason, "")


@contextmanager
def _interrupt_sets() -> Iterator[threading.Event]:
    """Within the block Ctrl-C sets the event, so that a step under way is finished and not torn apart."""
    event = threading.Event()

    def handle(*_: Any) -> None:
        event.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Lines of the terminal, or of whatever is piped in, without their line feed."""
    try:
        yield from _typed_lines() if sys.stdin.isatty() else (line.rstrip("\n") for line in sys.stdin)
    except UnicodeDecodeError as error:
        raise RequestError(f"the input is not {error.encoding} text: {error.reason}") from error


def _typed_lines() -> Iterator[str]:
    _enable_line_editing()
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")


def _enable_line_editing() -> None:
    """Arrow keys and history, where Python has them."""
    try:
        import readline  # noqa: F401  # importing it is what changes input()
    except ImportError:
        return
