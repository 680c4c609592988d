"""Rules for softmax written by hand, and for operations on attention weights. A rule returns the
state of the result, or raises Refusal with the reason why it is not supported.
"""

from __future__ import annotations

import dataclasses
import math

from compile_passes.ir.axes import (
    Axis,
    Dims,
    Group,
    all_axes,
    is_one,
    resolve,
    resolve_dims,
    sizes_equal,
)
from compile_passes.ir.constants import constant_value, guarded_constant, is_zero_or_one
from compile_passes.ir.graph import EXPANDED, Value, is_tensor
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
    HiddenScores,
    InverseExpSum,
    KeyGate,
    LogWeights,
    MatchedScores,
    MatchedWeights,
    NanWeights,
    RowStatistic,
    ScoreExps,
    ShiftExp,
    State,
    UnnormalizedOutput,
    without_cast,
)
from compile_passes.report import Refusal

# Softmax written by hand: exp and sum, a norm or reciprocal of it, log-sum-exp, log_softmax,
# division after the value product. In reasons, "they" are the scores.
#
# Subtracting a row's maximum, or any other number per row, before exp changes nothing once the row
# is divided by its sum, so it is only checked that numerator and denominator are shifted alike.

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


# Operations on attention weights. In reasons, "they" are the weights.


def dropout(value: Value, w: MatchedWeights, name: str) -> State:
    """Dropout by a function of torch."""
    p = guarded_constant(value.args.get("p", 0.5))
    training = constant_value(value.args.get("training", True))
    if training in (False, 0) or p == 0:
        return w.extend(value)
    if p is None or training is None:
        raise Refusal("the dropout probability is not a constant of the graph")
    return _dropped(value, w, float(p), 1.0, ())


def _dropped(value: Value, w: MatchedWeights, p: float, gain: float, mask: tuple) -> State:
    if w.dropout_p:
        raise Refusal("dropout is applied twice")
    if not 0.0 < p < 1.0:
        raise Refusal(f"dropout with p = {p}")
    return w.extend(value, dropout_p=p, gain=w.gain * gain, path=(*w.path, *mask, value))


def mul(value: Value, w: MatchedWeights, name: str) -> State:
    """They are multiplied by a dropout mask, a number, or a factor of rows or of keys."""
    x = other_operand(value, name)
    rounded = value.args.get("rounding_mode") is not None
    if value.op == "div" and (name != "input" or rounded or constant_value(x) == 0):
        raise Refusal("they are divided by something")
    mask = _dropout_mask(x, w) if value.op == "mul" else None
    if mask is not None:
        keep, gain, nodes = mask
        return _dropped(value, w, 1.0 - keep, keep * gain, nodes)
    leaf, dims = align(value, w, x)
    if value.op == "mul" and leaf.axes() & w.key_axes() and is_zero_or_one(x):
        return _zeroed(value, w, x, False, x)
    if not isinstance(leaf.value, Value):
        c = 1.0 / leaf.value if value.op == "div" else leaf.value
        return w.extend(value, gain=w.gain * c)
    if len(all_axes(dims)) != len(all_axes(w.dims)):
        raise Refusal("they are multiplied by a tensor that has dimensions which they lack")
    if leaf.axes() & w.key_axes():
        return w.extend(value, gates=(*w.gates, KeyGate(leaf, value.op == "div")))
    if value.op == "div":
        raise Refusal("they are divided by something")
    return w.extend(value, factors=(*w.factors, leaf))


def _dropout_mask(x: object, w: MatchedWeights) -> tuple[float, float, tuple[Value, ...]] | None:
    """(probability to keep, factor of the kept weights, nodes) of a dropout mask drawn by hand."""
    if not is_tensor(x) or len(x.shape) != len(w.dims):
        return None
    if x.op in ("cast", "copy") and isinstance(x.args.get("input"), Value) and not x.writes:
        inner = _dropout_mask(x.args["input"], w)
        return inner and (*inner[:2], (*inner[2], x))
    if x.op == "div" and isinstance(x.args.get("input"), Value):
        inner, by = _dropout_mask(x.args["input"], w), constant_value(x.args.get("other"))
        return (inner[0], inner[1] / by, (*inner[2], x)) if inner and by else None
    if not all(sizes_equal(n, m) for n, m in zip(x.shape, w.path[-1].shape, strict=True)):
        return None
    keep = _keep_probability(x)
    nodes = (x,) if x.op == "bernoulli" else (x.args.get("input"), x)
    return None if keep is None or not 0.0 < keep < 1.0 else (keep, 1.0, nodes)


def _keep_probability(x: Value) -> float | None:
    if x.op == "bernoulli":
        p = x.args.get("p")
        return constant_value(x.args.get("input") if p is None else p)
    drawn = x.args.get("input")
    if not isinstance(drawn, Value) or drawn.op not in ("rand", "rand_like"):
        return None
    bound = constant_value(x.args.get("other"))
    if bound is None:
        return None
    return {"lt": bound, "le": bound, "gt": 1 - bound, "ge": 1 - bound}.get(x.op)


