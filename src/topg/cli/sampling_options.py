"""Flags of the sampling settings and of loading a model: what `generate` and `chat` share."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from topg.cli.options import add_config_options, config_from
from topg.precision.recipes import DEFAULT_RECIPE, RECIPE_NAMES
from topg.sampling_params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from topg.llm import LLM


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, how to load it, and the configuration."""
    parser.add_argument("model", metavar="MODEL", help="a pulled name, a converted folder, a checkpoint or a GGUF file")
    parser.add_argument(
        "--quant", choices=RECIPE_NAMES, metavar="RECIPE",
        help=f"recipe for a source that is not converted yet: {', '.join(RECIPE_NAMES)} (default: {DEFAULT_RECIPE})",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu, or a torch device such as cuda (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the CPU")
    add_config_options(parser)


def load_model(args: argparse.Namespace) -> LLM:
    """The model that the arguments name."""
    from topg.llm import LLM

    config = config_from(args).config
    return LLM(args.model, quant=args.quant, device=args.device, threads=args.threads, config=config)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each sampling setting; one that is not given is the model's recommendation, or the default."""
    group = parser.add_argument_group(
        "sampling", "What is not given is as the model's publisher recommends, or the default of SamplingParams."
    )

    def add(flag: str, help: str, **options: Any) -> None:
        group.add_argument(flag, default=argparse.SUPPRESS, help=help, **options)

    add("--max-tokens", "most tokens to generate", type=int, metavar="N")
    add("--min-tokens", "tokens before which nothing ends the output", type=int, metavar="N")
    add("--temperature", "0 (always the best token) to 100", type=float, metavar="T")
    add("--top-k", "keep the k best tokens; 0 keeps all", type=int, metavar="K")
    add("--top-p", "keep the best tokens that hold this probability, 0 to 1", type=float, metavar="P")
    add("--min-p", "keep tokens with this share of the best one's probability, 0 to 1", type=float, metavar="P")
    add("--repetition-penalty", "0.01 to 100, for tokens of prompt and output", type=float, metavar="X")
    add("--presence-penalty", "-2 to 2, once for generated tokens", type=float, metavar="X")
    add("--frequency-penalty", "-2 to 2, as often as a token was generated", type=float, metavar="X")
    add("--logit-bias", "added to a token's logit, -100 bans it; repeatable", type=_bias, metavar="ID=X",
        action="append")  # fmt: skip
    add("--seed", f"0 to {MAX_SEED}; same seed, same text", type=int, metavar="N")
    add("--stop", "text that ends the output; repeatable", metavar="TEXT", action="append")
    add("--stop-token-id", "token id that ends the output; repeatable", type=int, metavar="ID", action="append",
        dest="stop_token_ids")  # fmt: skip
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
    return int(token), float(bias)
