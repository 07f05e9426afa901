"""Back ends run plans: `base` is the contract, `torch` the one that exists.  Importing this package loads no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from topg.backends.base import Backend, BackendOptions, BackendType, SequenceSlice, Step
from topg.backends.source import ModelSource
from topg.errors import BackendError

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from 3.11

    from topg.backends.torch import TorchBackend

__all__ = ["Backend", "BackendOptions", "BackendType", "ModelSource", "SequenceSlice", "Step", "backend_type",
           "load_backend"]  # fmt: skip


def load_backend(model: ModelSource, **options: Unpack[BackendOptions]) -> Backend:
    """Load a model's weights onto a device, with a pool of KV pages.

    Raises BackendError when torch is not installed, the device does not exist, or an op of the plan has no kernel.
    """
    return _torch_backend()(model, **options)


def backend_type() -> BackendType:
    """What `load_backend` will load; raises BackendError when torch is not installed."""
    return _torch_backend()


def _torch_backend() -> type[TorchBackend]:
    _limit_spinning()
    try:
        from topg.backends.torch import TorchBackend
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "the torch back end needs PyTorch, which is not installed: pip install 'topg[torch]'"
        raise BackendError(message) from error
    return TorchBackend


def _limit_spinning() -> None:
    """Let torch's OpenMP threads spin for microseconds, not milliseconds, before they sleep.

    The default is measured in docs/log.md: as soon as another process wants a core, every short operation waits for a
    thread that was preempted while the others spin, and a step takes ten times as long.  Whoever sets one of the
    variables keeps their choice; once torch is loaded it is too late.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
