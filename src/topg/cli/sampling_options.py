"""Flags of the sampling settings and of loading a model: what `generate` and `chat` share."""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from topg.cli.options import add_config_options, config_from, decimal_number, filled, whole_number
from topg.precision.recipes import DEFAULT_RECIPE, RECIPE_NAMES
from topg.sampling_params import DEFAULT_CHAT_TOKENS, DEFAULT_MAX_TOKENS, MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from topg.llm import LLM


CUT_OFF = "(cut off at max_tokens or the end of the context)"


def escape_unprintable() -> None:
    """From now on standard output shows what its encoding lacks as an escape (\\u4f60), where Python would fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, how to load it, and the configuration."""
    parser.add_argument(
        "model", metavar="MODEL", type=filled, help="a pulled name, a converted folder, a checkpoint or a GGUF file"
    )
    add_quant_argument(parser)
    parser.add_argument("--device", default="cpu", help="cpu, or a torch device such as cuda (default: cpu)")
    parser.add_argument("--threads", type=whole_number, metavar="N", help="threads of the CPU, 1 to 1024")
    add_config_options(parser)


def add_quant_argument(parser: argparse.ArgumentParser) -> None:
    """`--quant`, for the verbs that take a source as well as a converted model."""
    parser.add_argument(
        "--quant", choices=RECIPE_NAMES, metavar="RECIPE",
        help=f"recipe for a source that is not converted yet: {', '.join(RECIPE_NAMES)} (default: {DEFAULT_RECIPE})",
    )  # fmt: skip


def load_model(args: argparse.Namespace) -> LLM:
    """The model that the arguments name."""
    from topg.llm import LLM

    return LLM(args.model, quant=args.quant, device=args.device, threads=args.threads, config=config_from(args))


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each sampling setting; one that is not given is the model's recommendation, or the default."""
    group = parser.add_argument_group(
        "sampling", "What is not given is as the model's publisher recommends, or the default of SamplingParams."
    )

    def add(flag: str, help: str, **options: Any) -> None:
        group.add_argument(flag, default=argparse.SUPPRESS, help=help, **options)

    most = f"{DEFAULT_MAX_TOKENS}, in a chat {DEFAULT_CHAT_TOKENS}, or what fits the context if that is less"
    add("--max-tokens", f"most tokens to generate (default: {most})", type=whole_number, metavar="N")
    add("--min-tokens", "tokens before which nothing ends the output", type=whole_number, metavar="N")
    add("--temperature", "0 (always the best token) to 100", type=decimal_number, metavar="T")
    add("--top-k", "keep the k best tokens; 0 keeps all", type=whole_number, metavar="K")
    add("--top-p", "keep the best tokens that hold this probability, 0 to 1", type=decimal_number, metavar="P")
    add("--min-p", "keep tokens with this share of the best one's probability, 0 to 1", type=decimal_number,
        metavar="P")  # fmt: skip
    add("--repetition-penalty", "0.01 to 100, for tokens of prompt and output", type=decimal_number, metavar="X")
    add("--presence-penalty", "-2 to 2, once for generated tokens", type=decimal_number, metavar="X")
    add("--frequency-penalty", "-2 to 2, as often as a token was generated", type=decimal_number, metavar="X")
    add("--logit-bias", "added to a token's logit, -100 bans it; repeatable", type=_bias, metavar="ID=X",
        action="append")  # fmt: skip
    add("--seed", f"0 to {MAX_SEED}; same seed, same text", type=whole_number, metavar="N")
    add("--stop", "text that ends the output; repeatable", metavar="TEXT", action="append")
    add("--stop-token-id", "token id that ends the output; repeatable", type=whole_number, metavar="ID",
        action="append", dest="stop_token_ids")  # fmt: skip
    add("--include-stop-str-in-output", "leave the stop text in the output", action="store_true")
    add("--ignore-eos", "do not end at the model's own end tokens", action="store_true")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings among the arguments; raises RequestError for a wrong one, before any model is loaded."""
    names = {item.name for item in fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    SamplingParams(**given)
    return given


def sampling_params(given: dict[str, Any], llm: LLM) -> SamplingParams:
    """What was given, over what the model recommends."""
    return replace(llm.default_params, **given)


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, such as 42=-100")
    return whole_number(token), decimal_number(bias)
