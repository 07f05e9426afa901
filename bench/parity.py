"""Greedy text of a real model against transformers, token by token.

    python bench/parity.py MODEL.gguf [--prompts 20] [--tokens 128]

Both run the dequantised weights in float32.  A prompt passes when every token equals the reference's best one; where
the reference's two best logits are closer than 1e-3 the comparison of that prompt ends, since either is right.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM

from topg import LLM, SamplingParams

NEAR_TIE = 1e-3


def prompts(count: int) -> list[str]:
    """Beginnings of different lengths from the Python library's documentation."""
    names = sorted(topics)[:: max(1, len(topics) // count)][:count]
    return [topics[name].strip()[: 40 + 23 * index] for index, name in enumerate(names)]


@torch.no_grad()
def agreement(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> tuple[int, bool]:
    """How many tokens agree before the first near tie or difference, and whether there was no difference."""
    logits = reference(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    for index, (row, token) in enumerate(zip(logits, output, strict=True)):
        best = torch.topk(row, 2)
        if float(best.values[0] - best.values[1]) < NEAR_TIE:
            return index, True
        if int(best.indices[0]) != token:
            return index, False
    return len(output), True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    with LLM(arguments.model, quant="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
        results = llm.generate(prompts(arguments.prompts), params)
    reference = AutoModelForCausalLM.from_pretrained(
        arguments.model.parent, gguf_file=arguments.model.name, dtype=torch.float32
    ).eval()
    scores = [agreement(reference, list(r.prompt_token_ids), list(r.token_ids)) for r in results]
    for result, (equal, same) in zip(results, scores, strict=True):
        verdict = "differs" if not same else "equal" if equal == len(result.token_ids) else "equal up to a near tie"
        print(f"{len(result.prompt_token_ids):4} prompt tokens: {equal:4} of {len(result.token_ids)} {verdict}")
    differing = sum(not same for _, same in scores)
    print(
        f"{len(scores) - differing} of {len(scores)} prompts agree, {sum(equal for equal, _ in scores)} tokens compared"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