def without_sink(value: Value, w: MatchedWeights, name: str) -> State:
    """weights[..., :-1] or weights[..., 1:], without the column of the sink"""
    index = value.args.get("index")
    s = w.scores
    if not s.sink or not isinstance(index, tuple) or w.keys == s.keys_without_sink:
        raise Refusal("they are sliced")
    *full, last = index
    if (
        not all(i is Ellipsis or i == slice(None) for i in full)
        or not isinstance(last, slice)
        or last.step not in (None, 1)
    ):
        raise Refusal("they are sliced")
    starts = (1,) if s.sink_first else (None, 0)
    if last.start not in starts or not sizes_equal(value.shape[-1] + 1, w.path[-1].shape[-1]):
        raise Refusal("they are sliced")
    if Ellipsis not in full and len(full) != len(w.dims) - 1:
        raise Refusal("they are sliced")
    return w.extend(value, dims=(*w.dims[:-1], s.keys_without_sink), keys=s.keys_without_sink)


def nan_to_num(value: Value, w: MatchedWeights, name: str) -> State:
    """Rows without keys become 0 instead of NaN, as the operator gives them."""
    if set(value.args) - {"input", "nan"} or constant_value(value.args.get("nan", 0.0)) != 0:
        raise Refusal("nan_to_num replaces NaN by another number than 0")
    return w.extend(value)


def masked_fill(value: Value, w: MatchedWeights, name: str) -> State:
    """Weights are set to 0 where a mask is True."""
    if name != "input" or constant_value(value.args.get("value")) != 0:
        raise Refusal("they are masked")
    return _zeroed(value, w, value.args.get("mask"), True)


def where(value: Value, w: MatchedWeights, name: str) -> State:
    """They are one of the two branches, and the other is 0."""
    if name == "condition" or constant_value(other_operand(value, name)) != 0:
        raise Refusal("they are masked")
    return _zeroed(value, w, value.args.get("condition"), name != "input")


def is_nan(value: Value, w: MatchedWeights, name: str) -> State:
    """Where they are NaN: in rows without keys, for which the operator gives 0."""
    return NanWeights(w.dims, (*w.path, value), w)


def _zeroed(
    value: Value, w: MatchedWeights, mask: object, when: bool, factor: Value | None = None
) -> State:
    """They are 0 in some rows, or where the scores were masked, so that rows without keys give 0.
    `classify_masks` checks that it is the mask of the scores. `factor`: the tensor of 0 and 1 that
    they were multiplied by.
    """
    mask, when = without_inversion(mask, when)
    if (known := constant_value(mask)) is not None and bool(known) != when:
        return w.extend(value)
    leaf, dims = align(value, w, mask)
    leaf = without_cast(leaf)
    if not isinstance(leaf.value, Value) or not is_zero_or_one(leaf.value):
        raise Refusal("they are masked")
    fill = FillTerm(leaf, when, 0.0, value.dtype, factor=factor)
    if not leaf.axes() & w.key_axes() and len(all_axes(dims)) == len(all_axes(w.dims)):
        return w.extend(value, row_fills=(*w.row_fills, fill))
    if w.zero_fill or w.dropout_p:
        raise Refusal("they are masked")
    return w.extend(value, zero_fill=fill)


RULES = {
    "dropout": dropout,
    "mul": mul,
    "div": mul,
    "getitem": without_sink,
    "nan_to_num": nan_to_num,
    "masked_fill": masked_fill,
    "where": where,
    "isnan": is_nan,
}


# Rules for guards of rows without keys: weights are set to 0 where they are NaN, or where all
# scores of the row are -inf. The operator gives 0 there.


def hidden_scores(value: Value, s: MatchedScores, name: str) -> State:
    """scores == -inf"""
    if constant_value(other_operand(value, name)) != -math.inf:
        raise Refusal("they are compared with something")
    return HiddenScores(s.dims, (*s.path, value), s)


def hidden_rule(value: Value, h: HiddenScores) -> State:
    """An operation on where scores are -inf."""
    if value.op == "not":
        return h.extend(value, inverted=not h.inverted)
    if value.op == ("any" if h.inverted else "all") and not h.keys:
        keys, dims = reduced(value, h.dims, f"{value.op} of several dimensions is read of them")
        return h.extend(value, dims=dims, keys=keys)
    raise Refusal(f"{raw_name(value.node)} is applied to where they are -inf")


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
        raise Refusal("they are filled where they, or others, are NaN or have no keys")
    return w.extend(value, path=tuple(dict.fromkeys((*w.path, *guard.path, value))))


def _is_of(guard: NanWeights | HiddenScores, w: MatchedWeights) -> bool:
    """Whether a guard is that of these weights."""
    if isinstance(guard, NanWeights):
        return guard.weights.path == w.path
    aligned = tuple(() if g == guard.keys else g for g in resolve_dims(w.dims))
    of_rows = resolve(guard.keys) == resolve(w.keys) and resolve_dims(guard.dims) == aligned
    return of_rows and guard.scores is w.scores
