"""Rules for softmax written by hand: exp and sum, log-sum-exp, log_softmax, division after the
value product. In reasons, "they" are the scores.

Subtracting a row's maximum, or any other number per row, before exp changes nothing once the row is
divided by its sum, so it is only checked that numerator and denominator are shifted alike.
"""

from __future__ import annotations

import dataclasses

from compile_passes.graph.axes import Group, Size, is_one, resolve, resolve_dims
from compile_passes.graph.constants import constant_value
from compile_passes.graph.ir import Value
from compile_passes.match.alignment import reduced
from compile_passes.match.match_state import (
    Core,
    ExpSum,
    LogWeights,
    MatchedScores,
    MatchedWeights,
    RowStatistic,
    ScoreExps,
    ShiftExp,
    State,
    UnnormalizedOutput,
)

NOT_KEYS = "the softmax runs over a batch or head dimension, or over several, not over the keys"


def why_not_over_keys(s: MatchedScores, keys: Group) -> str | None:
    """The reason why `keys` are not the key axes of these scores, if so: key axes belong to one of
    the product's operands alone, and what was subtracted from the scores is constant along them.
    """
    real = set(resolve(keys))
    if s.shift and set(resolve(s.shift.keys)) != real:
        return "what is subtracted from them varies along the keys"
    if s.sink:
        if real != set(resolve(s.dims[-1])):
            return NOT_KEYS
        real = set(resolve(s.keys_without_sink))
    a, b = s.a.axes(), s.b.axes()
    return None if real and (real <= a - b or real <= b - a) else NOT_KEYS


def subtract_row(value: Value, s: MatchedScores, r: RowStatistic) -> State | str:
    """scores - row statistic"""
    aligned = resolve_dims(tuple(() if g == r.keys else g for g in resolve_dims(s.dims)))
    if r.scores is not s or r.negative or resolve_dims(r.dims) != aligned:
        return "the maximum of something else is subtracted from them"
    path = tuple(dict.fromkeys((*s.path, *r.path, value)))
    if r.lse:
        if wrong := why_not_over_keys(s, r.keys):
            return wrong
        weights = MatchedWeights(s.dims, path, s, value, r.keys)
        return LogWeights(s.dims, path, weights)
    if s.shift:
        return "they are shifted twice"
    return dataclasses.replace(s, shift=r, path=path)


def row_rule(value: Value, r: RowStatistic, name: str) -> State | str:
    """An operation on a row statistic."""
    if value.op == "neg":
        return r.extend(value, negative=not r.negative)
    if value.op in ("clamp", "detach", "maximum"):
        if r.lse:
            return f"{value.op} is applied to their log-sum-exp"
        grown = len(value.shape) != len(r.dims) or not all(map(_has_size, r.dims, value.shape))
        return "their maximum is combined with a larger tensor" if grown else r.extend(value)
    if value.op == "exp" and r.negative:
        return ShiftExp(r.dims, (*r.path, value), r)
    return f"{value.op} is applied to their maximum or log-sum-exp"


def _has_size(group: Group, n: Size) -> bool:
    return bool(group) or is_one(n)


def exp_of_scores(value: Value, s: MatchedScores) -> State:
    """exp(scores)"""
    return ScoreExps(s.dims, (*s.path, value), s)


def sum_of_exps(value: Value, e: ScoreExps) -> State | str:
    """exps.sum(keys)"""
    found = reduced(value, e.dims)
    if found is None:
        return "their exponentials are not summed over one dimension"
    keys, dims = found
    return ExpSum(dims, (*e.path, value), e, keys)


def add_sink(value: Value, t: ExpSum, x: object) -> State | str:
    """exp_sum + exp(-shift), or exp_sum + 1 where nothing was subtracted"""
    if t.zero_sink or value.op != "add":
        return "something is added to the sum of their exponentials"
    s = t.exps.scores
    if isinstance(x, ShiftExp) and x.row.negative and s.shift and _is_negation(x.row, s.shift):
        path = tuple(dict.fromkeys((*t.path, *x.path, value)))
        return dataclasses.replace(t, zero_sink=True, path=path)
    if constant_value(x) == 1 and s.shift is None:
        return t.extend(value, zero_sink=True)
    return "something is added to the sum of their exponentials"


def _is_negation(negated: RowStatistic, shifted: RowStatistic) -> bool:
    """Whether `negated` is the negation of `shifted`, which is one node more."""
    return negated.path[:-1] == shifted.path


def divide(value: Value, e: ScoreExps, t: ExpSum) -> State | str:
    """exps / exp_sum"""
    aligned = tuple(() if g == t.keys else g for g in resolve_dims(e.dims))
    # exp may have been computed twice
    same_exps = t.exps.scores is e.scores and t.exps.path[:-1] == e.path[:-1]
    if not same_exps or resolve_dims(t.dims) != aligned:
        return "their exponentials are divided by another sum"
    if wrong := why_not_over_keys(e.scores, t.keys):
        return wrong
    path = tuple(dict.fromkeys((*e.path, *t.path, value)))
    return MatchedWeights(e.dims, path, e.scores, value, t.keys, zero_sink=t.zero_sink)


def divide_output(value: Value, output: UnnormalizedOutput, t: ExpSum) -> Core | str:
    """(exps @ v) / exp_sum"""
    dims, under = resolve_dims(output.dims), resolve_dims(t.dims)
    under = ((),) * (len(dims) - len(under)) + under
    rows = [g for g in under if g]
    matching = all(u in ((), d) for u, d in zip(under, dims, strict=True))
    wanted = [g for g in dims if g and not set(g) & set(output.features)]
    if t.exps.path != output.exps.path or t.keys != output.keys or not matching or rows != wanted:
        return "the product with the value is divided by another sum"
    if wrong := why_not_over_keys(output.exps.scores, t.keys):
        return wrong
    path = tuple(dict.fromkeys((*output.path, *t.path)))
    weights = MatchedWeights(
        output.exps.dims, path, output.exps.scores, value, t.keys, zero_sink=t.zero_sink
    )
    return Core(weights, output.v, output.features, output.dims, value)
