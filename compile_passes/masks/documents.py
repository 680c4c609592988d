"""Documents packed into one row, as models recognise them in position ids: a new document starts
where the positions do not count on by one.

`document = (positions.diff() != 1).cumsum(-1)` never decreases along the keys, so the keys of a
document are an interval, and inside it positions differ as indices do.
"""

from __future__ import annotations

import torch

from compile_passes.graph.constants import constant_value
from compile_passes.graph.ir import Value, is_tensor, same_contents
from compile_passes.graph.vocabulary import LAYOUT
from compile_passes.masks.affine import Affine, All, AtMost, Condition, Opaque, all_of, at_most


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
