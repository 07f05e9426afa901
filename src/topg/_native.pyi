"""The native module's types."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

# ---- runtime ----

def built_isas() -> list[str]:
    """Instruction sets this build has kernels for, slowest first."""

def usable_isas() -> list[str]:
    """Those that this processor and operating system can run."""

def isa_for(name: str) -> str:
    """The instruction set that is used when `name` is asked for; "" asks for the best.  Raises ValueError."""

def measure_limits(isa: str, threads: int) -> dict[str, float]:
    """Bandwidth [bytes/s], peaks [operations/s, two a multiply-add] and barrier time [s], in half a second."""

class ThreadPool:
    """The engine's threads, for tests."""

    def __init__(self, threads: int) -> None: ...
    def count_barrier_faults(self, runs: int, barriers: int) -> int:
        """Barriers that let a thread through too early: 0 unless the pool is broken."""

# ---- engine ----
#
# Programs as topg.backends.native.program describes them, over the ids that the add_* methods of Engine return.  NONE
# stands for "absent", SCRATCH for the scratch row of the running thread.

NONE: int
SCRATCH: int

Int32 = npt.NDArray[np.int32]
# Stored arrays of a tensor as topg.precision.storage has them: values or codes, scales, minimums.
StoredParts = tuple[npt.NDArray[Any], npt.NDArray[Any] | None, npt.NDArray[Any] | None]

def page_bytes(type: str, layers: int, kv_heads: int, head_dim: int, tokens_per_page: int) -> int:
    """Bytes of a page of the KV cache.  Raises ValueError for sizes that `set_cache` would refuse."""

class Norm:
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, kind: str, weight: int, bias: int, width: int, runs: int, eps: float) -> None: ...

class Heads:
    def __init__(self, attention: int, query: int, key: int, value: int, query_norm: Norm, key_norm: Norm) -> None: ...

class RowOp:
    @staticmethod
    def embed(weight: int, out: int) -> RowOp: ...
    @staticmethod
    def norm(norm: Norm, input: int, out: int) -> RowOp: ...
    @staticmethod
    def add(left: int, right: int, out: int) -> RowOp: ...
    @staticmethod
    def scale(input: int, factor: float, out: int) -> RowOp: ...
    @staticmethod
    def activate(function: str, input: int, out: int) -> RowOp: ...
    @staticmethod
    def gate(function: str, gate: int, up: int, out: int) -> RowOp: ...
    @staticmethod
    def select(input: int, out: int) -> RowOp: ...
    @staticmethod
    def prepare(input: int, activations: int) -> RowOp: ...
    @staticmethod
    def heads(heads: Heads) -> RowOp: ...

class LinearPart:
    def __init__(self, weight: int, bias: int, epilogue: str, function: str, buffer: int, activations: int) -> None: ...

