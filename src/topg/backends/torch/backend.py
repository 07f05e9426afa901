"""The back end itself: loads a model once, then runs steps op by op."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from topg.backends.base import Step
from topg.backends.source import ModelSource
from topg.backends.torch.attention import Attend, flash_attention, plain_attention
from topg.backends.torch.cache import KV_TYPES, PagedCache
from topg.backends.torch.kernels import KERNELS, Context, Kernel
from topg.backends.torch.step import check_step, flatten
from topg.backends.torch.weights import load_weights, resident_bytes
from topg.errors import BackendError
from topg.kv.pages import KVGeometry, KVType, PageAccountingError
from topg.ops import Embed, SelectRows
from topg.plan import Plan
from topg.precision.formats import Precision


class TorchBackend:
    """A model on one torch device; implements `topg.backends.base.Backend`.

    `flash_attention` chooses between the two versions of attention; `kernels` may add a kernel for a custom op.
    `threads` sets the number of threads torch uses in this process.  Raises BackendError when the device does not
    exist or an op or precision of the model has no kernel, CapacityError when the KV pages do not fit.
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
        kernels: Mapping[str, Kernel] = KERNELS,
    ) -> None:
        self._plan = model.plan
        self._kernels = _kernels_of(model.plan, kernels)
        self._kv = _kv_geometry(model.plan, kv_dtype, tokens_per_page)
        self._device = _device(device)
        self._attend = _attend(flash_attention)
        if threads is not None:
            torch.set_num_threads(threads)
        self._weights = load_weights(model, self._device)
        self._cache = PagedCache(self._kv, page_count, self._device)

    @staticmethod
    def resident_bytes(precision: Precision, shape: tuple[int, ...]) -> int:
        """See BackendType."""
        return resident_bytes(precision, shape)

    @staticmethod
    def device_memory(device: str) -> int | None:
        """See BackendType; raises BackendError when the device does not exist."""
        found = _device(device)
        if found.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(found)
        return int(free)

    @property
    def plan(self) -> Plan:
        """The plan it runs."""
        return self._plan

    @property
    def kv(self) -> KVGeometry:
        """Shape of its KV cache."""
        return self._kv

    @torch.inference_mode()
    def run(self, step: Step) -> npt.NDArray[np.float32]:
        """Compute a step; returns logits [rows asked for, vocab], rows in the order of slices and tokens.

        Writes the pages at the new tokens' slots and no other memory that outlives the call.  The result stays valid.
        Raises RequestError or PageAccountingError for a step that does not fit the model or the pool, before anything
        is written.  Logits that are not finite are returned as they are.
        """
        check_step(
            step,
            vocab=_token_ids(self._plan),
            page_count=self._cache.page_count,
            tokens_per_page=self._kv.tokens_per_page,
        )
        rows = flatten(step, self._kv.tokens_per_page, self._device)
        context = Context(rows, self._weights, self._cache, self._attend)
        for op, kernel in zip(self._plan.ops, self._kernels, strict=True):
            context.buffers[op.output] = kernel(op, context)
        logits: npt.NDArray[np.float32] = context.buffers[self._plan.ops[-1].output].cpu().numpy()
        return logits

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers of a page (copy on write)."""
        for page in (source, target):
            if not 0 <= page < self._cache.page_count:
                raise PageAccountingError(f"page {page} cannot be copied; the pool has {self._cache.page_count} pages")
        self._cache.copy(source, target)


def _kernels_of(plan: Plan, kernels: Mapping[str, Kernel]) -> list[Kernel]:
    """The kernel of each op; raises BackendError naming the first op that has none."""
    for op in plan.ops:
        if op.kind not in kernels:
            raise BackendError(
                f"the torch back end has no kernel for op {op.kind!r} ({op.name!r}); "
                f"it has: {', '.join(sorted(kernels))}; pass one in `kernels`"
            )
    if sum(isinstance(op, SelectRows) for op in plan.ops) != 1:
        raise BackendError("the plan must have one select_rows op, which picks the rows that logits are wanted for")
    return [kernels[op.kind] for op in plan.ops]


def _kv_geometry(plan: Plan, dtype: KVType, tokens_per_page: int) -> KVGeometry:
    if dtype not in KV_TYPES:
        raise BackendError(f"the KV cache cannot be kept in {dtype!r}; allowed: {', '.join(KV_TYPES)}")
    layers = [op.layer for op in plan.attention]
    shapes = {(op.kv_heads, op.head_dim) for op in plan.attention}
    if sorted(layers) != list(range(len(layers))) or len(shapes) != 1:
        raise BackendError(
            f"the plan's attention layers are {layers} with (KV heads, head size) {sorted(shapes)}; "
            "pages need layers numbered from 0, all of one shape"
        )
    kv_heads, head_dim = shapes.pop()
    return KVGeometry(len(layers), kv_heads, head_dim, dtype, tokens_per_page)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA raises AssertionError
        raise BackendError(f"torch has no usable device {name!r}: {error}") from error
    return device


def _attend(flash: bool) -> Attend:
    return flash_attention if flash else plain_attention


def _token_ids(plan: Plan) -> int:
    """Number of token ids every embedding of the plan knows."""
    return min((op.vocab for op in plan.ops if isinstance(op, Embed)), default=plan.vocab)
