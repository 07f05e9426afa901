"""Element-wise functions: right, and the same at every place of an array."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402  # after the check for torch

from topg.backends.torch.elementwise import (  # noqa: E402  # after the check for torch
    ACTIVATION_FUNCTIONS,
    layer_norm,
    rms_norm,
    softcap,
    tree_sum,
)

REFERENCES: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(name): function for name, function in ACTIVATION_FUNCTIONS.items()},
    "exp": torch.exp,
    "softcap": lambda x: softcap(x, 30.0),
}
ODD_SIZES = (1, 3, 15, 17, 33, 577, 1537, 40_001)


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_activation_functions(name: str) -> None:
    x = torch.linspace(-12, 12, 1001)
    expected = np.array([REFERENCES[name](value) for value in x.tolist()])
    np.testing.assert_allclose(FUNCTIONS[name](x).numpy(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_activation_functions_stay_finite(name: str) -> None:
    x = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4])
    assert FUNCTIONS[name](x).tolist() == [0, 0, 0, 0, 100, 1e4]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_gives_the_same_bits_wherever_it_stands(name: str) -> None:
    x = torch.randn(60_000, generator=torch.Generator().manual_seed(3)) * 4
    whole = FUNCTIONS[name](x)
    for size in ODD_SIZES:
        for start in (0, 1, 13, 64):
            part = slice(start, start + size)
            assert torch.equal(FUNCTIONS[name](x[part]), whole[part])
            assert torch.equal(FUNCTIONS[name](x[part].clone()), whole[part])


@pytest.mark.parametrize("width", [1, 2, 3, 64, 100, 577])
def test_tree_sum(width: int) -> None:
    x = torch.randn(7, width)
    np.testing.assert_allclose(tree_sum(x)[:, 0].numpy(), x.double().sum(1).numpy(), rtol=0, atol=1e-5)
    assert torch.equal(tree_sum(x[3:4]), tree_sum(x)[3:4])


def test_norms() -> None:
    x, weight, bias = torch.randn(5, 3, 33) * 3 + 1, torch.randn(33), torch.randn(33)
    values = x.double().numpy()
    rms = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3) * weight.numpy()
    centred = values - values.mean(-1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * weight.numpy() + bias.numpy()
    np.testing.assert_allclose(rms_norm(x, weight, None, 1e-3).numpy(), rms, rtol=0, atol=2e-6)
    np.testing.assert_allclose(layer_norm(x, weight, bias, 1e-3).numpy(), layer, rtol=0, atol=3e-6)
    assert torch.equal(rms_norm(x[4:], weight, None, 1e-3), rms_norm(x, weight, None, 1e-3)[4:])
