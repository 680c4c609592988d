"""Rules for guards of rows without keys: weights are set to 0 where they are NaN, or where all
scores of the row are -inf. The operator gives 0 there.
"""

from __future__ import annotations

import math

from compile_passes.graph.axes import resolve, resolve_dims
from compile_passes.graph.constants import constant_value
from compile_passes.graph.ir import Value
from compile_passes.graph.vocabulary import raw_name
from compile_passes.match.alignment import other_operand, reduced
from compile_passes.match.match_state import (
    HiddenScores,
    MatchedScores,
    MatchedWeights,
    NanWeights,
    State,
)
from compile_passes.report import Refused


def hidden_scores(value: Value, s: MatchedScores, name: str) -> State:
    """scores == -inf"""
    if constant_value(other_operand(value, name)) != -math.inf:
        raise Refused("they are compared with something")
    return HiddenScores(s.dims, (*s.path, value), s)


def hidden_rule(value: Value, h: HiddenScores) -> State:
    """An operation on where scores are -inf."""
    if value.op == "not":
        return h.extend(value, inverted=not h.inverted)
    if value.op == ("any" if h.inverted else "all") and not h.keys:
        keys, dims = reduced(value, h.dims, f"{value.op} of several dimensions is read of them")
        return h.extend(value, dims=dims, keys=keys)
    raise Refused(f"{raw_name(value.node)} is applied to where they are -inf")


def kept_operand(value: Value, guard: NanWeights | HiddenScores) -> str:
    """The name of the operand that is kept where a guard does not hold."""
    if value.op == "masked_fill":
        return "input"
    return "input" if isinstance(guard, HiddenScores) and guard.inverted else "other"


def without_empty_rows(
    value: Value, w: MatchedWeights, guard: NanWeights | HiddenScores
) -> MatchedWeights:
    """Weights that are 0 where a guard says that their row has no keys."""
    kept = kept_operand(value, guard)
    filled = {"masked_fill": "value", "where": "other" if kept == "input" else "input"}[value.op]
    x = value.args.get(kept)
    same = isinstance(x, Value) and x is w.path[-1] and _is_of(guard, w)
    inverted_fill = value.op == "masked_fill" and getattr(guard, "inverted", False)
    if not same or inverted_fill or constant_value(value.args.get(filled)) != 0:
        raise Refused("they are filled where they, or others, are NaN or have no keys")
    return w.extend(value, path=tuple(dict.fromkeys((*w.path, *guard.path, value))))


def _is_of(guard: NanWeights | HiddenScores, w: MatchedWeights) -> bool:
    """Whether a guard is that of these weights."""
    if isinstance(guard, NanWeights):
        return guard.weights.path == w.path
    aligned = tuple(() if g == guard.keys else g for g in resolve_dims(w.dims))
    of_rows = resolve(guard.keys) == resolve(w.keys) and resolve_dims(guard.dims) == aligned
    return of_rows and guard.scores is w.scores
