"""Masks with which each query attends one interval of keys.

A condition on the key j is an interval if its bounds on j do not depend on j: causal masks with an
offset that is known only at run time, windows, chunks (i // c == j // c), prefixes, documents
numbered by a cumulative sum.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import sympy

from compile_passes.graph.axes import Axis
from compile_passes.masks.affine import (
    Affine,
    All,
    Any,
    AtMost,
    Condition,
    Opaque,
    Quotient,
    Rank,
    all_of,
    any_of,
    at_most,
    sort_key,
    symbolic,
)
from compile_passes.masks.documents import never_decreases
from compile_passes.match.match_state import Leaf


class Extreme(NamedTuple):
    """The maximum or minimum of several bounds."""

    is_max: bool
    bounds: tuple


Bound = Affine | Extreme


@dataclasses.dataclass(frozen=True)
class KeyInterval:
    """low <= j < high, unbounded where None. `leaf` is the mask that it replaces."""

    low: Bound | None
    high: Bound | None
    leaf: Leaf | None = None


def key_interval(keep: Condition, j: Axis) -> KeyInterval | None:
    """The interval of keys that a condition keeps; None if it is not provably one."""
    if keep is True:
        return KeyInterval(None, None)
    if isinstance(keep, AtMost):
        return _inequality_interval(keep.a, j)
    if not isinstance(keep, (All, Any)):
        return None
    intervals = [key_interval(c, j) for c in sorted(keep.conditions, key=sort_key)]
    if None in intervals:
        return None
    lows = [r.low for r in intervals if r.low is not None]
    highs = [r.high for r in intervals if r.high is not None]
    if isinstance(keep, All):
        return KeyInterval(_extreme(True, lows), _extreme(False, highs))
    if lows and highs:
        return None
    return KeyInterval(_extreme(False, lows), _extreme(True, highs))  # all unbounded on one side


def _extreme(is_max: bool, bounds: list[Bound]) -> Bound | None:
    if len(bounds) < 2:
        return bounds[0] if bounds else None
    return Extreme(is_max, tuple(bounds))


def _inequality_interval(a: Affine, j: Axis) -> KeyInterval | None:
    """The keys at which a <= 0.

    a is c * j + rest, or c * ((j + shift) // n) + rest, with c = 1 or -1.
    """
    terms = [(x, c) for x, c in a.terms if _depends(x, j)]
    if len(terms) != 1 or abs(terms[0][1]) != 1:
        return None
    ((x, c),) = terms
    rest = a.plus(Affine.variable(x).times(c), -1)
    shift, n = Affine.from_size(0), 1
    if isinstance(x, Opaque):
        return _sorted_interval(x, c, rest, j)
    if isinstance(x, Quotient):
        shift, n = x.a.plus(Affine.variable(j), -1), x.n
        if any(_depends(y, j) for y, _ in shift.terms):
            return None
    elif x is not j:
        return None
    if c > 0:  # (j + shift) // n <= -rest
        return KeyInterval(None, Affine.from_size(1).plus(rest, -1).times(n).plus(shift, -1))
    return KeyInterval(rest.times(n).plus(shift, -1), None)


def _sorted_interval(x: Opaque, c: int, rest: Affine, j: Axis) -> KeyInterval | None:
    """The keys at which x[..., j] <= -rest, or >= rest if c = -1, for a sorted tensor."""
    *others, last = x.coordinates
    if last != Affine.variable(j) or any(_depends(y, j) for at in others for y, _ in at.terms):
        return None
    if not never_decreases(x.value):
        return None
    if c > 0:
        return KeyInterval(None, Affine.variable(Rank(x, Affine.from_size(0).plus(rest, -1), True)))
    return KeyInterval(Affine.variable(Rank(x, rest, False)), None)


def _depends(x: object, j: Axis) -> bool:
    if isinstance(x, Quotient):
        return any(_depends(y, j) for y, _ in x.a.terms)
    if isinstance(x, Opaque):
        return any(_depends(y, j) for at in x.coordinates for y, _ in at.terms)
    return x is j


def attends_itself(keep: Condition, i: Axis | None, j: Axis) -> bool:
    """Whether each query provably keeps the key at its own position, and that key exists."""
    if i is None:
        return False
    surplus = sympy.expand(symbolic(j.size) - symbolic(i.size))
    position = Affine.variable(i).plus(Affine.from_size(surplus))
    return bool(surplus.is_nonnegative) and _at(keep, j, position) is True


def _at(c: Condition, j: Axis, position: Affine) -> Condition:
    """The condition for the key at `position`."""
    if isinstance(c, (All, Any)):
        join = all_of if isinstance(c, All) else any_of
        return join(*(_at(x, j, position) for x in c.conditions))
    return at_most(_substitute(c.a, j, position)) if isinstance(c, AtMost) else c


def _substitute(a: Affine, j: Axis, position: Affine) -> Affine:
    result = Affine.from_size(a.constant)
    for x, c in a.terms:
        if isinstance(x, Quotient):
            x = Affine.variable(Quotient(_substitute(x.a, j, position), x.n))
        elif isinstance(x, Opaque):
            at = tuple(_substitute(y, j, position) for y in x.coordinates)
            x = Affine.variable(Opaque(x.value, at))
        else:
            x = position if x is j else Affine.variable(x)
        result = result.plus(x.times(c))
    return result
