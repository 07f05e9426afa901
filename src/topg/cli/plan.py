"""`topg plan`: what a model computes, op by op, and what it costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict

from topg.cli.options import whole_number
from topg.cli.sampling_options import add_quant_argument
from topg.errors import ConfigError
from topg.kv.pages import KV_BYTES
from topg.models.settings import MAX_CONTEXT
from topg.ops import Workload
from topg.plan import Plan
from topg.plan_cost import Block, OpCost, TensorInfo, folded, human_bytes, human_count, plan_cost
from topg.precision.recipes import DEFAULT_RECIPE
from topg.wording import shown

COLUMNS = ("op", "kind", "output", "weight", "precision", "weights", "KV read", "FLOPs")
COLUMNS_EXPLAINED = (
    "Columns: output is rows x width of what an op writes; precision is how its weights are stored / what its inputs"
    " are rounded to before they are multiplied; weights is 'shared' where a tied head reads the embedding's weights"
    " again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a pulled name, a converted folder, a checkpoint folder or a GGUF file")
    add_quant_argument(parser)
    parser.epilog = COLUMNS_EXPLAINED
    parser.add_argument("--tokens", type=_tokens, default=1, help="new tokens in the step (default: 1, a decode step)")
    parser.add_argument("--context", type=_count, default=0, help="tokens cached before the step (default: 0)")
    parser.add_argument("--kv-dtype", choices=tuple(KV_BYTES), default="bfloat16",
                        help="type of cached keys and values (default: bfloat16)")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="print every layer; by default equal ones are folded")
    parser.add_argument("--json", action="store_true", help="print the cost table as JSON, every layer")


def run(args: argparse.Namespace) -> int:
    plan, tensors, limit = describe_model(args.model, args.quant)
    if args.context + args.tokens > limit:
        raise ConfigError(
            f"--context and --tokens are {args.context + args.tokens:,} tokens together; the model's context has"
            f" {limit:,}: ask for fewer"
        )
    work = Workload(tokens=args.tokens, context=args.context, logits_rows=1)
    lines = plan_cost(plan, tensors, work, KV_BYTES[args.kv_dtype])
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
        return 0
    blocks = [Block((line,), line.layer, 1) for line in lines] if args.all else folded(lines)
    _print_table(blocks)
    _print_totals(plan, lines, work, KV_BYTES[args.kv_dtype])
    return 0


def describe_model(model: str, quant: str | None) -> tuple[Plan, dict[str, TensorInfo], int]:
    """Plan, tensors and context of a converted model, or of what converting a source with `quant` would give."""
    from topg.converter.blueprint import draw_blueprint
    from topg.converter.format import ConvertedModel, is_converted
    from topg.converter.source import open_source
    from topg.hub.resolve import resolve

    path = resolve(model)
    if is_converted(path):
        if quant is not None:
            raise ConfigError(f"{path} is converted already; --quant is for sources, leave it out")
        manifest = ConvertedModel.open(path).manifest
        records = manifest.tensors.items()
        tensors = {name: TensorInfo(record.shape, record.precision) for name, record in records}
        return manifest.plan, tensors, manifest.context
    blueprint = draw_blueprint(open_source(path), quant or DEFAULT_RECIPE)
    tensors = {job.spec.name: TensorInfo(job.spec.shape, job.precision) for job in blueprint.jobs}
    return blueprint.plan, tensors, blueprint.config.context


def _count(text: str) -> int:
    value = whole_number(text)
    if not 0 <= value <= MAX_CONTEXT:
        raise argparse.ArgumentTypeError(f"{shown(value)} is out of range; allowed: 0 to {MAX_CONTEXT:,}")
    return value


def _tokens(text: str) -> int:
    value = _count(text)
    if not value:
        raise argparse.ArgumentTypeError("0 is out of range; a step has 1 token or more")
    return value


def _print_table(blocks: Iterable[Block]) -> None:
    rows: list[tuple[str, ...]] = [COLUMNS]
    for block in blocks:
        rows += [_row(line) for line in block.lines]
        if block.repeats > 1 and block.first is not None:
            last = block.first + block.repeats - 1
            rows.append((f"... the same for layers {block.first + 1} to {last}",))
    widths = [max(len(row[column]) for row in rows if len(row) > 1) for column in range(len(COLUMNS))]
    for row in rows:
        print(_aligned(row, widths) if len(row) > 1 else row[0])


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    """Text columns to the left, the three number columns to the right."""
    text, numbers = len(COLUMNS) - 3, zip(row, widths, strict=True)
    cells = [cell.ljust(width) if i < text else cell.rjust(width) for i, (cell, width) in enumerate(numbers)]
    return "  ".join(cells).rstrip()


def _row(line: OpCost) -> tuple[str, ...]:
    return (
        line.name,
        line.kind,
        _shape(line.output),
        _shape(line.weight_shape or ()),
        line.precision,
        _weights(line),
        human_bytes(line.kv_bytes) if line.kv_bytes else "",
        human_count(line.flops) if line.flops else "",
    )


def _weights(line: OpCost) -> str:
    if line.weight_shape is None:
        return ""
    return human_bytes(line.weight_bytes) if line.weight_bytes else "shared"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _tokens_in_words(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def _print_totals(plan: Plan, lines: list[OpCost], work: Workload, kv_value_bytes: int) -> None:
    cached = sum(2 * op.kv_heads * op.head_dim for op in plan.attention) * kv_value_bytes
    print(
        f"\n{len(lines)} ops, {len(plan.attention)} layers; "
        f"step of {_tokens_in_words(work.tokens)} after {work.context} cached\n"
        f"weights {human_bytes(sum(line.weight_bytes for line in lines))}, "
        f"KV cache {human_bytes(cached)} per token, "
        f"KV read {human_bytes(sum(line.kv_bytes for line in lines))}, "
        f"{human_count(sum(line.flops for line in lines))} FLOPs"
    )
