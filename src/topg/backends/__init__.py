"""Back ends run plans: `base` is the contract, `native` is fast, `torch` the oracle and the way to a GPU.

Importing this package loads neither of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from topg.backends.base import Backend, BackendName, BackendOptions, BackendType, SequenceSlice, Step
from topg.backends.source import ModelSource
from topg.config import ISA_VARIABLE, BackendChoice
from topg.errors import BackendError

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from 3.11

    from topg.backends.native import NativeBackend
    from topg.backends.torch import TorchBackend

__all__ = ["Backend", "BackendOptions", "BackendType", "ModelSource", "SequenceSlice", "Step", "backend_type",
           "load_backend"]  # fmt: skip


def load_backend(model: ModelSource, backend: BackendChoice = "auto", **options: Unpack[BackendOptions]) -> Backend:
    """Load a model's weights onto a device, with a pool of KV pages.

    Raises BackendError when the back end is not installed, cannot do what the options ask for, or has no kernel for an
    op or precision of the model.
    """
    if _choice(backend, options.get("device", "cpu")) == "torch":
        return _torch_backend()(model, **options)
    return _native_backend()(model, isa=os.environ.get(ISA_VARIABLE, ""), **options)


def backend_type(backend: BackendChoice = "auto", device: str = "cpu", *, flash_attention: bool = True) -> BackendType:
    """What `load_backend` will load; raises BackendError when it is not installed or cannot do what is asked for."""
    if _choice(backend, device) == "torch":
        return _torch_backend()
    native = _native_backend()
    native.check_options(device, flash_attention, os.environ.get(ISA_VARIABLE, ""))
    return native


def _choice(backend: BackendChoice, device: str) -> BackendName:
    """auto: native on the processor, torch elsewhere."""
    if backend == "auto":
        return "native" if device == "cpu" else "torch"
    return backend


def _native_backend() -> type[NativeBackend]:
    try:
        from topg.backends.native import NativeBackend
    except ModuleNotFoundError as error:
        if error.name != "topg._native":
            raise
        message = "the native back end is not built: install topg with pip, or choose execution.backend torch"
        raise BackendError(message) from error
    return NativeBackend


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
