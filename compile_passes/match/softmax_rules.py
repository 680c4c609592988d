"""Rules for softmax written by hand: exp and sum, a norm or reciprocal of it, log-sum-exp,
log_softmax, division after the value product. In reasons, "they" are the scores.

Subtracting a row's maximum, or any other number per row, before exp changes nothing once the row is
divided by its sum, so it is only checked that numerator and denominator are shifted alike.
"""

from __future__ import annotations

import dataclasses
import math

from compile_passes.ir.axes import Axis, Dims, Group, is_one, resolve, resolve_dims
from compile_passes.ir.constants import constant_value, guarded_constant, is_zero_or_one
from compile_passes.ir.graph import Value
from compile_passes.ir.layout import EXPANDED
from compile_passes.ir.vocabulary import raw_name
from compile_passes.match.products import (
    align,
    other_operand,
    reduced,
    summed_by_einsum,
    without_inversion,
)
from compile_passes.match.score_rules import scaled
from compile_passes.match.states import (
    Core,
    DetachedScores,
    ExpSum,
    FillTerm,
    InverseExpSum,
    LogWeights,
    MatchedScores,
    MatchedWeights,
    RowStatistic,
    ScoreExps,
    ShiftExp,
    State,
    UnnormalizedOutput,
    without_cast,
)
from compile_passes.report import Refusal

NOT_KEYS = "the softmax runs over a batch or head dimension, or over several, not over the keys"
DETACHED = "detach is applied to them"


def check_over_keys(s: MatchedScores, keys: Group) -> None:
    """Raises Refusal unless `keys` are the key axes of these scores: they belong to one of the
    product's operands alone, and what was subtracted from the scores is constant along them.
    """
    real = set(resolve(keys))
    if s.shift and set(resolve(s.shift.keys)) != real:
        raise Refusal("what is subtracted from the scores varies along the keys")
    if s.sink:
        if real != set(resolve(s.dims[-1])):
            raise Refusal(NOT_KEYS)
        real = set(resolve(s.keys_without_sink))
    a, b = s.a.axes(), s.b.axes()
    if not real or not (real <= a - b or real <= b - a):
        raise Refusal(NOT_KEYS)


def subtract_row(value: Value, s: MatchedScores, r: RowStatistic) -> State:
    """scores - row statistic"""
    aligned = resolve_dims(tuple(() if g == r.keys else g for g in resolve_dims(s.dims)))
    if r.scores is not s or r.negative or _without_repetitions(r.dims) != aligned:
        raise Refusal("the maximum of something else is subtracted from them")
    path = tuple(dict.fromkeys((*s.path, *r.path, value)))
    if r.lse:
        check_over_keys(s, r.keys)
        by_lse = not _is_relative_to_maximum(s)  # else no number of keys is lost in it
        weights = MatchedWeights(s.dims, path, s, value, r.keys, by_lse=by_lse)
        return LogWeights(s.dims, path, weights)
    if s.shift:
        raise Refusal("they are shifted twice")
    return dataclasses.replace(s, shift=r, path=path)


def detached_maximum(value: Value, s: DetachedScores) -> RowStatistic:
    """The maximum of scores without their gradient."""
    if value.op not in ("amax", "max"):
        raise Refusal(DETACHED)
    keys, dims = reduced(value, s.dims, f"{value.op} is applied to them")
    return RowStatistic(dims, (*s.path, value), s.scores, keys)


def row_rule(value: Value, r: RowStatistic, name: str) -> State:
    """An operation on a row statistic."""
    if value.op == "neg":
        return r.extend(value, negative=not r.negative)
    if value.op in ("clamp", "detach", "maximum"):
        if r.lse:
            raise Refusal(f"{value.op} is applied to their log-sum-exp")
        same_rank = len(value.shape) == len(r.dims)
        if not same_rank or not all(g or is_one(n) for g, n in zip(r.dims, value.shape)):
            raise Refusal("their maximum is combined with a larger tensor")
        return r.extend(value)
    if value.op == "exp" and r.negative:
        return ShiftExp(r.dims, (*r.path, value), r)
    raise Refusal(f"{value.op} is applied to their maximum or log-sum-exp")


def exponentials(value: Value, s: MatchedScores, base: float) -> State:
    """base ** scores"""
    s = scaled(value, s, math.log(base))
    return ScoreExps(s.dims, s.path, s, value)


