"""ToPG through `topg.LLM`, with all that a request passes: scheduling, sampling, turning tokens into text.

The variant is the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol import Setup, Stepped, serve

import topg
from topg import LLM, SamplingParams


class ToPG:
    """A loaded `LLM`."""

    version = topg.__version__

    def __init__(self, setup: Setup) -> None:
        self._llm = LLM(
            setup.model, quant=setup.variant, threads=setup.threads,
            max_context=setup.max_context, max_batch_size=setup.max_streams,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Iterator[Sequence[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        streams = [self._llm.stream(prompt, params) for prompt in prompts]
        while not all(stream.ended for stream in streams):
            deltas = [stream.poll() for stream in streams]
            yield [0 if delta is None else len(delta.token_ids) for delta in deltas]


if __name__ == "__main__":
    serve(lambda setup: Stepped(ToPG(setup)))
