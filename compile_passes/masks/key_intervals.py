"""Masks with which each query attends one interval of keys, such as documents in one row."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import sympy
import torch

from compile_passes.ir.axes import Axis
from compile_passes.ir.constants import constant_value
from compile_passes.ir.graph import Value, is_tensor, same_contents
from compile_passes.ir.vocabulary import LAYOUT
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
from compile_passes.match.states import Leaf

# Documents packed into one row, as models recognise them in position ids: a new document starts
# where the positions do not count on by one.
#
# `document = (positions.diff() != 1).cumsum(-1)` never decreases along the keys, so the keys of a
# document are an interval, and inside it positions differ as indices do.


def never_decreases(x: object) -> bool:
    """Whether the elements along the last dimension provably never decrease."""
    if not is_tensor(x) or x.writes or not x.shape:
        return False
    given = x.args.get("input")
    if x.op in ("cast", "copy"):
        same = x.dtype == torch.int64 or (is_tensor(given) and x.dtype == given.dtype)
        return same and never_decreases(given)
    return _counts_along_last(x) and _is_zero_or_one(given)


def _counts_along_last(x: Value) -> bool:
    """Whether x is a cumulative sum along its last dimension, in int64."""
    last = x.args.get("dim") in (-1, len(x.shape) - 1)
    return x.op == "cumsum" and not x.writes and last and x.dtype == torch.int64


def _is_zero_or_one(x: object) -> bool:
    if not is_tensor(x) or x.writes:
        return False
    return x.dtype == torch.bool or (x.op in LAYOUT and _is_zero_or_one(x.args.get("input")))


def with_indices_for_positions(keep: Condition) -> Condition:
    """The condition with indices in place of positions where both are of the same document."""
    if not isinstance(keep, All):
        return keep
    pairs = [(c, _compared(c)) for c in keep.conditions]
    ordered = [pair for c, pair in pairs if pair and c.a.constant == 0]
    documents = [(x, y) for x, y in ordered if (y, x) in ordered]
    numbered = [(pair, _positions_of(pair[0].value)) for pair in documents]
    found = [(pair, positions) for pair, positions in numbered if positions is not None]
    return all_of(*(_with_indices(c, found) for c in keep.conditions)) if found else keep


def _compared(c: Condition) -> tuple[Opaque, Opaque] | None:
    """(x, y) of the condition x <= y, or x + c <= y, of elements of one tensor."""
    if not isinstance(c, AtMost) or len(c.a.terms) != 2:
        return None
    by_sign = {sign: x for x, sign in c.a.terms}
    x, y = by_sign.get(1), by_sign.get(-1)
    if not isinstance(x, Opaque) or not isinstance(y, Opaque) or x.value is not y.value:
        return None
    return (x, y) if x.coordinates[:-1] == y.coordinates[:-1] else None


def _positions_of(document: object) -> Value | None:
    """The positions in `(positions.diff() != 1).cumsum(-1)`."""
    steps = document.args.get("input") if _counts_along_last(document) else None
    if not isinstance(steps, Value) or steps.op != "ne" or steps.writes:
        return None
    difference, one = steps.args.get("input"), steps.args.get("other")
    if constant_value(one) != 1 or not isinstance(difference, Value) or difference.op != "diff":
        return None
    first_order = difference.args.get("n", 1) == 1 and difference.args.get("append") is None
    if not first_order or difference.args.get("dim", -1) not in (-1, len(difference.shape) - 1):
        return None
    positions = difference.args.get("input")
    same = is_tensor(positions) and positions.shape == difference.shape
    return positions if same and positions.dtype == torch.int64 else None


def _with_indices(c: Condition, documents: list) -> Condition:
    pair = _compared(c)
    for (first, second), positions in documents if pair else ():
        x, y = pair
        rows = {first.coordinates, second.coordinates}
        if same_contents(x.value, positions) and {x.coordinates, y.coordinates} == rows:
            constant = Affine.from_size(c.a.constant)
            return at_most(x.coordinates[-1].plus(y.coordinates[-1], -1).plus(constant))
    return c


# Masks with which each query attends one interval of keys.
#
# A condition on the key j is an interval if its bounds on j do not depend on j: causal masks with
# an offset that is known only at run time, windows, chunks (i // c == j // c), prefixes, documents
# numbered by a cumulative sum.


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
