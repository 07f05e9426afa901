"""The memory of the KV cache on a torch device, read and written through page tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from topg.errors import CapacityError
from topg.kv.pages import KVGeometry, KVType

KV_TYPES: dict[KVType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PagedCache:
    """One tensor [pages, layers, 2 (keys, values), kv_heads, tokens_per_page, head_dim], taken once.

    The operating system commits a page's memory when it is first written.
    """

    def __init__(self, geometry: KVGeometry, page_count: int, device: torch.device) -> None:
        self._tokens_per_page = geometry.tokens_per_page
        shape = (page_count, geometry.layers, 2, geometry.kv_heads, geometry.tokens_per_page, geometry.head_dim)
        try:
            self._pages = _zeros(shape, KV_TYPES[geometry.dtype], device)
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
            self._pages[:, layer, kind][pages, :, slots] = new.to(self._pages.dtype)

    def read(self, layer: int, pages: Sequence[int], first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence's tokens from `first` up to `last`: [kv_heads, last - first, head_dim].

        float32 copies, which stay valid.
        """
        size = self._tokens_per_page
        starts = range(first // size * size, last, size)
        # Only the slots asked for: what a large page holds beside them must not cost time.
        parts = [
            self._pages[pages[start // size], layer, :, :, max(first - start, 0) : last - start] for start in starts
        ]
        key, value = torch.cat(parts, dim=2).float()
        return key, value

    def copy(self, source: int, target: int) -> None:
        """Overwrite page `target` by page `source`."""
        self._pages[target] = self._pages[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory, on a CPU, is committed page by page as it is written: `torch.zeros` would touch all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
