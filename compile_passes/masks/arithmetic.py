"""Exact arithmetic on mask elements; None where a tensor's dtype could round the result or wrap it
around.
"""

from __future__ import annotations

import math

import sympy
import torch

from compile_passes.graph.constants import round_to, stored_value
from compile_passes.masks.affine import (
    AbsoluteValue,
    Affine,
    Choice,
    Condition,
    Element,
    Opaque,
    all_of,
    any_of,
    at_most,
    choose,
    negate,
)
from compile_passes.masks.exactness import Exactness

ZERO, ONE = Affine.from_size(0), Affine.from_size(1)


def literal(x: bool | int | float) -> Element:
    """A number as an element."""
    if isinstance(x, bool) or (isinstance(x, float) and not x.is_integer()):
        return x
    return Affine.from_size(int(x))


def as_number(x: Element) -> float | None:
    """The number that an element is, or None."""
    if isinstance(x, float):
        return x
    fixed = isinstance(x, Affine) and x.is_constant() and isinstance(x.constant, sympy.Integer)
    return int(x.constant) if fixed else None


def is_condition(x: Element) -> bool:
    """Whether an element is boolean."""
    return not isinstance(x, (Affine, float, AbsoluteValue, Choice)) or isinstance(x, bool)


def convert(x: Element | None, dtype: torch.dtype, exact: Exactness) -> Element | None:
    """x in another dtype; None where integers could be rounded or wrap around."""
    if x is None:
        return None
    if dtype == torch.bool:
        return x if is_condition(x) else compare("ne", x, ZERO)
    if isinstance(x, Opaque):
        return None
    if is_condition(x):
        return choose(x, ONE, ZERO)
    if isinstance(x, Choice):
        yes, no = (convert(y, dtype, exact) for y in (x.yes, x.no))
        return None if yes is None or no is None else choose(x.condition, yes, no)
    known = as_number(x)
    if known is not None:
        constant = round_to(known, dtype) if dtype.is_floating_point else stored_value(known, dtype)
        fits = constant is not None and (dtype.is_floating_point or constant == known)
        return literal(constant) if fits else None
    parts = (x.a, ZERO.plus(x.a, -1)) if isinstance(x, AbsoluteValue) else (x,)
    return x if all(exact.is_exact(part, dtype) for part in parts) else None


def combine(op: str, a: Element | None, b: Element | None) -> Element | None:
    """a + b, a - b or a * b, exactly; None where the result is not an element."""
    if a is None or b is None:
        return None
    for x, y, flip in ((a, b, False), (b, a, True)):
        if isinstance(x, Choice):
            yes, no = (combine(op, *((y, z) if flip else (z, y))) for z in (x.yes, x.no))
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
    return None if math.isnan(result) else literal(result)


def compare(op: str, a: Element, b: Element) -> Condition | None:
    """a op b for the comparisons eq, ne, lt, le, gt and ge; None where it cannot be expressed."""
    if op in ("gt", "ge"):
        op, a, b = {"gt": "lt", "ge": "le"}[op], b, a
    for x, y, flip in ((a, b, False), (b, a, True)):
        if isinstance(x, Choice):
            yes, no = (compare(op, *((y, z) if flip else (z, y))) for z in (x.yes, x.no))
            if yes is None or no is None:
                return None
            return any_of(all_of(x.condition, yes), all_of(negate(x.condition), no))
    if op == "ne":
        equal = compare("eq", a, b)
        return None if equal is None else negate(equal)
    if isinstance(a, Affine) and isinstance(b, AbsoluteValue) and op in ("le", "lt"):
        above = compare("lt" if op == "le" else "le", b, a)
        return None if above is None else negate(above)
    if isinstance(a, AbsoluteValue) and isinstance(b, Affine) and op in ("le", "lt"):
        return all_of(compare(op, a.a, b), compare(op, ZERO.plus(a.a, -1), b))
    if isinstance(a, Affine) and isinstance(b, Affine):
        if op == "eq":
            return all_of(at_most(a.plus(b, -1)), at_most(b.plus(a, -1)))
        return at_most(a.plus(b, -1).plus(Affine.from_size(1 if op == "lt" else 0)))
    return _compare_numbers(op, as_number(a), as_number(b))


def _compare_numbers(op: str, x: float | None, y: float | None) -> Condition | None:
    # fractions that nearly agree may be the results of functions that round differently
    if x is None or y is None or (x != y and math.isclose(x, y, rel_tol=1e-5)):
        return None
    return {"eq": x == y, "le": x <= y, "lt": x < y}[op]
