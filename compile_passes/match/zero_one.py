"""Masks written as arithmetic with tensors of 0 and 1: scores * b + c * (1 - b)."""

from __future__ import annotations

import torch

from compile_passes.ir.axes import sizes_equal
from compile_passes.ir.constants import constant_value, guarded_constant
from compile_passes.ir.graph import Value, is_tensor, same_contents
from compile_passes.ir.vocabulary import LAYOUT
from compile_passes.match.match_state import Leaf


def is_zero_or_one(x: object, depth: int = 12) -> bool:
    """Whether every element of a tensor is provably 0 or 1."""
    if not is_tensor(x) or depth == 0 or x.dtype.is_complex:
        return constant_value(x) in (0, 1)
    if x.dtype == torch.bool or constant_value(x) in (0, 1):
        return True
    if x.writes:
        return False
    given = x.args.get("input")
    if x.op in (*LAYOUT, "tril", "triu"):
        return is_tensor(given) and is_zero_or_one(given, depth - 1)
    other = x.args.get("other")
    if x.op == "sub" and constant_value(x.args.get("alpha", 1)) == 1:
        return constant_value(given) == 1 and is_zero_or_one(other, depth - 1)
    if x.op in ("mul", "where"):
        return is_zero_or_one(given, depth - 1) and is_zero_or_one(other, depth - 1)
    return False


def without_cast(leaf: Leaf) -> Leaf:
    """A mask of 0 and 1 before it was cast from bool."""
    x = leaf.value
    if isinstance(x, Value) and x.op == "cast" and not x.writes:
        inner = x.args.get("input")
        if is_tensor(inner) and inner.dtype == torch.bool:
            return Leaf(inner, leaf.dims)
    return leaf


def number_beside_zeros(x: object, factor: Value) -> float | None:
    """The number c if x = c * (1 - factor), which is added to scores that were multiplied by the
    factor; None if it is something else.
    """
    if not is_tensor(x) or len(x.shape) != len(factor.shape):
        return None
    if not all(sizes_equal(m, n) for m, n in zip(x.shape, factor.shape, strict=True)):
        return None
    line = _line(x, factor)
    return line[0] if line and line[0] + line[1] == 0 else None


def _line(x: object, b: object, depth: int = 8) -> tuple[float, float] | None:
    """(c, d) if x = c + d * b with numbers c and d."""
    if depth == 0:
        return None
    known = guarded_constant(x)
    if known is not None:
        return float(known), 0.0
    if not is_tensor(x):
        return None
    if same_contents(x, b):
        return 0.0, 1.0
    if x.writes or constant_value(x.args.get("alpha", 1)) != 1:
        return None
    if x.op in ("cast", "copy"):
        return _line(x.args.get("input"), b, depth - 1)
    if x.op == "neg":
        line = _line(x.args.get("input"), b, depth - 1)
        return line and (-line[0], -line[1])
    if x.op not in ("add", "sub", "mul"):
        return None
    lines = [_line(x.args.get(name), b, depth - 1) for name in ("input", "other")]
    if None in lines:
        return None
    (c, d), (e, f) = lines
    if x.op == "mul":
        return (c * e, c * f + d * e) if 0.0 in (d, f) else None
    return (c + e, d + f) if x.op == "add" else (c - e, d - f)
