"""Recipes: which precision each role of a tensor gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from topg.errors import PrecisionError
from topg.precision.formats import (
    BFLOAT16,
    FLOAT32,
    INT4,
    INT8_PLAIN,
    INT8_ROTATED,
    INT8_WEIGHT_ONLY,
    Precision,
)

Role = Literal[
    "embedding", "head", "query", "key", "value", "attention_output", "gate", "up", "down", "norm", "bias",
]  # fmt: skip
ATTENTION_ROLES: tuple[Role, ...] = ("query", "key", "value", "attention_output")
VECTOR_ROLES: tuple[Role, ...] = ("norm", "bias")

KEEP = "keep"
DEFAULT_RECIPE = "int8"


@dataclass(frozen=True)
class Recipe:
    """A precision per role.  Norms and biases are always float32: they are small and every row uses them."""

    name: str
    default: Precision
    exceptions: Mapping[Role, Precision]

    def precision(self, role: Role) -> Precision:
        """The precision of a tensor with this role."""
        if role in VECTOR_ROLES:
            return FLOAT32
        return self.exceptions.get(role, self.default)


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("float32", FLOAT32, {}),
        Recipe("bfloat16", BFLOAT16, {}),
        Recipe("int8_weight_only", INT8_WEIGHT_ONLY, {}),
        Recipe("int8", INT8_ROTATED, {}),
        Recipe("int8_unrotated", INT8_PLAIN, {}),
        Recipe("mixed", INT8_ROTATED, dict.fromkeys(ATTENTION_ROLES, BFLOAT16)),
        Recipe("int4", INT4, {"embedding": INT8_ROTATED, "head": INT8_ROTATED}),
    )
}
RECIPE_NAMES: tuple[str, ...] = (*RECIPES, KEEP)


def recipe(name: str) -> Recipe:
    """The recipe called `name`; raises PrecisionError listing what exists.

    `keep` is not a recipe of this table: it takes each tensor's precision from the source file.
    """
    if name not in RECIPES:
        raise PrecisionError(f"no recipe is called {name!r}; recipes: {', '.join(RECIPE_NAMES)}")
    return RECIPES[name]
