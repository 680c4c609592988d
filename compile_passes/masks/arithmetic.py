"""Arithmetic on mask elements as tensors of a dtype do it: exact, or None where a result could be
rounded or wrap around.
"""

from __future__ import annotations

import math

import sympy
import torch

from compile_passes.graph.constants import held, rounded
from compile_passes.masks.affine import (
    Affine,
    Choice,
    Condition,
    Distance,
    Element,
    Opaque,
    all_of,
    any_of,
    at_most,
    choose,
    negate,
)
from compile_passes.masks.exactness import Exactness

ZERO, ONE = Affine.of(0), Affine.of(1)


def plain(x: bool | int | float) -> Element:
    if isinstance(x, bool) or (isinstance(x, float) and not x.is_integer()):
        return x
    return Affine.of(int(x))


def as_number(x: Element) -> float | None:
    if isinstance(x, float):
        return x
    fixed = isinstance(x, Affine) and x.is_constant() and isinstance(x.constant, sympy.Integer)
    return int(x.constant) if fixed else None


def is_condition(x: Element) -> bool:
    return not isinstance(x, (Affine, float, Distance, Choice)) or isinstance(x, bool)


def converted(x: Element | None, dtype: torch.dtype, exact: Exactness) -> Element | None:
    """x in another dtype; None where integers could be rounded or wrap around."""
    if x is None:
        return None
    if dtype == torch.bool:
        return x if is_condition(x) else compared("ne", x, ZERO)
    if isinstance(x, Opaque):
        return None
    if is_condition(x):
        return choose(x, ONE, ZERO)
    if isinstance(x, Choice):
        yes, no = (converted(y, dtype, exact) for y in (x.yes, x.no))
        return None if yes is None or no is None else choose(x.condition, yes, no)
    known = as_number(x)
    if known is not None:
        constant = rounded(known, dtype) if dtype.is_floating_point else held(known, dtype)
        fits = constant is not None and (dtype.is_floating_point or constant == known)
        return plain(constant) if fits else None
    parts = (x.a, ZERO.plus(x.a, -1)) if isinstance(x, Distance) else (x,)
    return x if all(exact.holds(part, dtype) for part in parts) else None


def combined(op: str, a: Element | None, b: Element | None) -> Element | None:
    """a + b, a - b or a * b, in exact numbers."""
    if a is None or b is None:
        return None
    for x, y, flip in ((a, b, False), (b, a, True)):
        if isinstance(x, Choice):
            yes, no = (combined(op, *((y, z) if flip else (z, y))) for z in (x.yes, x.no))
            return None if yes is None or no is None else choose(x.condition, yes, no)
    if isinstance(a, Affine) and isinstance(b, Affine):
        if op != "mul":
            return a.plus(b, 1 if op == "add" else -1)
        for x, y in ((a, b), (b, a)):
            if x.is_constant() and isinstance(x.constant, sympy.Integer):
                return y.times(int(x.constant))
        return None
    x, y = as_number(a), as_number(b)
    if x is None or y is None:
        return None
    result = float(x + y if op == "add" else x - y if op == "sub" else x * y)
    return None if math.isnan(result) else plain(result)


def compared(op: str, a: Element, b: Element) -> Condition | None:
    if op in ("gt", "ge"):
        op, a, b = {"gt": "lt", "ge": "le"}[op], b, a
    for x, y, flip in ((a, b, False), (b, a, True)):
        if isinstance(x, Choice):
            yes, no = (compared(op, *((y, z) if flip else (z, y))) for z in (x.yes, x.no))
            if yes is None or no is None:
                return None
            return any_of(all_of(x.condition, yes), all_of(negate(x.condition), no))
    if op == "ne":
        equal = compared("eq", a, b)
        return None if equal is None else negate(equal)
    if isinstance(a, Affine) and isinstance(b, Distance) and op in ("le", "lt"):
        above = compared("lt" if op == "le" else "le", b, a)
        return None if above is None else negate(above)
    if isinstance(a, Distance) and isinstance(b, Affine) and op in ("le", "lt"):
        return all_of(compared(op, a.a, b), compared(op, ZERO.plus(a.a, -1), b))
    if isinstance(a, Affine) and isinstance(b, Affine):
        if op == "eq":
            return all_of(at_most(a.plus(b, -1)), at_most(b.plus(a, -1)))
        return at_most(a.plus(b, -1).plus(Affine.of(1 if op == "lt" else 0)))
    return _compared_numbers(op, as_number(a), as_number(b))


def _compared_numbers(op: str, x: float | None, y: float | None) -> Condition | None:
    """Fractions that nearly agree may be results of functions that differ in their last bits."""
    if x is None or y is None or (x != y and math.isclose(x, y, rel_tol=1e-5)):
        return None
    return {"eq": x == y, "le": x <= y, "lt": x < y}[op]
