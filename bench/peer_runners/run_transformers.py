"""What most people do: `transformers`' generate, all prompts as one batch.  The variant is the number type."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import torch
import transformers
from protocol import Setup, Stepped, serve


class StepClock(transformers.StoppingCriteria):
    """Tells of every token that `generate` has appended, and stops nothing."""

    def __init__(self, steps: queue.SimpleQueue[int]) -> None:
        self._steps = steps

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self._steps.put(1)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """A causal language model on the CPU."""

    version = f"{transformers.__version__}, torch {torch.__version__}"

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=getattr(torch, setup.variant)
        )  # in evaluation mode already

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Iterator[Sequence[int]]:
        """`generate` runs in a thread of its own, since it calls back for each token and cannot be stepped."""
        steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        worker = threading.Thread(target=self._run, args=(prompts, new_tokens, steps))
        worker.start()
        for _ in range(new_tokens):
            yield [steps.get()] * len(prompts)
        worker.join()

    def _run(self, prompts: list[list[int]], new_tokens: int, steps: queue.SimpleQueue[int]) -> None:
        ids = torch.tensor(prompts)
        self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([StepClock(steps)]),
        )  # fmt: skip


if __name__ == "__main__":
    serve(lambda setup: Stepped(Transformers(setup)))
