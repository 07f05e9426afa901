"""CTranslate2, all prompts as one batch.  The variant is its compute type."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import ctranslate2
from protocol import Setup, Stepped, serve


class CTranslate2:
    """A converted generator; it takes and gives tokens as texts."""

    version = ctranslate2.__version__

    def __init__(self, setup: Setup) -> None:
        self._vocabulary: list[str] = json.loads((Path(setup.model) / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            setup.model, device="cpu", compute_type=setup.variant, inter_threads=1, intra_threads=setup.threads
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Iterator[Sequence[int]]:
        """Its call-back comes for each token of each stream, on a thread of its own; a step is one of every stream."""
        tokens: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        worker = threading.Thread(target=self._run, args=(prompts, new_tokens, tokens))
        worker.start()
        for _ in range(new_tokens):
            for _ in prompts:
                if (error := tokens.get()) is not None:
                    raise error
            yield [1] * len(prompts)
        worker.join()

    def _run(self, prompts: list[list[int]], new_tokens: int, tokens: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            self._generator.generate_batch(
                [[self._vocabulary[token] for token in prompt] for prompt in prompts],
                beam_size=1, min_length=new_tokens, max_length=new_tokens, include_prompt_in_result=False,
                callback=lambda _: tokens.put(None),
            )  # fmt: skip
        except Exception as error:  # raised in the other thread
            tokens.put(error)


if __name__ == "__main__":
    serve(lambda setup: Stepped(CTranslate2(setup)))
