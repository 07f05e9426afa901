"""`topg generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from topg.cli.messages import say
from topg.cli.options import whole_number
from topg.cli.sampling_options import (
    CUT_OFF,
    add_model_arguments,
    add_sampling_arguments,
    escape_unprintable,
    given_sampling,
    load_model,
    sampling_params,
)
from topg.errors import RequestError
from topg.types import GenerationResult

if TYPE_CHECKING:
    from topg.llm import LLM, Prompt
    from topg.sampling_params import SamplingParams

MAX_PROMPT_BYTES = 64 * 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", metavar="TEXT", help="the prompt; without it, standard input is read, save for one last line feed"
    )
    source.add_argument("--prompt-ids", type=_ids, metavar="IDS", help="the prompt as token ids: 1,15,7")
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object at the end")
    parser.add_argument(
        "--logprobs",
        type=whole_number,
        metavar="N",
        help="with --json: log-probabilities and N alternatives (0 to 20)",
    )
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate; the exit status is 1 when the generation failed."""
    if args.logprobs is not None and not args.json:
        raise RequestError("--logprobs has no effect on text; add --json", param="logprobs")
    escape_unprintable()
    given = given_sampling(args)
    prompt = _prompt(args)
    with load_model(args) as llm:
        params = sampling_params(given, llm)
        return _print_json(llm, prompt, params) if args.json else _print_text(llm, prompt, params)


def result_to_json(result: GenerationResult) -> dict[str, Any]:
    """A result as plain data; bytes become lists of numbers."""
    data = asdict(result)
    data["usage"]["total_tokens"] = result.usage.total_tokens
    for position in data["logprobs"] or ():
        for token in (position["chosen"], *position["top"]):
            token["bytes"] = list(token["bytes"])
    return data


def _prompt(args: argparse.Namespace) -> Prompt:
    if args.prompt_ids is not None:
        return list(args.prompt_ids)
    return _read_stdin() if args.prompt is None else str(args.prompt)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise RequestError("there is no prompt; give --prompt or --prompt-ids, or pipe text into standard input")
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(raw) > MAX_PROMPT_BYTES:
        raise RequestError(f"standard input has more than {MAX_PROMPT_BYTES} bytes, which is the limit for a prompt")
    try:
        return raw.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is {raw[error.start]:#04x}"
        raise RequestError(f"standard input is not UTF-8 text: {place}") from error


def _print_text(llm: LLM, prompt: Prompt, params: SamplingParams) -> int:
    with llm.stream(prompt, params) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
            if delta.error is not None:
                print(flush=True)
                say(f"topg: error: {delta.error}")
                return 1
    print(flush=True)
    if delta.finish_reason == "length":
        say(f"topg: {CUT_OFF}")
    return 0


def _print_json(llm: LLM, prompt: Prompt, params: SamplingParams) -> int:
    (result,) = llm.generate([prompt], params)
    print(json.dumps(result_to_json(result), allow_nan=False))
    return 1 if result.finish_reason == "error" else 0


def _ids(text: str) -> Sequence[int]:
    try:
        return [whole_number(item) for item in text.split(",")] if text else []
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,15,7") from None
