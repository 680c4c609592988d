"""What one element of a mask is, as an expression of its coordinates: integers that are affine in
them, and conditions on those.

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
    return n.node.expr if isinstance(n, SymInt) else sympy.Integer(n)


class Affine(NamedTuple):
    """constant + sum of coefficient * variable; variables are axes (their index) and opaque
    integers.
    """

    terms: frozenset[tuple[object, int]]
    constant: sympy.Expr

    @staticmethod
    def of(x: Size | sympy.Expr) -> Affine:
        return Affine(frozenset(), x if isinstance(x, sympy.Expr) else symbolic(x))

    @staticmethod
    def variable(x: object) -> Affine:
        return Affine(frozenset({(x, 1)}), sympy.Integer(0))

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        terms = dict(self.terms)
        for x, c in other.terms:
            terms[x] = terms.get(x, 0) + sign * c
        constant = sympy.expand(self.constant + sign * other.constant)
        return Affine(frozenset((x, c) for x, c in terms.items() if c), constant)

    def times(self, c: int) -> Affine:
        terms = frozenset((x, k * c) for x, k in self.terms) if c else frozenset()
        return Affine(terms, sympy.expand(self.constant * c))

    def is_constant(self) -> bool:
        return not self.terms

    def bound(self, highest: bool, reach: int = 2**64) -> sympy.Expr | None:
        """A bound on its values over all indices of the axes and all contents of tensors, which
        are taken to lie within `reach` of 0.
        """
        total = self.constant
        for x, c in self.terms:
            limit = _bound(x, (c > 0) == highest, reach)
            if limit is None:
                return None
            total += c * limit
        return sympy.expand(total)


def _bound(x: object, highest: bool, reach: int) -> sympy.Expr | None:
    if isinstance(x, Axis):
        return symbolic(x.size) - 1 if highest else sympy.Integer(0)
    if isinstance(x, Quotient):
        limit = x.a.bound(highest, reach)
        return None if limit is None else FloorDiv(limit, x.n)
    if isinstance(x, Opaque) and isinstance(x.value, Value):
        limits = torch.iinfo(x.value.dtype)
        return sympy.Integer(min(limits.max, reach) if highest else max(limits.min, -reach))
    return None


class Quotient(NamedTuple):
    """a // n, a variable of affine expressions"""

    a: Affine
    n: int


class Distance(NamedTuple):
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
    condition: object


class All(NamedTuple):
    conditions: frozenset


class Any(NamedTuple):
    conditions: frozenset


class Choice(NamedTuple):
    """`yes` where the condition holds, else `no`."""

    condition: object
    yes: object
    no: object


Condition = bool | AtMost | Not | All | Any | Opaque
Element = Affine | float | Distance | Choice | Condition


def order(x: object) -> str:
    """A key that sorts conditions and terms alike in every process; the repr of a set does not."""
    if isinstance(x, frozenset):
        return f"{{{', '.join(sorted(map(order, x)))}}}"
    if isinstance(x, tuple):
        return f"{type(x).__name__}({', '.join(map(order, x))})"
    return repr(x)


def at_most(a: Affine) -> Condition:
    """a <= 0, decided where the axes' sizes decide it."""
    highest, lowest = a.bound(True), a.bound(False)
    if highest is not None and highest.is_nonpositive:
        return True
    if lowest is not None and lowest.is_positive:
        return False
    return AtMost(a)


def negate(c: Condition) -> Condition:
    if isinstance(c, bool):
        return not c
    if isinstance(c, Not):
        return c.condition
    if isinstance(c, AtMost):  # not (a <= 0) is 1 - a <= 0
        return at_most(Affine.of(1).plus(c.a, -1))
    if isinstance(c, All):
        return any_of(*map(negate, c.conditions))
    if isinstance(c, Any):
        return all_of(*map(negate, c.conditions))
    return Not(c)


def all_of(*conditions: Condition) -> Condition:
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
    if isinstance(condition, bool):
        return yes if condition else no
    return _choice(condition, _given(condition, yes), _given(negate(condition), no))


def _choice(condition: Condition, yes: Element, no: Element) -> Element:
    if isinstance(yes, bool) and isinstance(no, bool):
        return yes if yes is no else condition if yes else negate(condition)
    return yes if yes == no and type(yes) is type(no) else Choice(condition, yes, no)


def _given(condition: Condition, x: Element) -> Element:
    """x where the condition is known to hold."""
    if not isinstance(x, Choice):
        return x
    if condition in (x.condition, negate(x.condition)):
        return _given(condition, x.yes if condition == x.condition else x.no)
    return _choice(x.condition, _given(condition, x.yes), _given(condition, x.no))
