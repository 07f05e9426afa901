"""Operations: what a plan is made of.  `standard` holds the built-in ones, `registry` takes more."""

from topg.ops.registry import Op, Workload, op_class, register, registered_kinds
from topg.ops.rope import Rope
from topg.ops.standard import (
    Activation,
    ActivationKind,
    Add,
    Attention,
    Embed,
    Gate,
    Linear,
    Logits,
    Norm,
    NormKind,
    Scale,
    SelectRows,
)

__all__ = [
    "Activation",
    "ActivationKind",
    "Add",
    "Attention",
    "Embed",
    "Gate",
    "Linear",
    "Logits",
    "Norm",
    "NormKind",
    "Op",
    "Rope",
    "Scale",
    "SelectRows",
    "Workload",
    "op_class",
    "register",
    "registered_kinds",
]
