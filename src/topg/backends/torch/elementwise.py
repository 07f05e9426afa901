"""Element-wise functions and sums whose result for a row does not depend on the other rows.

Torch computes the last elements of an array, and those at the border between two threads, with scalar code.  For
`sigmoid`, `silu`, `gelu` and `exp2` that code rounds differently from the vector code, so the same value gives
different bits at different places.  `exp`, `tanh`, `erf`, `sqrt` and the four basic operations do not have this
problem; everything here is made of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from topg.ops import ActivationKind


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function (arXiv 1606.08415)."""
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of `gelu`, from the same paper."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


ACTIVATION_FUNCTIONS: Mapping[ActivationKind, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": torch.relu,
}


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x itself without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, which stays with size 1.

    Adds the right half onto the left one until one column is left: only plain additions, in an order that the width
    alone decides, unlike `torch.sum`, whose order may follow the number of rows and threads.
    """
    width = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << (width - 1).bit_length()) - width))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., width] over its root mean square, times weight [width] (arXiv 1910.07467)."""
    mean_square = tree_sum(x * x) / x.shape[-1]
    return _affine(x / torch.sqrt(mean_square + eps), weight, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., width] minus its mean, over its standard deviation, times weight [width] (arXiv 1607.06450)."""
    centred = x - tree_sum(x) / x.shape[-1]
    variance = tree_sum(centred * centred) / x.shape[-1]
    return _affine(centred / torch.sqrt(variance + eps), weight, bias)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    scaled = x * weight
    return scaled if bias is None else scaled + bias
