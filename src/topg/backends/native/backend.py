"""The native back end: a compiled plan on the native engine, one native call a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from topg import _native
from topg.backends.base import Step
from topg.backends.checks import check_page, check_step, kv_geometry, token_ids
from topg.backends.native.assemble import EngineLimits, assemble
from topg.backends.native.compiler import compile_plan
from topg.backends.native.machine import Machine
from topg.backends.native.sampling import EngineSampler
from topg.backends.native.sizes import packed_bytes
from topg.backends.native.step_arrays import cut, rows_end, step_arrays, wanted_rows
from topg.backends.source import ModelSource, check_shapes
from topg.errors import BackendError, CapacityError, ComputeError, ConfigError
from topg.kv.pages import TOKENS_STEP, KVGeometry, KVType
from topg.plan import Plan
from topg.precision.formats import Precision
from topg.sampling import Sampled, SamplerState

MAX_ROWS = 512  # of one native call; a longer step is cut, which changes no bit of it
MAX_POSITIONS = 2**24  # tokens of a sequence that the engine takes at most

FloatArray = npt.NDArray[np.float32]


class NativeBackend:
    """A model on this machine's processor; implements `topg.backends.base.Backend`.

    threads  None stands for one a physical core, as far as a container's quota allows
    isa      instruction set of the kernels, "" for the best that the processor has

    Raises BackendError when the device is another one or an op or precision of the model has no kernel, CapacityError
    when the KV pages do not fit.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        page_count: int,
        tokens_per_page: int,
        kv_dtype: KVType = "bfloat16",
        device: str = "cpu",
        threads: int | None = None,
        flash_attention: bool = True,
        isa: str = "",
    ) -> None:
        self.check_options(device, flash_attention, isa)
        if tokens_per_page % TOKENS_STEP:
            raise BackendError(
                f"a page of {tokens_per_page} tokens was asked for; the native back end has pages of multiples of "
                f"{TOKENS_STEP} tokens"
            )
        self._plan = model.plan
        self._kv = kv_geometry(model.plan, kv_dtype, tokens_per_page)
        self._page_count = page_count
        self._token_ids = token_ids(model.plan)
        self.program = compile_plan(model.plan, model.precision)
        check_shapes(model)
        threads = Machine.detect().default_threads if threads is None else threads
        limits = EngineLimits(isa, threads, MAX_ROWS, min(page_count * tokens_per_page, MAX_POSITIONS))
        try:
            assembled = assemble(self.program, model, self._kv, page_count, limits)
        except MemoryError as error:
            raise CapacityError(
                f"no memory for {page_count} KV pages of {self.page_bytes(self._kv)} bytes, or for the weights"
            ) from error
        self._engine, self._ropes = assembled.engine, assembled.ropes
        self._sampler = EngineSampler(self._engine)

    @staticmethod
    def check_options(device: str, flash_attention: bool, isa: str) -> None:
        """Raise BackendError or ConfigError for what the native back end cannot do, saying what to do instead."""
        if device != "cpu":
            raise BackendError(
                f"the native back end computes on device 'cpu', not on {device!r}; for that, choose execution.backend "
                "torch"
            )
        if not flash_attention:
            raise ConfigError(
                "execution.enable_flash_attn is false, and the native back end always computes attention in blocks: "
                "leave it true, or choose execution.backend torch"
            )
        usable = _native.usable_isas()
        if isa and isa not in usable:
            raise ConfigError(
                f"TOPG_ISA asks for the instruction set {isa!r}; this processor can run {', '.join(usable)}: choose "
                "one of them, or unset it"
            )

    @staticmethod
    def resident_bytes(precision: Precision, shape: tuple[int, ...]) -> int:
        """See BackendType."""
        return packed_bytes(precision, shape)

    @staticmethod
    def page_bytes(kv: KVGeometry) -> int:
        """See BackendType."""
        return _native.page_bytes(kv.dtype, kv.layers, kv.kv_heads, kv.head_dim, kv.tokens_per_page)

    @staticmethod
    def device_memory(device: str) -> int | None:
        """See BackendType."""
        return None

    @property
    def plan(self) -> Plan:
        """The plan it runs."""
        return self._plan

    @property
    def kv(self) -> KVGeometry:
        """Shape of its KV cache."""
        return self._kv

    @property
    def isa(self) -> str:
        """Instruction set of its kernels."""
        return self._engine.isa

    @property
    def threads(self) -> int:
        """Threads it computes with."""
        return self._engine.threads

    @property
    def native_seconds(self) -> float:
        """Time that steps with drawing spent in native code so far."""
        return self._sampler.native_seconds

    def run(self, step: Step) -> FloatArray:
        """Compute a step; returns logits [rows asked for, vocab], rows in the order of slices and tokens.

        Writes the pages at the new tokens' slots and no other memory that outlives the call.  The result stays valid.
        Raises RequestError or PageAccountingError for a step that does not fit the model or the pool, before anything
        is written.  Logits that are not finite are returned as they are.
        """
        logits = [self._engine.run(*step_arrays(piece)) for piece in self._pieces(step)]
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def run_and_sample(self, step: Step, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
        """See Backend."""
        outcomes: list[Sampled | ComputeError] = []
        for piece in self._pieces(step):
            first = len(outcomes)
            outcomes += self._sampler.run(step_arrays(piece), states[first : first + wanted_rows(piece)])
        return outcomes

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers of a page (copy on write)."""
        for page in (source, target):
            check_page(page, self._page_count)
        self._engine.copy_page(source, target)

    def _pieces(self, step: Step) -> Sequence[Step]:
        """The step, checked, in pieces that the engine has room for."""
        check_step(
            step, vocab=self._token_ids, page_count=self._page_count, tokens_per_page=self._kv.tokens_per_page
        )  # fmt: skip
        self._ropes.cover(rows_end(step))
        return cut(step, MAX_ROWS)
