"""Rules for operations on scores. A rule returns the state of the result, or raises Refusal with
the reason why it is not supported, in which "they" are the scores.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from compile_passes.ir.axes import Axis
from compile_passes.ir.constants import (
    constant_value,
    guarded_constant,
    is_zero_or_one,
    number_beside_zeros,
    stored_value,
)
from compile_passes.ir.graph import Value, is_tensor
from compile_passes.match.products import align, other_operand, reduced, without_inversion
from compile_passes.match.states import (
    MAX_MASK_FILL,
    BiasTerm,
    ClampTerm,
    FillTerm,
    Leaf,
    MatchedScores,
    RowStatistic,
    State,
    without_cast,
)
from compile_passes.report import Refusal


def add(value: Value, s: MatchedScores, name: str) -> State:
    """A bias is added or subtracted."""
    alpha = constant_value(value.args.get("alpha", 1))
    x = other_operand(value, name)
    leaf, dims = align(value, s, x)
    if alpha is None:
        raise Refusal("alpha is not a number")
    sign = -1.0 if value.op == "sub" else 1.0
    if name != "input":
        if sign * alpha != 1.0:
            s = _subtracted(value, s, sign * alpha)
        sign = alpha = 1.0
    last = s.terms[-1] if s.terms else None
    if isinstance(last, FillTerm) and last.factor:
        number = number_beside_zeros(x, last.factor)
        if number is not None:
            number = stored_value(last.value + sign * alpha * number, value.dtype)
            fill = FillTerm(last.mask, last.where, number, value.dtype)
            return s.extend(value, dims=dims, terms=(*s.terms[:-1], fill))
    return s.extend(value, dims=dims, terms=(*s.terms, BiasTerm(leaf, value.dtype, sign * alpha)))


def _subtracted(value: Value, s: MatchedScores, c: float) -> MatchedScores:
    """The scores times c, to which something is added."""
    if s.shift or c == 0:
        raise Refusal("they are subtracted from something")
    return dataclasses.replace(scaled(value, s, c), path=s.path)


def mul(value: Value, s: MatchedScores, name: str) -> State:
    """They are multiplied or divided by a number or a tensor."""
    if value.op == "div" and (name != "input" or value.args.get("rounding_mode")):
        raise Refusal("they are a divisor, or rounded")
    x = other_operand(value, name)
    leaf, dims = align(value, s, x)
    apart = leaf.axes() <= s.a.axes() or leaf.axes() <= s.b.axes()
    if value.op == "mul" and not s.shift and not apart and is_zero_or_one(x):
        fill = FillTerm(without_cast(leaf), False, 0.0, value.dtype, factor=x)
        return s.extend(value, dims=dims, terms=(*s.terms, fill))
    if s.shift or s.terms or s.softcap:  # which a number rescales
        known = guarded_constant(leaf.value)
        leaf = leaf if known is None else Leaf(float(known))
    if isinstance(leaf.value, Value):
        if s.shift:
            raise Refusal("they are multiplied by a tensor after their maximum was subtracted")
        if s.terms or s.softcap:
            raise Refusal("they are multiplied by a tensor after a bias, a mask or a softcap")
        field = "divisors" if value.op == "div" else "factors"
        return s.extend(value, dims=dims, **{field: (*getattr(s, field), leaf)})
    if leaf.value == 0:
        raise Refusal("they are multiplied or divided by zero")
    return scaled(value, s, 1.0 / leaf.value if value.op == "div" else leaf.value)


def scaled(value: Value, s: MatchedScores, c: float) -> MatchedScores:
    """They are multiplied by a number."""
    if c < 0 and (s.softcap or any(isinstance(t, FillTerm) for t in s.terms)):
        raise Refusal("they are negated after a mask or a softcap")
    if c < 0 and any(isinstance(t, ClampTerm) for t in s.terms):
        raise Refusal("they are negated after a lower bound")
    if s.shift and c > 1.0 and any(isinstance(t, BiasTerm) for t in s.terms):
        raise Refusal("they are masked, and enlarged after their maximum was subtracted")
    shifted = len(s.shift.scores.terms) if s.shift else 0  # those before the subtraction
    terms = tuple(
        dataclasses.replace(t, coefficient=t.coefficient * c, rescaled=t.rescaled * c)
        if isinstance(t, BiasTerm)
        else _scaled_number(t, c, value.dtype, i < shifted)
        for i, t in enumerate(s.terms)
    )
    # what was subtracted is scaled too, so that a sink can no longer be recognised by it
    shift = s.shift and s.shift.extend(value)
    return s.extend(value, scale=s.scale * c, softcap=s.softcap * c, terms=terms, shift=shift)


def _scaled_number(
    term: FillTerm | ClampTerm, c: float, dtype: torch.dtype, shifted: bool
) -> FillTerm | ClampTerm:
    """The fill or bound times c. A row that it fills is 0 once its maximum is subtracted, so that
    the product cannot overflow.
    """
    number = stored_value(term.value * c, dtype)
    if shifted and math.isfinite(term.value):
        number = max(number, torch.finfo(dtype).min)
    scaled = dataclasses.replace(term, value=number)
    if isinstance(term, FillTerm):
        scaled = dataclasses.replace(scaled, rescaled=term.rescaled * c)
    return scaled


def neg(value: Value, s: MatchedScores, name: str) -> State:
    """They are negated."""
    if s.shift:
        raise Refusal("they are negated after a shift")
    return scaled(value, s, -1.0)


def nan_to_num(value: Value, s: MatchedScores, name: str) -> State:
    """NaN and infinities are replaced."""
    raise Refusal("nan_to_num is applied to them, and they may be infinite")


def tanh(value: Value, s: MatchedScores, name: str) -> State:
    """A softcap of 1, which a later multiplication scales."""
    if s.softcap or s.terms or s.shift:
        raise Refusal("tanh follows a bias, a mask or another tanh")
    return s.extend(value, softcap=1.0)


def masked_fill(value: Value, s: MatchedScores, name: str) -> State:
    """They are replaced by a number where a mask is True."""
    if name != "input":
        raise Refusal("they are used as a mask")
    return _filled(value, s, value.args.get("mask"), True, value.args.get("value"))


def where(value: Value, s: MatchedScores, name: str) -> State:
    """They are one of the two branches, and the other is a number."""
    if name == "condition":
        raise Refusal("they are used as a mask")
    fill = other_operand(value, name)
    return _filled(value, s, value.args.get("condition"), name != "input", fill)


def _filled(value: Value, s: MatchedScores, mask: object, when: bool, fill: object) -> State:
    constant = guarded_constant(fill)
    if constant is None:
        raise Refusal("they are replaced by something that is not one number")
    if not is_tensor(mask):
        raise Refusal("their mask is not a tensor")
    if mask.dtype != torch.bool:
        raise Refusal("their mask is not boolean")
    if s.shift and s.shift.scores.terms and constant != -math.inf:
        raise Refusal(
            f"they are set to {constant:g} after a mask and after their maximum was subtracted"
        )
    mask, when = without_inversion(mask, when)
    if (known := constant_value(mask)) is not None:
        if bool(known) == when:
            raise Refusal("they are replaced everywhere")
        return s.extend(value)
    leaf, dims = align(value, s, mask)
    term = FillTerm(leaf, when, stored_value(float(constant), value.dtype), value.dtype)
    return s.extend(value, dims=dims, terms=(*s.terms, term))


def dropout(value: Value, s: MatchedScores, name: str) -> State:
    """Dropout that is switched off."""
    p, training = value.args.get("p", 0.5), value.args.get("training", True)
    if constant_value(p) != 0 and constant_value(training) not in (False, 0):
        raise Refusal("dropout is applied to them")
    return s.extend(value)


def row_statistic(value: Value, s: MatchedScores, name: str) -> State:
    """Their maximum or log-sum-exp over one dimension."""
    keys, dims = reduced(value, s.dims, f"{value.op} is applied to them")
    return RowStatistic(dims, (*s.path, value), s, keys, lse=value.op == "logsumexp")


def concatenate(value: Value, s: MatchedScores, name: str) -> State:
    """A sink: one more logit for each row, after the keys or before them."""
    parts, dim = value.args.get("tensors"), value.args.get("dim", 0)
    rank = len(s.dims)
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or not isinstance(dim, int):
        raise Refusal("they are concatenated with something")
    sink_first = parts[1] is s.path[-1]
    sink = parts[not sink_first]
    if dim % rank != rank - 1 or sink in s.path or s.sink or not isinstance(sink, Value):
        raise Refusal("they are concatenated with something")
    if sink.shape[-1] != 1:
        raise Refusal("they are concatenated with more than one column")
    leaf, _ = align(value, dataclasses.replace(s, dims=(*s.dims[:-1], ())), sink)
    return _with_sink(value, s, leaf, sink_first)


def pad(value: Value, s: MatchedScores, name: str) -> State:
    """A sink that is one number, written as padding."""
    width, mode, fill = (value.args.get(x) for x in ("pad", "mode", "value"))
    logit = constant_value(0.0 if fill is None else fill)
    one_column = tuple(width) in ((0, 1), (1, 0)) and mode in (None, "constant")
    if not one_column or s.sink or logit is None:
        raise Refusal("they are padded")
    return _with_sink(value, s, Leaf(float(logit)), width[0] == 1)


def _with_sink(value: Value, s: MatchedScores, sink: Leaf, sink_first: bool) -> MatchedScores:
    keys = (Axis(value.shape[-1], "keys and sink"),)
    changes = {"sink": sink, "sink_first": sink_first, "keys_without_sink": s.dims[-1]}
    return s.extend(value, dims=(*s.dims[:-1], keys), **changes)


def lower_bound(value: Value, s: MatchedScores, name: str) -> State:
    """They are clamped far below real scores, as is done where sums of masks may overflow."""
    bound = guarded_constant(_bound(value, name))
    if value.op == "clamp" and value.args.get("max") is not None:
        raise Refusal("clamp is applied to them")
    if bound is None or not -math.inf < bound <= MAX_MASK_FILL or s.shift or s.sink:
        raise Refusal(f"{value.op} is applied to them")
    return s.extend(value, terms=(*s.terms, ClampTerm(bound, 1.0 if "clamp" in value.op else 0.5)))


def maximum(value: Value, s: MatchedScores, name: str) -> State:
    """torch.max: the maximum of each row, or of two tensors."""
    rule = lower_bound if is_tensor(_bound(value, name)) else row_statistic
    return rule(value, s, name)


def _bound(value: Value, name: str) -> object:
    if value.op == "clamp":
        return value.args.get("min")
    return value.args.get("dim") if value.op == "max" else other_operand(value, name)


RULES = {
    **dict.fromkeys(("add", "sub"), add),
    **dict.fromkeys(("mul", "div"), mul),
    "neg": neg,
    "tanh": tanh,
    "nan_to_num": nan_to_num,
    "masked_fill": masked_fill,
    "where": where,
    "dropout": dropout,
    **dict.fromkeys(("amax", "logsumexp"), row_statistic),
    "max": maximum,
    **dict.fromkeys(("maximum", "clamp", "clamp_min"), lower_bound),
    "cat": concatenate,
    "pad": pad,
}
ALLOWED_WITH_SINK = (row_statistic, maximum, dropout)  # these leave the column of a sink as it is
