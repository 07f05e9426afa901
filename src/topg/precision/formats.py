"""How one tensor is stored and multiplied: the vocabulary that recipes, the converter and every back end share.

A grouped weight [rows, columns] is cut along its columns (the input dimension) into groups of `group_size`; the last
group is filled up with zeros.  Element (r, c) of group g is

    scale[r, g] * code[r, c] + minimum[r, g]          (minimum only where the format has one)

`rotated` weights are quantised after each group of 64 went through an orthonormal Walsh-Hadamard transform; the
activations go through the same transform, so products are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from topg.errors import CheckpointError

WeightFormat = Literal["float32", "float16", "bfloat16", "int8", "int4"]
ActivationFormat = Literal["float32", "bfloat16", "int8"]
ScaleFormat = Literal["float32", "float16", "bfloat16"]
StorageType = Literal["float32", "float16", "bfloat16", "int8", "uint8"]

BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class Part:
    """One stored array of a tensor."""

    dtype: StorageType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True)
class Precision:
    """Storage of a weight and the arithmetic it is used with.

    `activations` is what a linear's input is rounded to before it is multiplied: "int8" means per (token, group of
    `activation_group` columns), symmetric, after the same rotation as the weight.  Sums within a group are exact;
    groups are added in order in float32.
    """

    weights: WeightFormat
    activations: ActivationFormat
    group_size: int | None = None
    activation_group: int | None = None
    rotated: bool = False
    minimum: bool = False
    scale: ScaleFormat | None = None

    @property
    def grouped(self) -> bool:
        """Whether the weight is stored as integer codes with scales."""
        return self.group_size is not None

    def groups(self, columns: int) -> int:
        """Groups along the input dimension, the last one filled up with zeros."""
        assert self.group_size is not None
        return -(-columns // self.group_size)

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """The arrays a tensor of `shape` is stored as, by part name.

        Plain formats have one part, "values".  Grouped ones have "codes" ("int8": int8 [rows, padded columns];
        "int4": uint8 [rows, padded columns / 2], column 2i in the low nibble and 2i + 1 in the high one, a nibble n
        standing for n - 8 without and for n with a minimum), "scales" [rows, groups], and "minimums" likewise.
        """
        if not self.grouped:
            return {"values": Part(self.weights, shape)}  # type: ignore[arg-type]  # plain formats are storage types
        assert self.scale is not None and self.group_size is not None
        rows, columns = shape
        groups = self.groups(columns)
        padded = groups * self.group_size
        codes = Part("int8", (rows, padded)) if self.weights == "int8" else Part("uint8", (rows, padded // 2))
        parts = {"codes": codes, "scales": Part(self.scale, (rows, groups))}
        if self.minimum:
            parts["minimums"] = Part(self.scale, (rows, groups))
        return parts

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Stored size in bytes."""
        return sum(part.nbytes for part in self.parts(shape).values())

    def describe(self) -> str:
        """A short form for tables: "int8 g64 rotated / int8"."""
        words: list[str] = [self.weights]
        if self.group_size is not None:
            words.append(f"g{self.group_size}")
        words += [word for word, on in (("rotated", self.rotated), ("min", self.minimum)) if on]
        return f"{' '.join(words)} / {self.activations}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Precision:
        """Rebuild from a manifest; raises CheckpointError on anything this version does not know."""
        try:
            precision = cls(**data)
        except TypeError as error:
            raise CheckpointError(f"precision {dict(data)!r} is not understood: {error}") from error
        for value, allowed in (
            (precision.weights, get_args(WeightFormat)),
            (precision.activations, get_args(ActivationFormat)),
            (precision.scale, (*get_args(ScaleFormat), None)),
        ):
            if value not in allowed:
                raise CheckpointError(f"precision holds {value!r}; allowed: {', '.join(map(str, allowed))}")
        return precision


FLOAT32 = Precision("float32", "float32")
FLOAT16 = Precision("float16", "float32")
BFLOAT16 = Precision("bfloat16", "bfloat16")
INT8_WEIGHT_ONLY = Precision("int8", "bfloat16", group_size=64, scale="bfloat16")
INT8_ROTATED = Precision("int8", "int8", group_size=64, activation_group=64, rotated=True, scale="bfloat16")
INT8_PLAIN = Precision("int8", "int8", group_size=64, activation_group=64, scale="bfloat16")
INT4 = Precision("int4", "int8", group_size=32, activation_group=32, scale="float16")
