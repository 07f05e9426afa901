"""The native back end: plans compiled for ToPG's own kernels."""

from topg.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
