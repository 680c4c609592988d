"""Softmax written by hand: exp and sum, log-sum-exp, log_softmax, division after the value product.

A row's maximum (or anything else that is one number per row) subtracted before exp changes nothing
once the row is divided by its sum, so it is only checked that the same shift stands on both sides.
"""

from __future__ import annotations

import dataclasses

from compile_passes.graph.axes import Group, Size, is_one, resolve, resolve_dims
from compile_passes.graph.constants import number
from compile_passes.graph.ir import Value
from compile_passes.match.match_state import (
    Core,
    Exps,
    Late,
    LogWeights,
    MatchedScores,
    MatchedWeights,
    RowStatistic,
    ShiftExp,
    State,
    Total,
)

NOT_KEYS = "the softmax runs over a batch or head dimension, or over several, not over the keys"


def objection(s: MatchedScores, keys: Group) -> str | None:
    """Why a softmax of these scores over the axes `keys` is none over keys: they have to belong to
    one of the product's operands alone, and what was subtracted to be one number along them.
    """
    real = set(resolve(keys))
    if s.shift and set(resolve(s.shift.keys)) != real:
        return "what is subtracted from them varies along the keys"
    if s.column:
        if real != set(resolve(s.dims[-1])):
            return NOT_KEYS
        real = set(resolve(s.keys_before))
    a, b = s.a.axes(), s.b.axes()
    return None if real and (real <= a - b or real <= b - a) else NOT_KEYS


def shift(value: Value, s: MatchedScores, r: RowStatistic) -> State | str:
    """scores - row"""
    aligned = resolve_dims(tuple(() if g == r.keys else g for g in resolve_dims(s.dims)))
    if r.scores is not s or r.negative or resolve_dims(r.dims) != aligned:
        return "a maximum of something else is subtracted from them"
    path = tuple(dict.fromkeys((*s.path, *r.path, value)))
    if r.lse:
        if wrong := objection(s, r.keys):
            return wrong
        weights = MatchedWeights(s.dims, path, s, value, r.keys)
        return LogWeights(s.dims, path, weights)
    if s.shift:
        return "they are shifted twice"
    return dataclasses.replace(s, shift=r, path=path)


def row_rule(value: Value, r: RowStatistic, name: str) -> State | str:
    if value.op == "neg":
        return r.then(value, negative=not r.negative)
    if value.op in ("clamp", "detach", "maximum"):
        if r.lse:
            return f"{value.op} is applied to their log-sum-exp"
        grown = len(value.shape) != len(r.dims) or not all(map(_has_size, r.dims, value.shape))
        return "their maximum is joined with a larger tensor" if grown else r.then(value)
    if value.op == "exp" and r.negative:
        return ShiftExp(r.dims, (*r.path, value), r)
    return f"{value.op} is applied to their row statistics"


def _has_size(group: Group, n: Size) -> bool:
    return bool(group) or is_one(n)


def exp_of_scores(value: Value, s: MatchedScores) -> State:
    return Exps(s.dims, (*s.path, value), s)


def total(value: Value, e: Exps) -> State | str:
    """Their sum over one dimension."""
    dim = value.args.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or not e.dims[dim]:
        return "their exponentials are summed over several dimensions"
    dims = list(resolve_dims(e.dims))
    keys = dims[dim]
    dims[dim] = ()
    if not value.args.get("keepdim"):
        del dims[dim]
    return Total(tuple(dims), (*e.path, value), e, keys)


def add_sink(value: Value, t: Total, x: object) -> State | str:
    """sum(exp(s - m)) + exp(-m), or + 1 where nothing was subtracted"""
    if t.zero_sink or value.op != "add":
        return "something is added to their sum"
    s = t.exps.scores
    if isinstance(x, ShiftExp) and x.row.negative and s.shift and _undone(x.row, s.shift):
        path = tuple(dict.fromkeys((*t.path, *x.path, value)))
        return dataclasses.replace(t, zero_sink=True, path=path)
    if number(x) == 1 and s.shift is None:
        return t.then(value, zero_sink=True)
    return "something is added to their sum"


def _undone(negated: RowStatistic, shifted: RowStatistic) -> bool:
    """Whether one is minus the other: the same node, negated once."""
    return negated.path[: len(shifted.path)] == shifted.path and len(negated.path) == (
        len(shifted.path) + 1
    )


def divide(value: Value, e: Exps, t: Total) -> State | str:
    """exps / total"""
    aligned = tuple(() if g == t.keys else g for g in resolve_dims(e.dims))
    alike = t.exps.scores is e.scores and t.exps.path[:-1] == e.path[:-1]  # exp may stand twice
    if not alike or resolve_dims(t.dims) != aligned:
        return "their exponentials are divided by another sum"
    if wrong := objection(e.scores, t.keys):
        return wrong
    path = tuple(dict.fromkeys((*e.path, *t.path, value)))
    return MatchedWeights(e.dims, path, e.scores, value, t.keys, zero_sink=t.zero_sink)


def divide_late(value: Value, late: Late, t: Total) -> Core | str:
    """(exps @ v) / total"""
    dims, under = resolve_dims(late.dims), resolve_dims(t.dims)
    under = ((),) * (len(dims) - len(under)) + under
    rows = [g for g in under if g]
    matching = all(u in ((), d) for u, d in zip(under, dims, strict=True))
    wanted = [g for g in dims if g and not set(g) & set(late.features)]
    if t.exps.path != late.exps.path or t.keys != late.keys or not matching or rows != wanted:
        return "the product with the value is divided by another sum"
    if wrong := objection(late.exps.scores, t.keys):
        return wrong
    path = tuple(dict.fromkeys((*late.path, *t.path)))
    weights = MatchedWeights(
        late.exps.dims, path, late.exps.scores, value, t.keys, zero_sink=t.zero_sink
    )
    return Core(weights, late.v, late.features, late.dims, value)
