"""Precision: how weights are stored, what they are multiplied with, and how one becomes the other.

    formats       a tensor's precision and the arrays it is stored as
    recipes       a precision per role of a tensor
    quantise      float32 to stored arrays and back
    scale_search  better scales for 4-bit groups
    rotation      the Walsh-Hadamard transform of rotated weights
    gguf_blocks   GGUF tensors kept bit for bit
    storage       number formats and packed nibbles as numpy arrays
    bfloat16      bfloat16 as bit patterns

What is re-exported here needs no numpy, so that listing recipes stays fast.
"""

from __future__ import annotations

from topg.precision.formats import Part, Precision
from topg.precision.recipes import DEFAULT_RECIPE, KEEP, RECIPE_NAMES, Recipe, Role, recipe

__all__ = ["DEFAULT_RECIPE", "KEEP", "RECIPE_NAMES", "Part", "Precision", "Recipe", "Role", "recipe"]
