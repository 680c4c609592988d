"""Expressions for one element of a mask, and proofs and arithmetic that are exact in its dtype."""

from __future__ import annotations

import math
from typing import NamedTuple

import sympy
import torch
from torch import SymInt, fx
from torch._dynamo.source import TensorPropertySource
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from compile_passes.ir.axes import Axis, Size
from compile_passes.ir.constants import round_to, stored_value
from compile_passes.ir.graph import Value, example, meta_key

# Expressions for one element of a mask in terms of its coordinates: integers that are affine in
# them, and conditions on such integers.
#
# A condition is True, False, `AtMost(a)` (a <= 0), `Not`, `All` or `Any` of conditions, or
# `Opaque`: read from a tensor of unknown content.


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


# Proofs that integer expressions are exact in a dtype, whatever the symbolic sizes are.

MAX_SIZE = 2**48  # of a dimension: no memory holds a larger tensor
UNBOUNDED = 2**62  # a range with a higher upper limit is torch's default, not declared
MAX_OFFSET = 2**61  # assumed limit of a tensor's integer that is added to a position
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def exact_range(dtype: torch.dtype) -> tuple[int, int] | None:
    """The lowest and highest of the consecutive integers that a dtype represents exactly."""
    if dtype in _FLOATS:
        limit = round(2 / torch.finfo(dtype).eps)
        return -limit, limit
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


class Exactness:
    """Proves that an affine expression is exact in a dtype, by interval arithmetic over the sizes.

    A position plus a tensor's integer is assumed not to overflow int64, which torch leaves
    undefined. Where a size has no known upper bound, in Dynamo's graphs its current value decides
    and a guard recompiles for larger ones; exported programs have no guards and need a proof.
    """

    def __init__(self, graph: fx.Graph) -> None:
        modes = (getattr(example(node), "fake_mode", None) for node in graph.nodes)
        self._env = next((m.shape_env for m in modes if m is not None and m.shape_env), None)
        self._may_guard = meta_key(graph) == "example_value"
        self._declared = dict(self._env.var_to_range) if self._env else {}
        self._known: dict[tuple[sympy.Expr, int], bool] = {}
        self.refused: list[torch.dtype] = []

    def is_exact(self, a: Affine, dtype: torch.dtype) -> bool:
        """Whether the dtype holds every value of the expression; a failure adds to `refused`."""
        positions = dtype == torch.int64 and any(isinstance(x, Axis) for x, _ in a.terms)
        magnitude = MAX_OFFSET if positions else 2**64
        limits, low, high = exact_range(dtype), a.bound(False, magnitude), a.bound(True, magnitude)
        known = limits is not None and low is not None and high is not None
        if known and self._at_most(high, limits[1]) and self._at_most(-low, -limits[0]):
            return True
        self.refused.append(dtype)
        return False

    def _at_most(self, expr: sympy.Expr, limit: int) -> bool:
        if expr.is_number:
            return bool(expr <= limit)
        if (expr, limit) not in self._known:
            self._known[expr, limit] = self._env is not None and self._proved(expr, limit)
        return self._known[expr, limit]

    def _proved(self, expr: sympy.Expr, limit: int) -> bool:
        ranges = {s: self._range(s) for s in expr.free_symbols}
        if bound_sympy(expr, ranges).upper <= limit:
            return True
        return all(map(self._may_narrow, expr.free_symbols)) and self._guarded(expr, limit)

    def _range(self, symbol: sympy.Symbol) -> ValueRanges:
        """The range of a symbol; the size of a tensor is limited by memory."""
        fits = ValueRanges(0, MAX_SIZE) if self._is_size(symbol) else ValueRanges.unknown_int()
        return self._env.var_to_range.get(symbol, ValueRanges.unknown_int()) & fits

    def _is_size(self, symbol: sympy.Symbol) -> bool:
        sources = self._env.var_to_sources.get(symbol, ())
        return any(isinstance(source, TensorPropertySource) for source in sources)

    def _may_narrow(self, symbol: sympy.Symbol) -> bool:
        """Whether a guard may narrow the range: torch raises if the user has declared it."""
        known = self._declared.get(symbol)
        unbounded = known is not None and known.upper >= UNBOUNDED
        return self._may_guard and (unbounded or not self._is_size(symbol))

    def _guarded(self, expr: sympy.Expr, limit: int) -> bool:
        size = self._env.create_symintnode(expr, hint=None)
        return size.node.has_hint() and size.node.hint <= limit and guard_or_false(size <= limit)


# Exact arithmetic on mask elements; None where a tensor's dtype could round the result or wrap it
# around.

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
