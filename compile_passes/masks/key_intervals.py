"""Masks that let each query attend one interval of keys.

A condition on the key j is an interval if it bounds j from below and above by what does not depend
on j: causal with an offset that is only known at run time, windows, chunks (i // c == j // c),
prefixes.
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
    all_of,
    any_of,
    at_most,
    order,
    symbolic,
)
from compile_passes.match.match_state import Leaf


class Extreme(NamedTuple):
    """The greatest or the least of several bounds."""

    greatest: bool
    bounds: tuple


Bound = Affine | Extreme


@dataclasses.dataclass(frozen=True)
class KeyInterval:
    """low <= j < high; None: the first or the last key. `leaf` is the mask that it stands for."""

    low: Bound | None
    high: Bound | None
    leaf: Leaf | None = None


def key_interval(keep: Condition, j: Axis) -> KeyInterval | None:
    """The interval of keys that a condition keeps; None if it is not known to be one."""
    if keep is True:
        return KeyInterval(None, None)
    if isinstance(keep, AtMost):
        return _literal(keep.a, j)
    if not isinstance(keep, (All, Any)):
        return None
    intervals = [key_interval(c, j) for c in sorted(keep.conditions, key=order)]
    if None in intervals:
        return None
    lows = [r.low for r in intervals if r.low is not None]
    highs = [r.high for r in intervals if r.high is not None]
    if isinstance(keep, All):
        return KeyInterval(_extreme(True, lows), _extreme(False, highs))
    if lows and highs:
        return None
    return KeyInterval(_extreme(False, lows), _extreme(True, highs))  # of intervals that end alike


def _extreme(greatest: bool, bounds: list[Bound]) -> Bound | None:
    if len(bounds) < 2:
        return bounds[0] if bounds else None
    return Extreme(greatest, tuple(bounds))


def _literal(a: Affine, j: Axis) -> KeyInterval | None:
    """c * j + rest <= 0, or c * (j // n) + rest <= 0, for c = 1 and -1."""
    ours = [(x, c) for x, c in a.terms if _depends(x, j)]
    if len(ours) != 1 or abs(ours[0][1]) != 1:
        return None
    ((x, c),) = ours
    rest = a.plus(Affine.variable(x).times(c), -1)
    shift, n = Affine.of(0), 1
    if isinstance(x, Quotient):
        shift, n = x.a.plus(Affine.variable(j), -1), x.n
        if any(_depends(y, j) for y, _ in shift.terms):
            return None
    elif x is not j:
        return None
    if c > 0:  # (j + shift) // n <= -rest
        return KeyInterval(None, Affine.of(1).plus(rest, -1).times(n).plus(shift, -1))
    return KeyInterval(rest.times(n).plus(shift, -1), None)


def _depends(x: object, j: Axis) -> bool:
    if isinstance(x, Quotient):
        return any(_depends(y, j) for y, _ in x.a.terms)
    if isinstance(x, Opaque):
        return any(_depends(y, j) for at in x.coordinates for y, _ in at.terms)
    return x is j


def attends_itself(keep: Condition, i: Axis | None, j: Axis) -> bool:
    """Whether each query keeps the key on its own place, of which there is one."""
    if i is None:
        return False
    surplus = sympy.expand(symbolic(j.size) - symbolic(i.size))
    place = Affine.variable(i).plus(Affine.of(surplus))
    return bool(surplus.is_nonnegative) and _at(keep, j, place) is True


def _at(c: Condition, j: Axis, place: Affine) -> Condition:
    """The condition where the key is `place`."""
    if isinstance(c, (All, Any)):
        join = all_of if isinstance(c, All) else any_of
        return join(*(_at(x, j, place) for x in c.conditions))
    return at_most(_put(c.a, j, place)) if isinstance(c, AtMost) else c


def _put(a: Affine, j: Axis, place: Affine) -> Affine:
    result = Affine.of(a.constant)
    for x, c in a.terms:
        if isinstance(x, Quotient):
            x = Affine.variable(Quotient(_put(x.a, j, place), x.n))
        else:
            x = place if x is j else Affine.variable(x)
        result = result.plus(x.times(c))
    return result
