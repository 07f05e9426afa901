"""vLLM built for the CPU, its engine stepped in this process.  The variant is the number type."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that a step is ours to time
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB

import vllm
from protocol import Setup, Stepped, serve

TOKENS_AT_ONCE = 2048


class VLLM:
    """An `LLMEngine`."""

    version = vllm.__version__

    def __init__(self, setup: Setup) -> None:
        self._requests = 0
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=setup.model, dtype=setup.variant, max_model_len=setup.max_context,
                max_num_seqs=setup.max_streams, max_num_batched_tokens=max(TOKENS_AT_ONCE, setup.max_context),
                enable_prefix_caching=False,
            )
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Iterator[Sequence[int]]:
        params = vllm.SamplingParams(
            temperature=0, min_tokens=new_tokens, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        counts = {}
        for prompt in prompts:
            self._requests += 1
            counts[str(self._requests)] = 0
            self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            before = dict(counts)
            counts |= {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}
            yield [counts[name] - before[name] for name in counts]


if __name__ == "__main__":
    serve(lambda setup: Stepped(VLLM(setup)))
