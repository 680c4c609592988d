"""Rules for operations on attention weights. A rule returns the state of the result, or raises
Refusal with the reason why it is not supported, in which "they" are the weights.
"""

from __future__ import annotations

import math

from compile_passes.ir.axes import all_axes, resolve, resolve_dims, sizes_equal
from compile_passes.ir.constants import constant_value, guarded_constant, is_zero_or_one
from compile_passes.ir.graph import Value, is_tensor
from compile_passes.ir.vocabulary import raw_name
from compile_passes.match.products import align, other_operand, reduced, without_inversion
from compile_passes.match.states import (
    FillTerm,
    HiddenScores,
    KeyGate,
    MatchedScores,
    MatchedWeights,
    NanWeights,
    State,
    without_cast,
)
from compile_passes.report import Refusal


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