class Engine:
    """Building methods raise ValueError for what does not fit; `finish` ends building.  Calls from threads wait."""

    def __init__(self, isa: str, threads: int, rows: int, logits_rows: int, positions: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    def add_weight(
        self,
        code: str,
        activation: str,
        scale: str,
        group: int,
        minimum: bool,
        rotated: bool,
        rows: int,
        columns: int,
        sources: Sequence[StoredParts],
    ) -> int: ...
    def add_vector(self, values: npt.NDArray[np.float32]) -> int: ...
    def add_buffer(self, width: int) -> int: ...
    def add_activations(self, code: str, group: int, dot_group: int, rotated: bool, columns: int) -> int: ...
    def add_rope(self, half: int) -> int: ...
    def set_rope(self, id: int, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32]) -> None:
        """Angles [positions, half]; may be called again with more positions, between two steps."""

    def set_cache(
        self, type: str, layers: int, kv_heads: int, head_dim: int, tokens_per_page: int, pages: int
    ) -> None: ...
    def add_attention(self, layer: int, heads: int, scale: float, softcap: float, window: int, rope: int) -> int: ...
    def add_row_step(self, ops: Sequence[RowOp]) -> None: ...
    def add_linear_step(self, x: int, parts: Sequence[LinearPart], heads: Heads | None) -> None: ...
    def add_attention_step(self, attention: int, buffer: int, activations: int) -> None: ...
    def add_logits_step(self, x: int, weight: int, softcap: float) -> None: ...
    def finish(self) -> None: ...
    def kernel_of(self, weight: int) -> str:
        """Name of the kernel that multiplies with a weight."""

    def run(
        self,
        tokens: Int32,
        starts: Int32,
        counts: Int32,
        page_offsets: Int32,
        pages: Int32,
        wanted: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.float32]:
        """Logits [rows wanted, vocab] of a step.

        Slice i has the page table pages[page_offsets[i]:page_offsets[i + 1]].  wanted: 0 no logits, 1 of its last
        token, 2 of all.
        """

    def greedy(
        self,
        tokens: Int32,
        starts: Int32,
        counts: Int32,
        page_offsets: Int32,
        pages: Int32,
        wanted: npt.NDArray[np.uint8],
    ) -> Int32:
        """The best token of each row wanted; -1 where the logits are not usable numbers."""

    def copy_page(self, source: int, target: int) -> None: ...
    def set_profiling(self, on: bool) -> None:
        """Whether steps are timed from now on; times start at zero."""

    def profile(self) -> dict[str, Any]:
        """Seconds since then, the mean of the threads: "steps", one number a step, and "waiting" at barriers."""

# ---- rows and plain linears, for tests and benchmarks ----
#
# Each runs one kernel on every row of an array and raises ValueError for what the kernel must not be given.

