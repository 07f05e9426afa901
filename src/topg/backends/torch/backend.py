"""The back end itself: loads a model once, then runs steps op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from topg.backends.base import Step
from topg.backends.checks import check_page, check_step, kv_geometry, token_ids
from topg.backends.source import ModelSource
from topg.backends.torch.attention import Attend, flash_attention, plain_attention
from topg.backends.torch.cache import PagedCache
from topg.backends.torch.kernels import KERNELS, Context, Kernel
from topg.backends.torch.step import flatten
from topg.backends.torch.weights import load_weights, resident_bytes
from topg.errors import BackendError, ComputeError
from topg.kv.pages import KVGeometry, KVType
from topg.ops import SelectRows
from topg.plan import Plan
from topg.precision.formats import Precision
from topg.sampling import Sampled, SamplerState, sample


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
        self._kv = kv_geometry(model.plan, kv_dtype, tokens_per_page)
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
    def page_bytes(kv: KVGeometry) -> int:
        """See BackendType."""
        return kv.bytes_per_page

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
            vocab=token_ids(self._plan),
            page_count=self._cache.page_count,
            tokens_per_page=self._kv.tokens_per_page,
        )
        rows = flatten(step, self._kv.tokens_per_page, self._device)
        context = Context(rows, self._weights, self._cache, self._attend)
        for op, kernel in zip(self._plan.ops, self._kernels, strict=True):
            context.buffers[op.output] = kernel(op, context)
        logits: npt.NDArray[np.float32] = context.buffers[self._plan.ops[-1].output].cpu().numpy()
        return logits

    def run_and_sample(self, step: Step, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
        """See Backend."""
        return sample(self.run(step), states)

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers of a page (copy on write)."""
        for page in (source, target):
            check_page(page, self._cache.page_count)
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


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA raises AssertionError
        raise BackendError(f"torch has no usable device {name!r}: {error}") from error
    return device


def _attend(flash: bool) -> Attend:
    return flash_attention if flash else plain_attention
