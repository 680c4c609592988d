"""What operations do to scores. A rule returns the next state, or in words why there is none."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from compile_passes.graph.axes import Axis, resolve
from compile_passes.graph.constants import held, number, specialised
from compile_passes.graph.ir import Value
from compile_passes.match.joining import join, other, uninverted
from compile_passes.match.match_state import (
    FAR,
    BiasTerm,
    FillTerm,
    FloorTerm,
    Leaf,
    MatchedScores,
    RowStatistic,
    State,
)


def add(value: Value, s: MatchedScores, name: str) -> State | str:
    alpha = number(value.args.get("alpha", 1))
    joined = join(value, s, other(value, name))
    if isinstance(joined, str) or alpha is None:
        return joined if isinstance(joined, str) else "alpha is not a number"
    leaf, dims = joined
    sign = -1.0 if value.op == "sub" else 1.0
    if name != "input":
        if sign * alpha != 1.0:
            return "they are subtracted from something"
        alpha = 1.0
    return s.then(value, dims=dims, terms=(*s.terms, BiasTerm(leaf, value.dtype, sign * alpha)))


def mul(value: Value, s: MatchedScores, name: str) -> State | str:
    if value.op == "div" and (name != "input" or value.args.get("rounding_mode")):
        return "they are a divisor, or rounded"
    if s.shift:
        return "they are scaled after their maximum was subtracted"
    joined = join(value, s, other(value, name))
    if isinstance(joined, str):
        return joined
    leaf, dims = joined
    if isinstance(leaf.value, Value):
        if s.terms or s.softcap:
            return "they are multiplied by a tensor after a bias, a mask or a softcap"
        field = "divisors" if value.op == "div" else "factors"
        return s.then(value, dims=dims, **{field: (*getattr(s, field), leaf)})
    if leaf.value == 0:
        return "they are multiplied or divided by zero"
    return _scaled(value, s, 1.0 / leaf.value if value.op == "div" else leaf.value)


def _scaled(value: Value, s: MatchedScores, c: float) -> State | str:
    if c < 0 and (s.softcap or any(isinstance(t, FillTerm) for t in s.terms)):
        return "they are negated after a mask or a softcap"
    if c < 0 and any(isinstance(t, FloorTerm) for t in s.terms):
        return "they are negated after a lower bound"
    terms = tuple(
        dataclasses.replace(t, coefficient=t.coefficient * c)
        if isinstance(t, BiasTerm)
        else dataclasses.replace(t, value=held(t.value * c, value.dtype))
        for t in s.terms
    )
    return s.then(value, scale=s.scale * c, softcap=s.softcap * c, terms=terms)


def neg(value: Value, s: MatchedScores, name: str) -> State | str:
    return "they are negated after a shift" if s.shift else _scaled(value, s, -1.0)


def tanh(value: Value, s: MatchedScores, name: str) -> State | str:
    """tanh(u) is a softcap of 1; a later multiplication makes it the user's."""
    if s.softcap or s.terms or s.shift:
        return "tanh follows a bias, a mask or another tanh"
    return s.then(value, softcap=1.0)


def masked_fill(value: Value, s: MatchedScores, name: str) -> State | str:
    if name != "input":
        return "they are used as a mask"
    return _filled(value, s, value.args.get("mask"), True, value.args.get("value"))


def where(value: Value, s: MatchedScores, name: str) -> State | str:
    if name == "condition":
        return "they are used as a mask"
    return _filled(value, s, value.args.get("condition"), name != "input", other(value, name))


def _filled(value: Value, s: MatchedScores, mask: object, when: bool, fill: object) -> State | str:
    constant = specialised(fill)
    if constant is None:
        return "they are replaced by something that is not one number"
    if not isinstance(mask, Value) or not isinstance(mask.tensor, Tensor):
        return "their mask is not a tensor"
    if mask.dtype != torch.bool:
        return "their mask is not boolean"
    if s.shift:
        return "they are masked after their maximum was subtracted"
    mask, when = uninverted(mask, when)
    if number(mask) is not None:
        return s.then(value) if bool(number(mask)) != when else "they are replaced everywhere"
    joined = join(value, s, mask)
    if isinstance(joined, str):
        return joined
    leaf, dims = joined
    term = FillTerm(leaf, when, held(float(constant), value.dtype))
    return s.then(value, dims=dims, terms=(*s.terms, term))