def row_rms_norm(
    isa: str,
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32] | None,
    bias: npt.NDArray[np.float32] | None,
    eps: float,
) -> npt.NDArray[np.float32]: ...
def row_layer_norm(
    isa: str,
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32] | None,
    bias: npt.NDArray[np.float32] | None,
    eps: float,
) -> npt.NDArray[np.float32]: ...
def row_add(isa: str, left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...
def row_scale(isa: str, x: npt.NDArray[np.float32], factor: float) -> npt.NDArray[np.float32]: ...
def row_activate(isa: str, function: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...
def row_gate(
    isa: str, function: str, gate: npt.NDArray[np.float32], up: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]: ...
def row_softcap(isa: str, x: npt.NDArray[np.float32], cap: float) -> npt.NDArray[np.float32]: ...
def row_rotate_pairs(
    isa: str, heads: npt.NDArray[np.float32], cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]: ...
def row_argmax(isa: str, x: npt.NDArray[np.float32]) -> int: ...
def row_prepare(
    isa: str,
    x: npt.NDArray[np.float32],
    code: str,
    group: int,
    dot_group: int,
    rotated: bool,
    columns: int,
    piece: int = 0,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.int32]]: ...

class PackedBytes:
    """A weight in packed form, from its bytes."""

    def __init__(
        self,
        packed: npt.NDArray[np.uint8],
        code: str,
        activation: str,
        scale: str,
        group: int,
        minimum: bool,
        channels: int,
        columns: int,
        rotated: bool,
    ) -> None: ...

def row_unpack(isa: str, weight: PackedBytes) -> npt.NDArray[np.float32]: ...
def plain_linear(
    isa: str, weight: PackedBytes, x: npt.NDArray[np.float32], tile_rows: int
) -> npt.NDArray[np.float32]: ...
def plain_tile_rows(isa: str, weight: PackedBytes) -> int: ...

# ---- linears, for tests and benchmarks ----

class LinearWeight:
    """A weight packed from stored arrays, of one source or two interleaved."""

    def __init__(
        self,
        code: str,
        activation: str,
        scale: str,
        group: int,
        minimum: bool,
        rows: int,
        columns: int,
        sources: Sequence[StoredParts],
    ) -> None: ...
    @property
    def channels(self) -> int: ...
    def packed(self) -> npt.NDArray[np.uint8]: ...

def linear(
    isa: str,
    weight: LinearWeight,
    values: npt.NDArray[Any],
    scales: npt.NDArray[np.float32] | None = None,
    max_rows: int = 0,
) -> npt.NDArray[np.float32]:
    """Prepared activations times a weight, in tiles of at most `max_rows` rows."""

def linear_kernel(isa: str, code: str, activation: str, scale: str, group: int, minimum: bool) -> tuple[str, int]:
    """Name and largest tile of a format's kernel; the name is "" when it has none."""

def bench_linear(
    isa: str,
    threads: int,
    code: str,
    activation: str,
    scale: str,
    group: int,
    minimum: bool,
    channels: int,
    columns: int,
    rows: int,
    streaming: bool,
    seconds: float,
) -> dict[str, float]:
    """Medians of a kernel's rate, of the machine's limit measured beside it, and of their ratio.

    Operations per second against the multipliers' peak, or, streaming, bytes of weights per second against the read
    bandwidth.
    """

# ---- paged attention, for tests ----

class PagedAttention:
    """One attention over a pool of KV pages."""

    def __init__(
        self,
        isa: str,
        *,
        kv_dtype: str,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        tokens_per_page: int,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
    ) -> None: ...
    @property
    def page_bytes(self) -> int: ...
    def append(
        self,
        pool: npt.NDArray[np.uint8],
        layer: int,
        pages: npt.NDArray[np.int32],
        start: int,
        key: npt.NDArray[np.float32],
        value: npt.NDArray[np.float32],
    ) -> None:
        """Keys and values [tokens, kv_heads, head_dim] of the tokens from position `start` on, into their pages."""

    def attend(
        self,
        pool: npt.NDArray[np.uint8],
        layer: int,
        pages: npt.NDArray[np.int32],
        start: int,
        query: npt.NDArray[np.float32],
        item_tokens: int,
        item_blocks: int,
    ) -> npt.NDArray[np.float32]:
        """Results [tokens, heads * head_dim] of the queries from position `start` on, in items of `item_tokens` tokens;
        with `item_blocks`, of that many key blocks as well, folded afterwards."""

# ---- sampling ----

# A token; or (token, log-probability, [(id, log-probability), ..]); or "unusable" or "no token", what is wrong with it.
SampleResult = int | tuple[int, float, list[tuple[int, float]]] | str

class SamplerState:
    """What sampling remembers of one request; raises ValueError for token ids outside the vocabulary."""

    def __init__(
        self,
        *,
        vocab: int,
        prompt: Int32,
        seed: int,
        greedy: bool,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        biases: Sequence[tuple[int, float]],
        banned: Sequence[int],
        exclusive: Sequence[int],
        end_tokens: Sequence[int],
        min_tokens: int,
        logprobs: int,
    ) -> None:
        """logprobs: -1 for none."""
    @property
    def generated(self) -> int: ...
    def record(self, token: int) -> None: ...
    def allow(self, words: npt.NDArray[np.uint32]) -> None:
        """Allow only tokens whose bit is set: token t has bit t % 32 of word t // 32."""
    def allow_all(self) -> None: ...

class Sampler:
    """Runs a finished engine's steps and draws from their logits in the same call."""

    def __init__(self, engine: Engine) -> None: ...
    def run(
        self,
        tokens: Int32,
        starts: Int32,
        counts: Int32,
        page_offsets: Int32,
        pages: Int32,
        wanted: npt.NDArray[np.uint8],
        states: Sequence[SamplerState],
    ) -> list[SampleResult]: ...

def sample(isa: str, logits: npt.NDArray[np.float32], states: Sequence[SamplerState]) -> list[SampleResult]: ...
def sampling_weights(
    isa: str, logits: npt.NDArray[np.float64], maximum: float, temperature: float
) -> npt.NDArray[np.float64]: ...
def uniform(seed: int, index: int) -> float: ...
