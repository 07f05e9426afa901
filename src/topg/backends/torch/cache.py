"""The memory of the KV cache on a torch device, read and written through page tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from topg.backends.torch.linear import quantise_rows
from topg.backends.torch.rotation import rotate
from topg.errors import CapacityError
from topg.kv.pages import KVGeometry, KVType

KV_TYPES: dict[KVType, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8,
}  # fmt: skip


class PagedCache:
    """One tensor [pages, layers, 2 (keys, values), kv_heads, tokens_per_page, head_dim], taken once.

    int8 has codes there, and a scale of each head and token beside it; keys are transformed before they are rounded, so
    that no single value of a head decides its scale.  The operating system commits memory when it is first written.
    """

    def __init__(self, geometry: KVGeometry, page_count: int, device: torch.device) -> None:
        self._tokens_per_page = geometry.tokens_per_page
        self._rotation = _largest_power_of_two(geometry.head_dim)
        slots = (page_count, geometry.layers, 2, geometry.kv_heads, geometry.tokens_per_page)
        self._scales: Tensor | None = None
        try:
            self._pages = _zeros((*slots, geometry.head_dim), KV_TYPES[geometry.dtype], device)
            if geometry.dtype == "int8":
                self._scales = _zeros(slots, torch.float32, device)
        except (RuntimeError, MemoryError) as error:  # torch has no narrower class for memory that the host refuses
            raise CapacityError(
                f"no memory on {device} for {page_count} KV pages of {geometry.bytes_per_page} bytes: {error}"
            ) from error

    @property
    def page_count(self) -> int:
        return self._pages.shape[0]

    def append(self, layer: int, pages: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [rows, kv_heads, head_dim], rounded to the cache's type, to each row's page and slot."""
        for kind, new in enumerate((key, value)):
            stored = new
            if self._scales is not None:
                stored, self._scales[:, layer, kind][pages, :, slots] = self._quantised(new, is_key=kind == 0)
            self._pages[:, layer, kind][pages, :, slots] = stored.to(self._pages.dtype)

    def read(self, layer: int, pages: Sequence[int], first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence's tokens from `first` up to `last`: [kv_heads, last - first, head_dim].

        float32 copies, which stay valid.
        """
        key, value = self._gather(self._pages, layer, pages, first, last).float()
        if self._scales is None:
            return key, value
        key_scales, value_scales = self._gather(self._scales, layer, pages, first, last)
        return self._rotated(key * key_scales[..., None]), value * value_scales[..., None]

    def _gather(self, slots: Tensor, layer: int, pages: Sequence[int], first: int, last: int) -> Tensor:
        """What `slots` [pages, layers, 2, kv_heads, tokens_per_page, ..] holds of these tokens, side by side."""
        size = self._tokens_per_page
        starts = range(first // size * size, last, size)
        # Only the slots asked for: what a large page holds beside them must not cost time.
        parts = [slots[pages[start // size], layer, :, :, max(first - start, 0) : last - start] for start in starts]
        return torch.cat(parts, dim=2)

    def _quantised(self, heads: Tensor, is_key: bool) -> tuple[Tensor, Tensor]:
        """Codes like heads [rows, kv_heads, head_dim], and scales [rows, kv_heads]."""
        flat = (self._rotated(heads) if is_key else heads).reshape(-1, heads.shape[2])
        codes, scales = quantise_rows(flat, heads.shape[2])
        return codes.view(heads.shape), scales.view(heads.shape[:2])

    def _rotated(self, heads: Tensor) -> Tensor:
        return rotate(heads, self._rotation).view(heads.shape)

    def copy(self, source: int, target: int) -> None:
        """Overwrite page `target` by page `source`."""
        self._pages[target] = self._pages[source]
        if self._scales is not None:
            self._scales[target] = self._scales[source]


def _largest_power_of_two(number: int) -> int:
    """The largest power of two that divides a number."""
    return number & -number


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory, on a CPU, is committed page by page as it is written: `torch.zeros` would touch all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
