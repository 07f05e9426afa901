"""Back ends run plans: `base` is the contract, `torch` the one that exists.  Importing this package loads no torch."""

from __future__ import annotations

from topg.backends.base import Backend, SequenceSlice, Step
from topg.backends.source import ModelSource
from topg.errors import BackendError
from topg.kv.pages import KVType

__all__ = ["Backend", "ModelSource", "SequenceSlice", "Step", "load_backend"]


def load_backend(
    model: ModelSource,
    *,
    page_count: int,
    tokens_per_page: int,
    kv_dtype: KVType = "bfloat16",
    device: str = "cpu",
    threads: int | None = None,
    flash_attention: bool = True,
) -> Backend:
    """Load a model's weights onto a device, with a pool of `page_count` KV pages.

    Raises BackendError when torch is not installed, the device does not exist, or an op of the plan has no kernel.
    """
    try:
        from topg.backends.torch import TorchBackend
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "the torch back end needs PyTorch, which is not installed: pip install 'topg[torch]'"
        raise BackendError(message) from error
    return TorchBackend(
        model,
        page_count=page_count,
        tokens_per_page=tokens_per_page,
        kv_dtype=kv_dtype,
        device=device,
        threads=threads,
        flash_attention=flash_attention,
    )