def dropout(value: Value, s: MatchedScores, name: str) -> State | str:
    p, training = number(value.args.get("p", 0.5)), number(value.args.get("training", True))
    idle = training in (False, 0) or p == 0
    return s.then(value) if idle else "dropout is applied to them"


def row(value: Value, s: MatchedScores, name: str) -> State | str:
    """Their maximum or log-sum-exp over one dimension."""
    dim = value.args.get("dim", value.args.get("other"))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or not s.dims[dim]:
        return f"{value.op} is taken of them"
    keys = resolve(s.dims[dim])
    dims = list(s.dims)
    dims[dim] = ()
    if not value.args.get("keepdim"):
        del dims[dim]
    return RowStatistic(tuple(dims), (*s.path, value), s, keys, lse=value.op == "logsumexp")


def concatenate(value: Value, s: MatchedScores, name: str) -> State | str:
    """A sink: one more logit per row, behind the keys or before them."""
    parts, dim = value.args.get("tensors"), value.args.get("dim", 0)
    rank = len(s.dims)
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or not isinstance(dim, int):
        return "they are concatenated with something"
    ahead = parts[1] is s.path[-1]
    sink = parts[not ahead]
    if dim % rank != rank - 1 or sink in s.path or s.column or not isinstance(sink, Value):
        return "they are concatenated with something"
    if sink.shape[-1] != 1:
        return "they are concatenated with more than a sink"
    joined = join(value, dataclasses.replace(s, dims=(*s.dims[:-1], ())), sink)
    return joined if isinstance(joined, str) else _sunk(value, s, joined[0], ahead)


def pad(value: Value, s: MatchedScores, name: str) -> State | str:
    """A sink that is one number."""
    width, mode = value.args.get("pad"), value.args.get("mode", "constant")
    fill = value.args.get("value")
    logit = number(0.0 if fill is None else fill)
    if tuple(width) not in ((0, 1), (1, 0)) or mode != "constant" or s.column or logit is None:
        return "they are padded"
    return _sunk(value, s, Leaf(float(logit)), width[0] == 1)


def _sunk(value: Value, s: MatchedScores, column: Leaf, ahead: bool) -> MatchedScores:
    keys = (Axis(value.shape[-1], "keys and sink"),)
    changes = {"column": column, "ahead": ahead, "keys_before": s.dims[-1]}
    return s.then(value, dims=(*s.dims[:-1], keys), **changes)


def floor(value: Value, s: MatchedScores, name: str) -> State | str:
    """A lower bound on them that is out of reach, against sums of masks that overflow."""
    bound = specialised(_bound(value, name))
    if value.op == "clamp" and value.args.get("max") is not None:
        return "clamp is applied to them"
    if bound is None or not -math.inf < bound <= FAR or s.shift or s.column:
        return f"{value.op} is applied to them"
    return s.then(value, terms=(*s.terms, FloorTerm(bound, 1.0 if "clamp" in value.op else 0.5)))


def largest(value: Value, s: MatchedScores, name: str) -> State | str:
    """torch.max is a row's maximum, or that of two tensors."""
    x = _bound(value, name)
    pair = isinstance(x, Value) and isinstance(x.tensor, Tensor)
    return floor(value, s, name) if pair else row(value, s, name)


def _bound(value: Value, name: str) -> object:
    if value.op == "clamp":
        return value.args.get("min")
    return value.args.get("dim") if value.op == "max" else other(value, name)


RULES = {
    "add": add,
    "sub": add,
    "mul": mul,
    "div": mul,
    "neg": neg,
    "tanh": tanh,
    "masked_fill": masked_fill,
    "where": where,
    "dropout": dropout,
    "amax": row,
    "max": largest,
    "maximum": floor,
    "clamp": floor,
    "clamp_min": floor,
    "logsumexp": row,
    "cat": concatenate,
    "pad": pad,
}
BESIDE_A_SINK = (row, largest, dropout)  # what leaves the column of a sink as it is
