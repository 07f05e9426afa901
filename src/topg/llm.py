"""`topg.LLM`: a model in this process.

    from topg import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        for result in llm.generate(["The sky is", "Water is"], SamplingParams(temperature=0, max_tokens=20)):
            print(result.text)

The stages do the work; here a model is opened, its KV pool sized, and a call's arguments checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard, cast

from topg.backends import backend_type, load_backend
from topg.config import SETTINGS, Config, Resolved, resolve
from topg.converter.format import ConvertedModel
from topg.errors import ConfigError, RequestError
from topg.kv.pages import PagePool
from topg.kv_budget import KVBudget, plan_kv
from topg.loading import open_model
from topg.paths import Home
from topg.sampling_params import SamplingParams, whole_number
from topg.scheduling import SchedulerLimits
from topg.stages.engine import AnswerStream, Engine, EngineStatus
from topg.stages.intake import Intake, IntakeLimits, Messages
from topg.stages.output import result_of
from topg.tokenizer.tokenizer import Tokenizer
from topg.types import GenerationResult, Request
from topg.wording import printable, shown

Prompt = str | Sequence[int]

MAX_CONTEXT = "execution.max_context"
MAX_THREADS = 1024


class LLM:
    """A loaded model that answers prompts, many at once.

    model           a pulled name, a converted folder, a Hugging Face folder or a GGUF file; the last two are converted
                    into the cache on first use, with a line on stderr
    quant           recipe for a source that is not converted yet (default: int8)
    device          "cpu", or a torch device such as "cuda", for which topg[torch] must be installed
    threads         threads of the CPU, 1 to 1024; None: the back end's choice
    max_context     tokens of prompt and answer together; None: the configuration's.  More than the model's own limit is
                    refused, whoever asks for it; only the default is cut to it
    max_batch_size  sequences computed together; None: the configuration's
    config          settings, alone or as `topg.config.resolve` gives them; None: from the environment, the file that
                    TOPG_CONFIG names, and the defaults

    Finished sequences make room for waiting ones at once.  Methods may be called from several threads; they share the
    steps.  Raises ModelError, PrecisionError, ConfigError, CapacityError or BackendError when it cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        quant: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        max_context: int | None = None,
        max_batch_size: int | None = None,
        config: Config | Resolved | None = None,
    ) -> None:
        check_threads(threads)
        resolved = _resolved(config, max_context, max_batch_size)
        settings = resolved.config
        # Before a conversion: a back end that is missing, or cannot do what is asked for, is said at once.
        backend_type(settings.execution.backend, device, flash_attention=settings.execution.enable_flash_attn)
        self.model = open_model(model, quant, Home.find(), _tell)
        self.max_context = _context(self.model, resolved)
        self.tokenizer = self.model.load_tokenizer()
        kv = plan_kv(self.model.manifest, settings, self.max_context, device)
        self._engine = _engine(self.model, self.tokenizer, settings, kv, device, threads)
        limits = IntakeLimits(self.max_context, self.model.plan.vocab)
        self._intake = Intake(self.tokenizer, self.model.manifest.tokens.eos, limits)

    @property
    def default_params(self) -> SamplingParams:
        """What is used where no params are given: the publisher's recommendation, as far as the model names one."""
        recommended = self.model.manifest.generation
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values = {name: getattr(recommended, name) for name in names}
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Answers in the order of the prompts.

        A prompt is text, or a list of token ids that is taken as it is; one prompt may stand alone.  Params are for all
        prompts, or one for each; None stands for `default_params`, and params that are given are taken as they are.

        Raises RequestError before anything runs when a prompt or its params are wrong, naming its index.  A request
        that fails while it runs ends with the finish_reason "error"; the others are not affected.
        """
        self._engine.require_open()
        single = isinstance(prompts, str) or _is_ids(prompts)
        items = [cast(Prompt, prompts)] if single else _prompt_list(prompts)
        params = self._params_of_each(len(items), sampling_params)
        requests = [
            self._checked(item, item_params, index=None if single else index)
            for index, (item, item_params) in enumerate(zip(items, params, strict=True))
        ]
        return self._run(requests)

    def chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> GenerationResult:
        """The assistant's next message in a chat of {"role": ..., "content": ...} messages.

        Raises RequestError for malformed messages and ChatTemplateError when the model has no template or refuses them.
        """
        self._engine.require_open()
        return self._run([self._intake.from_messages(messages, self._params(sampling_params))])[0]

    def stream(self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None) -> AnswerStream:
        """The answer to one prompt or chat, piece by piece; joined, the pieces are what is not streamed.

        The request is checked and queued now.  Close the stream (or use it in a `with` block) to end it early.
        """
        self._engine.require_open()
        params = self._params(sampling_params)
        if _is_messages(prompt):
            return self._engine.start(self._intake.from_messages(prompt, params))
        return self._engine.start(self._intake.from_prompt(cast(Prompt, prompt), params))

    def status(self) -> EngineStatus:
        """Requests waiting and running, pages used and free."""
        return self._engine.status()

    def close(self) -> None:
        """Let go of the model; every later call is refused."""
        self._engine.close()

    def __enter__(self) -> LLM:
        self._engine.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[Request]) -> list[GenerationResult]:
        streams: list[AnswerStream] = []
        try:
            for request in requests:
                streams.append(self._engine.start(request))
            return [result_of(stream.request, list(stream)) for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def _checked(self, prompt: Prompt, params: SamplingParams, index: int | None) -> Request:
        try:
            return self._intake.from_prompt(prompt, params)
        except RequestError as error:
            if index is None:
                raise
            raise type(error)(f"prompts[{index}]: {error}", error.param) from error

    def _params_of_each(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [self._params(given)] * count
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or len(given) != count:
            kind = f"{len(given)} entries" if isinstance(given, Sequence) else type(given).__name__
            raise RequestError(
                f"sampling_params is {kind} for {count} prompts; give one SamplingParams, or one for each prompt",
                param="sampling_params",
            )
        return [self._params(params) for params in given]

    def _params(self, given: SamplingParams | None) -> SamplingParams:
        if given is None:
            return self.default_params
        if not isinstance(given, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, not {type(given).__name__}", param="sampling_params"
            )
        return given


def check_threads(threads: object) -> None:
    """Raise ConfigError unless `threads` is None or a number of threads."""
    wrong = not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MAX_THREADS
    if threads is not None and wrong:
        raise ConfigError(f"threads is {shown(threads)}; allowed: whole numbers from 1 to {MAX_THREADS}")


def _resolved(config: Config | Resolved | None, max_context: int | None, max_batch_size: int | None) -> Resolved:
    """Keywords over the configuration given, or over environment, file and defaults."""
    given = {"max_context": max_context, "max_batch_size": max_batch_size}
    keywords = {name: value for name, value in given.items() if value is not None}
    own = resolve(
        {f"execution.{name}": value for name, value in keywords.items()}, os.environ if config is None else {}
    )
    if config is None:
        return own
    base = config if isinstance(config, Resolved) else _by_hand(config)
    changes: dict[str, Any] = {name: getattr(own.config.execution, name) for name in keywords}
    origins = dict(base.origins) | {f"execution.{name}": "keyword" for name in keywords}
    return Resolved(replace(base.config, execution=replace(base.config.execution, **changes)), origins)


def _by_hand(config: Config) -> Resolved:
    """A configuration that was made without `resolve`: what differs from the default was set."""
    plain = Resolved(config, {})
    return Resolved(
        config, {key: "default" if plain.value(key) == item.default else "Config" for key, item in SETTINGS.items()}
    )


def _context(model: ConvertedModel, resolved: Resolved) -> int:
    limit, wanted = model.manifest.context, resolved.config.execution.max_context
    if wanted > limit and not resolved.is_default(MAX_CONTEXT):
        raise ConfigError(
            f"{MAX_CONTEXT} is {wanted} ({resolved.origins[MAX_CONTEXT]}); {model.manifest.name} takes at most {limit} "
            "tokens: lower it, or leave it out"
        )
    return min(wanted, limit)


def _engine(
    model: ConvertedModel, tokenizer: Tokenizer, settings: Config, kv: KVBudget, device: str, threads: int | None
) -> Engine:
    execution = settings.execution
    limits = SchedulerLimits(execution.max_batch_size, execution.prefill_chunk)
    backend = load_backend(
        model,
        execution.backend,
        page_count=kv.page_count,
        tokens_per_page=kv.geometry.tokens_per_page,
        kv_dtype=kv.geometry.dtype,
        device=device,
        threads=threads,
        flash_attention=execution.enable_flash_attn,
    )
    return Engine(backend, tokenizer, PagePool(kv.page_count, kv.geometry.tokens_per_page), limits)


def _is_ids(prompts: object) -> TypeGuard[Sequence[int]]:
    """Whether this is one prompt of token ids: a list that holds numbers only, at least one."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
        return False
    return len(prompts) > 0 and all(isinstance(item, bool) or whole_number(item) is not None for item in prompts)


def _prompt_list(prompts: object) -> list[Prompt]:
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError(
            f"prompts is {type(prompts).__name__}; give a text, a list of token ids, or a list of these", param="prompt"
        )
    return list(prompts)


def _is_messages(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        return False
    return len(prompt) > 0 and any(isinstance(item, Mapping) for item in prompt)


def _tell(sentence: str) -> None:
    print(printable(f"topg: {sentence}"), file=sys.stderr)
