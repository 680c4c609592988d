"""Expressions for one element of a mask in terms of its coordinates: integers that are affine in
them, and conditions on such integers.

A condition is True, False, `AtMost(a)` (a <= 0), `Not`, `All` or `Any` of conditions, or `Opaque`:
read from a tensor of unknown content.
"""

from __future__ import annotations

from typing import NamedTuple

import sympy
import torch
from torch import SymInt
from torch.utils._sympy.functions import FloorDiv

from compile_passes.graph.axes import Axis, Size
from compile_passes.graph.ir import Value


def symbolic(n: Size) -> sympy.Expr:
    """A size as a sympy expression."""
    return n.node.expr if isinstance(n, SymInt) else sympy.Integer(n)


class Affine(NamedTuple):
    """constant + sum of coefficient * variable, which is an axis, a Quotient or an Opaque."""

    terms: frozenset[tuple[object, int]]
    constant: sympy.Expr

    @staticmethod
    def from_size(x: Size | sympy.Expr) -> Affine:
        """A constant: a number, or an expression of sizes."""
        return Affine(frozenset(), x if isinstance(x, sympy.Expr) else symbolic(x))

    @staticmethod
    def variable(x: object) -> Affine:
        """A single variable with coefficient 1."""
        return Affine(frozenset({(x, 1)}), sympy.Integer(0))

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        """self + sign * other"""
        terms = dict(self.terms)
        for x, c in other.terms:
            terms[x] = terms.get(x, 0) + sign * c
        constant = sympy.expand(self.constant + sign * other.constant)
        return Affine(frozenset((x, c) for x, c in terms.items() if c), constant)

    def times(self, c: int) -> Affine:
        """c * self"""
        terms = frozenset((x, k * c) for x, k in self.terms) if c else frozenset()
        return Affine(terms, sympy.expand(self.constant * c))

    def is_constant(self) -> bool:
        """Whether it has no variables."""
        return not self.terms

    def bound(self, highest: bool, magnitude: int = 2**64) -> sympy.Expr | None:
        """An upper or lower bound over all indices of the axes and all contents of tensors, which
        are assumed to be at most `magnitude` in absolute value.
        """
        total = self.constant
        for x, c in self.terms:
            limit = _bound(x, (c > 0) == highest, magnitude)
            if limit is None:
                return None
            total += c * limit
        return sympy.expand(total)


def _bound(x: object, highest: bool, magnitude: int) -> sympy.Expr | None:
    if isinstance(x, Axis):
        return symbolic(x.size) - 1 if highest else sympy.Integer(0)
    if isinstance(x, Quotient):
        limit = x.a.bound(highest, magnitude)
        return None if limit is None else FloorDiv(limit, x.n)
    if isinstance(x, Opaque) and isinstance(x.value, Value):
        limits = torch.iinfo(x.value.dtype)
        return sympy.Integer(min(limits.max, magnitude) if highest else max(limits.min, -magnitude))
    return None


class Quotient(NamedTuple):
    """a // n"""

    a: Affine
    n: int


class Rank(NamedTuple):
    """How many elements along the keys of a tensor that never decreases are less than `target`, or
    with `inclusive` at most that. The tensor is given by its element at a key.
    """

    element: Opaque
    target: Affine
    inclusive: bool


class AbsoluteValue(NamedTuple):
    """|a|"""

    a: Affine


class AtMost(NamedTuple):
    """a <= 0"""

    a: Affine


class Opaque(NamedTuple):
    """The element of a tensor at some coordinates."""

    value: object
    coordinates: tuple


class Not(NamedTuple):
    """The negation of an opaque condition."""

    condition: object


class All(NamedTuple):
    """The conjunction of conditions."""

    conditions: frozenset


class Any(NamedTuple):
    """The disjunction of conditions."""

    conditions: frozenset


class Choice(NamedTuple):
    """`yes` where the condition holds, `no` elsewhere."""

    condition: object
    yes: object
    no: object


Condition = bool | AtMost | Not | All | Any | Opaque
Element = Affine | float | AbsoluteValue | Choice | Condition
Coordinates = tuple[Affine, ...]


def reads_tensors(x: object) -> bool:
    """Whether an element depends on the content of a tensor."""
    nested = isinstance(x, (tuple, frozenset))
    return isinstance(x, Opaque) or (nested and any(map(reads_tensors, x)))


def sort_key(x: object) -> str:
    """A key that sorts conditions and terms in the same order in every process."""
    if isinstance(x, frozenset):
        return f"{{{', '.join(sorted(map(sort_key, x)))}}}"
    if isinstance(x, tuple):
        return f"{type(x).__name__}({', '.join(map(sort_key, x))})"
    return repr(x)


def at_most(a: Affine) -> Condition:
    """a <= 0, as True or False where the sizes of the axes decide it."""
    highest, lowest = a.bound(True), a.bound(False)
    if highest is not None and highest.is_nonpositive:
        return True
    if lowest is not None and lowest.is_positive:
        return False
    return AtMost(a)


def negate(c: Condition) -> Condition:
    """not c"""
    if isinstance(c, bool):
        return not c
    if isinstance(c, Not):
        return c.condition
    if isinstance(c, AtMost):  # not (a <= 0) is 1 - a <= 0
        return at_most(Affine.from_size(1).plus(c.a, -1))
    if isinstance(c, All):
        return any_of(*map(negate, c.conditions))
    if isinstance(c, Any):
        return all_of(*map(negate, c.conditions))
    return Not(c)


def all_of(*conditions: Condition) -> Condition:
    """The conjunction, simplified."""
    found: set = set()
    for c in conditions:
        if c is False:
            return False
        if c is not True:
            found |= c.conditions if isinstance(c, All) else {c}
    if any(negate(c) in found for c in found if isinstance(c, (Opaque, Not))):
        return False
    return next(iter(found)) if len(found) == 1 else (All(frozenset(found)) if found else True)


def any_of(*conditions: Condition) -> Condition:
    """The disjunction, simplified."""
    found: set = set()
    for c in conditions:
        if c is True:
            return True
        if c is not False:
            found |= c.conditions if isinstance(c, Any) else {c}
    if len(found) == 1:
        return next(iter(found))
    return Any(frozenset(found)) if found else False


def choose(condition: Condition, yes: Element, no: Element) -> Element:
    """`yes` where the condition holds, `no` elsewhere, simplified."""
    if isinstance(condition, bool):
        return yes if condition else no
    return _choice(condition, _assume(condition, yes), _assume(negate(condition), no))


def _choice(condition: Condition, yes: Element, no: Element) -> Element:
    if isinstance(yes, bool) and isinstance(no, bool):
        return yes if yes is no else condition if yes else negate(condition)
    return yes if yes == no and type(yes) is type(no) else Choice(condition, yes, no)


def _assume(condition: Condition, x: Element) -> Element:
    """x, simplified where the condition holds."""
    if not isinstance(x, Choice):
        return x
    if condition in (x.condition, negate(x.condition)):
        return _assume(condition, x.yes if condition == x.condition else x.no)
    return _choice(x.condition, _assume(condition, x.yes), _assume(condition, x.no))
