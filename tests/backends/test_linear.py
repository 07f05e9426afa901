"""Matrix products in every precision against float64, and their independence of the other rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from support.memory_model import MemoryModel
from topg.errors import BackendError
from topg.plan import PlanBuilder
from topg.precision.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8_PLAIN,
    INT8_ROTATED,
    INT8_WEIGHT_ONLY,
    Precision,
)
from topg.precision.rotation import hadamard

torch = pytest.importorskip("torch")

from topg.backends.torch.linear import TILE_ROWS, linear, quantise_rows  # noqa: E402  # after the check for torch
from topg.backends.torch.rotation import rotate  # noqa: E402
from topg.backends.torch.weights import GroupedWeight, Weight, embedding_rows, load_weights  # noqa: E402

KEPT_Q8 = Precision("int8", "int8", group_size=32, activation_group=32, scale="float16")
KEPT_Q4_1 = Precision("int4", "int8", group_size=32, activation_group=32, minimum=True, scale="float16")
KEPT_Q6 = Precision("int8", "int8", group_size=16, activation_group=32, scale="float32")
FINER_INPUT = Precision("int8", "int8", group_size=64, activation_group=32, scale="float32")

# The largest error of a product of unit-size rows, by what the input is rounded to.
BOUNDS = {"float32": 1e-6, "bfloat16": 6e-3, "int8": 1.2e-2}
PRECISIONS = [
    FLOAT32, FLOAT16, BFLOAT16, INT8_WEIGHT_ONLY, INT8_PLAIN, INT8_ROTATED, INT4,
    KEPT_Q8, KEPT_Q4_1, KEPT_Q6, FINER_INPUT,
]  # fmt: skip
SHAPES = [(128, 64), (33, 80), (7, 272), (1100, 576)]


def _model(precision: Precision, shape: tuple[int, int]) -> MemoryModel:
    build = PlanBuilder()
    x = build.embed("embed", 3, shape[1])
    build.logits(build.select_rows(x), "head", shape[0])
    rng = np.random.default_rng(shape[0])
    tensors = {
        "embed.weight": np.zeros((3, shape[1]), np.float32),
        "head.weight": (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32),
    }
    return MemoryModel(build.build(), tensors, {"head.weight": precision})


def _weight(model: MemoryModel) -> Weight:
    return load_weights(model, torch.device("cpu"))["head.weight"]


def _input(rows: int, columns: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.describe())
def test_products_are_close_to_those_of_the_dequantised_weight(precision: Precision, shape: tuple[int, int]) -> None:
    model = _model(precision, shape)
    x = _input(19, shape[1])
    expected = x.astype(float) @ model.dequantised("head.weight").astype(float).T
    error = np.abs(linear(torch.from_numpy(x), _weight(model)).numpy() - expected)
    bound = BOUNDS[precision.activations]
    assert error.mean() < bound
    assert error.max() < 8 * bound


@pytest.mark.parametrize("precision", [INT8_PLAIN, INT4, KEPT_Q4_1, KEPT_Q6, FINER_INPUT], ids=lambda p: p.describe())
def test_integer_products_follow_their_definition(precision: Precision) -> None:
    """Exact sums in each group, then scale after scale in float32, as formats.py describes it."""
    shape = (5, 192)
    model = _model(precision, shape)
    x = _input(4, shape[1])
    size = min(precision.group_size or 0, precision.activation_group or 0)
    codes, scales = (part.numpy() for part in quantise_rows(torch.from_numpy(x), precision.activation_group or 0))
    weight = _weight(model)
    assert isinstance(weight, GroupedWeight)
    total = np.zeros((4, 5), np.float32)
    for group in range(shape[1] // size):
        columns = slice(group * size, (group + 1) * size)
        scale = scales[:, group * size // (precision.activation_group or 0), None]
        dot = (codes[:, columns].astype(np.int64) @ weight.codes[group].numpy().astype(np.int64).T).astype(np.float32)
        total = total + dot * (scale * weight.scales[group].numpy())
        if weight.minimums is not None:
            total = total + scale * codes[:, columns].sum(1, keepdims=True) * weight.minimums[group].numpy()
    np.testing.assert_array_equal(linear(torch.from_numpy(x), weight).numpy(), total)


@pytest.mark.parametrize("shape", [*SHAPES, (576, 1536), (192, 576), (640, 2048), (256, 640), (33, 4099)], ids=str)
@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, INT8_WEIGHT_ONLY, INT8_ROTATED], ids=lambda p: p.describe())
def test_a_row_alone_is_the_row_among_others(precision: Precision, shape: tuple[int, int]) -> None:
    weight = _weight(_model(precision, shape))
    x = torch.from_numpy(_input(2 * TILE_ROWS + 5, shape[1]))
    together = linear(x, weight)
    for row in (0, 1, TILE_ROWS - 1, TILE_ROWS, 2 * TILE_ROWS + 4):
        assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])
    assert torch.equal(linear(x[3:], weight), together[3:])


@pytest.mark.slow
@pytest.mark.parametrize("precision", [BFLOAT16, INT8_ROTATED], ids=lambda p: p.describe())
def test_a_row_of_a_large_head_is_the_row_among_others(precision: Precision) -> None:
    test_a_row_alone_is_the_row_among_others(precision, (49152, 576))


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, INT8_ROTATED, INT4, KEPT_Q4_1], ids=lambda p: p.describe())
def test_embedding_rows_are_the_dequantised_rows(precision: Precision) -> None:
    model = _model(precision, (33, 80))
    rows = embedding_rows(_weight(model), torch.tensor([32, 0, 7, 7]))
    np.testing.assert_array_equal(rows.numpy(), model.dequantised("head.weight")[[32, 0, 7, 7]])


def test_rotation_rounds_as_the_converter_does() -> None:
    x = _input(9, 192)
    np.testing.assert_array_equal(rotate(torch.from_numpy(x)).numpy(), hadamard(x))


def test_activations_are_quantised_by_row_and_group() -> None:
    x = torch.zeros(2, 64)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[1, 33] = -3.0
    codes, scales = quantise_rows(x, 32)
    assert codes[0, :4].tolist() == [127.0, 0.0, 2.0, -2.0]  # halves go to the even neighbour
    assert codes[1, 33] == -127
    assert scales.tolist() == [[1.0, 0.0], [0.0, pytest.approx(3 / 127)]]


def test_what_is_not_finite_stays_visible() -> None:
    weight = _weight(_model(INT8_PLAIN, (8, 128)))
    x = torch.zeros(3, 128)
    x[0, 5], x[1, 70] = torch.nan, torch.inf
    out = linear(x, weight)
    assert not out[:2].isfinite().any()
    assert out[2].isfinite().all()


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (Precision("int8", "int8", group_size=64, activation_group=48, scale="float32"), "one must be a multiple"),
        (Precision("float32", "int8"), "int8 activations need codes"),
    ],
)
def test_precisions_without_a_kernel_are_refused_by_name(precision: Precision, message: str) -> None:
    with pytest.raises(BackendError, match=f"'head.weight'.*{message}"):
        _weight(_model(precision, (8, 128)))