def sum_of_exps(value: Value, e: ScoreExps) -> State:
    """exps.sum(keys), their mean, or their norm with p = 1, as none is negative."""
    if value.op == "norm" and constant_value(value.args.get("p")) != 1:
        raise Refusal("their exponentials are divided by another norm than their sum")
    if value.op == "einsum":
        keys, dims = summed_by_einsum(value, e.dims)
    else:
        reason = "their exponentials are not summed over one dimension"
        keys, dims = reduced(value, e.dims, reason)
    divisor = 1
    for axis in resolve(keys) if value.op == "mean" else ():
        if type(axis.size) is not int:
            raise Refusal(
                "their exponentials are divided by a mean over a number of keys that varies"
            )
        divisor *= axis.size
    return ExpSum(dims, (*e.path, value), e, keys, divisor=float(divisor))


def sum_by_ones(
    e: ScoreExps, path: tuple[Value, ...], keys: Group, dims: Dims, columns: Group
) -> ExpSum:
    """exps @ ones: their sum, repeated along the columns of the ones."""
    repeated = [tuple(Axis(a.size, EXPANDED) if a in columns else a for a in g) for g in dims]
    return ExpSum(tuple(repeated), path, e, keys)


def hides_exps(value: Value, name: str) -> bool:
    """Whether exponentials may become 0 where a mask hides their keys."""
    if value.op == "mul":
        return is_zero_or_one(other_operand(value, name))
    return value.op in ("masked_fill", "where")


def hidden_exps(value: Value, e: ScoreExps, name: str) -> ScoreExps:
    """exps * mask, and exps that are filled with 0: their scores are -inf there."""
    if value.op == "mul":
        mask, when = other_operand(value, name), False
    elif value.op == "masked_fill":
        mask, when = value.args.get("mask"), True
    else:
        mask, when = value.args.get("condition"), name != "input"
    fill = value.args.get("value") if value.op == "masked_fill" else other_operand(value, name)
    if name in ("mask", "condition") or (value.op != "mul" and constant_value(fill) != 0):
        raise Refusal("their exponentials are masked by something else than 0")
    if constant_value(mask) is not None:
        raise Refusal("all of their exponentials are multiplied by a number, or replaced")
    mask, when = without_inversion(mask, when)
    leaf, dims = align(value, e, mask)
    term = FillTerm(without_cast(leaf), when, -math.inf, value.dtype)
    scores = dataclasses.replace(e.scores, terms=(*e.scores.terms, term))
    return e.extend(value, dims=dims, scores=scores)


def scaled_output(value: Value, output: UnnormalizedOutput, number: float) -> UnnormalizedOutput:
    """(exps @ v) times a number, or divided by it"""
    if value.op not in ("mul", "div") or value.args.get("rounding_mode"):
        raise Refusal(f"{raw_name(value.node)} is applied to their product with the value")
    gain = output.gain * number if value.op == "mul" else output.gain / number
    return output.extend(value, gain=gain)


def normalize(value: Value, e: ScoreExps) -> MatchedWeights:
    """F.normalize(exps, p=1): they are divided by their sum, which is at least eps."""
    p, dim, eps = (value.args.get(x, y) for x, y in (("p", 2.0), ("dim", 1), ("eps", 1e-12)))
    if constant_value(p) != 1 or not isinstance(dim, int):
        raise Refusal("their exponentials are divided by another norm than their sum")
    _check_lower_bound(e.scores, constant_value(eps))
    keys = resolve_dims(e.dims)[dim]
    check_over_keys(e.scores, keys)
    return MatchedWeights(e.dims, (*e.path, value), e.scores, value, keys)


def _is_relative_to_maximum(s: MatchedScores) -> bool:
    """Whether the largest score of each row is 0, because the maximum was subtracted."""
    if not s.shift or any(x.op in ("clamp", "maximum") for x in s.shift.path):
        return False
    return len(s.terms) == len(s.shift.scores.terms)


def _check_lower_bound(s: MatchedScores, bound: float | None) -> None:
    """Raises Refusal unless a sum of exponentials exceeds a number in every row: relative to the
    maximum it is at least 1.
    """
    if bound is None or bound > 1 or not _is_relative_to_maximum(s):
        raise Refusal("the sum of their exponentials may be smaller than its lower bound")


