"""The torch back end: plain tensor operations, one at a time.  Slow, obviously right, the oracle of every later kernel.

Every row's result is the same bits whoever shares the step.  Three habits keep it so: matrix products always have the
same shape (tiles of rows, filled up with zeros), sums add in an order fixed by the width alone, and element-wise
functions are those whose vector and scalar versions agree.
"""

from topg.backends.torch.backend import TorchBackend
from topg.backends.torch.kernels import KERNELS, Context, Kernel

__all__ = ["KERNELS", "Context", "Kernel", "TorchBackend"]
