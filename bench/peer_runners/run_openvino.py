"""OpenVINO GenAI's continuous batching on a GGUF file or a model folder.

The variant names the model only: activations are as OpenVINO chooses for this processor, and so is the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Setup, Stepped, serve

TOKENS_AT_ONCE = 2048


class OpenVINO:
    """A `ContinuousBatchingPipeline`, whose steps we drive."""

    version = openvino_genai.__version__

    def __init__(self, setup: Setup) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = TOKENS_AT_ONCE
        scheduler.max_num_seqs = setup.max_streams
        scheduler.enable_prefix_caching = False
        scheduler.num_kv_blocks = 0  # with cache_size 0: grows as it is needed
        properties = {"INFERENCE_NUM_THREADS": setup.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(setup.model, scheduler, "CPU", properties)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Iterator[Sequence[int]]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, ignore_eos=True, do_sample=False
        )
        config.apply_chat_template = False
        handles = [
            self._pipeline.add_request(index, openvino.Tensor(np.array([prompt], np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            yield [_new_tokens(handle) for handle in handles]


def _new_tokens(handle: Any) -> int:
    if not handle.can_read():
        return 0
    return sum(len(output.generated_ids) for output in handle.read().values())


if __name__ == "__main__":
    serve(lambda setup: Stepped(OpenVINO(setup)))