def sum_rule(value: Value, t: ExpSum, name: str, x: object) -> State:
    """An operation on the sum of exponentials; `x` is the other operand, or its state."""
    if value.op in ("clamp", "clamp_min"):
        if value.args.get("max") is not None:
            raise Refusal("the sum of their exponentials is clamped")
        bound = guarded_constant(value.args.get("min", x))
        _check_lower_bound(t.exps.scores, None if bound is None else bound * t.divisor)
        return t.extend(value)
    if value.op in ("mul", "div") and not (value.op == "div" and name != "input"):
        return _multiple_of_sum(value, t, x)
    if value.op == "log" and not t.zero_sink and t.divisor == 1:
        return RowStatistic(t.dims, (*t.path, value), t.exps.scores, t.keys, lse=True)
    inverse = value.op == "reciprocal" or (value.op, constant_value(x)) == ("pow", -1)
    over_sum = value.op == "div" and name == "other" and constant_value(x) == 1
    if (inverse and name == "input") or over_sum:
        return InverseExpSum(t.dims, (*t.path, value), t)
    return add_sink(value, t, x)


def _multiple_of_sum(value: Value, t: ExpSum, x: object) -> ExpSum:
    """exp_sum times a number, or divided by it"""
    number = constant_value(x)
    if not number or number < 0 or t.zero_sink or value.args.get("rounding_mode"):
        raise Refusal("the sum of their exponentials is multiplied by something")
    divisor = t.divisor / number if value.op == "mul" else t.divisor * number
    return t.extend(value, divisor=divisor)


def add_sink(value: Value, t: ExpSum, x: object) -> State:
    """exp_sum + exp(-shift), or exp_sum + 1 where nothing was subtracted"""
    if value.op != "add":
        raise Refusal(f"{raw_name(value.node)} is applied to the sum of their exponentials")
    if t.zero_sink or t.divisor != 1:
        raise Refusal("something is added to the sum of their exponentials")
    s = t.exps.scores
    if isinstance(x, ShiftExp) and s.shift and x.row.path[:-1] == s.shift.path:
        path = tuple(dict.fromkeys((*t.path, *x.path, value)))
        return dataclasses.replace(t, zero_sink=True, path=path)
    if constant_value(x) == 1 and s.shift is None:
        return t.extend(value, zero_sink=True)
    raise Refusal("something is added to the sum of their exponentials")


def _without_repetitions(dims: Dims) -> Dims:
    """The dims of a row's number before it was expanded to the keys."""
    return tuple(() if any(a.name == EXPANDED for a in g) else g for g in resolve_dims(dims))


def normalised(
    value: Value, state: ScoreExps | UnnormalizedOutput, by: ExpSum | InverseExpSum
) -> MatchedWeights | Core:
    """Exponentials, or their product with a value, that are divided by their sum."""
    dims = _without_repetitions(by.dims)
    total = by.total if isinstance(by, InverseExpSum) else by
    by = dataclasses.replace(total, path=by.path, dims=dims)
    found = _divided if isinstance(state, ScoreExps) else _divided_output
    return found(value, state, by)


def _divided(value: Value, e: ScoreExps, t: ExpSum) -> MatchedWeights:
    """exps / exp_sum"""
    aligned = tuple(() if g == t.keys else g for g in resolve_dims(e.dims))
    # exp may have been computed twice
    same_exps = t.exps.scores is e.scores and t.exps.path[:-1] == e.path[:-1]
    if not same_exps or resolve_dims(t.dims) != aligned:
        raise Refusal("their exponentials are divided by another sum")
    check_over_keys(e.scores, t.keys)
    path = tuple(dict.fromkeys((*e.path, *t.path, value)))
    return MatchedWeights(
        e.dims, path, e.scores, value, t.keys, gain=t.divisor, zero_sink=t.zero_sink
    )


def _divided_output(value: Value, output: UnnormalizedOutput, t: ExpSum) -> Core:
    """(exps @ v) / exp_sum"""
    dims, under = resolve_dims(output.dims), resolve_dims(t.dims)
    under = ((),) * (len(dims) - len(under)) + under
    rows = [g for g in under if g]
    matching = all(u in ((), d) for u, d in zip(under, dims, strict=True))
    wanted = [g for g in dims if g and not set(g) & set(output.features)]
    if t.exps.path != output.exps.path or t.keys != output.keys or not matching or rows != wanted:
        raise Refusal("the product with the value is divided by another sum")
    check_over_keys(output.exps.scores, t.keys)
    path = tuple(dict.fromkeys((*output.path, *t.path)))
    weights = MatchedWeights(
        output.exps.dims, path, output.exps.scores, value, t.keys, gain=output.gain * t.divisor,
        zero_sink=t.zero_sink,
    )  # fmt: skip
    return Core(weights, output.v, output.features, output.dims, value)
