"""The matcher: one pass over the graph in order, following scores from a product through a softmax to the product with a value.

Each handler says what an operation does to scores or weights; what no handler knows is lost, with a reason in the user's words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from compile_passes import layout
from compile_passes.axes import Axis, Dims, broadcast_dims, flat, is_one, resolve
from compile_passes.constants import held, number
from compile_passes.ir import Value, View
from compile_passes.products import Contraction, contraction
from compile_passes.states import Bias, Core, Fill, Leaf, Lost, Scores, State, Weights
from compile_passes.vocabulary import raw_name

_PASSING = frozenset("add sub mul div neg tanh masked_fill where clamp softmax dropout".split())


class Matcher:
    """Fills `cores`, and for every softmax without one a reason in `misses`."""

    def __init__(self, view: View) -> None:
        self.states: dict[Value, State] = {}
        self.cores: list[Core] = []
        self.softmaxes: list[Value] = []
        self.misses: dict[Value, str] = {}
        for value in view.values.values():
            if value.op and isinstance(value.tensor, Tensor):
                state = self._transfer(value)
                if state is not None:
                    self.states[value] = state
                if isinstance(state, Lost) and state.softmax:
                    self.misses.setdefault(state.softmax, state.reason)

    def _transfer(self, value: Value) -> State | None:
        product = contraction(value)
        if product is not None:
            return self._product(value, product)
        if value.op in ("softmax", "log_softmax"):
            self.softmaxes.append(value)
        name, state = self._subject(value)
        if value.op == "softmax":
            return self._softmax(value, state)
        if isinstance(state, Lost):
            known = value.op in _PASSING or value.op in layout.LAYOUT
            return Lost(state.reason, value, state.softmax) if known else None
        if state is None:
            return None
        if value.writes and name != "input":
            return self._lost(
                value, state, f"{raw_name(value.node)} writes them into another tensor"
            )
        if value.op in layout.LAYOUT:
            return self._layout(value, state)
        handlers = _SCORES if isinstance(state, Scores) else _WEIGHTS
        handler = handlers.get(value.op)
        if handler is None:
            return self._lost(value, state, f"{raw_name(value.node)} is applied to them")
        result = handler(value, state, name)
        return self._lost(value, state, result) if isinstance(result, str) else result

    def _subject(self, value: Value) -> tuple[str, State | None]:
        """The argument that carries scores or weights; the first if several do."""
        found: tuple[str, State | None] = ("", None)
        for name, x in value.args.items():
            state = self.states.get(x) if isinstance(x, Value) else None
            if state is not None and (found[1] is None or isinstance(found[1], Lost)):
                found = name, state
        return found

    def _lost(self, value: Value, state: State, what: str) -> Lost:
        if isinstance(state, Weights):
            return Lost(
                f"the attention weights are not used as they are: {what}", value, state.softmax
            )
        return Lost(f"the scores are not scale, bias and mask alone: {what}", value)

    def _layout(self, value: Value, state: Scores | Weights) -> State:
        if value.op == "cast" and not value.dtype.is_floating_point:
            return self._lost(value, state, f"they are cast to {value.dtype}")
        dims = layout.forward(value, state.dims)
        if dims is None:
            return self._lost(value, state, f"{raw_name(value.node)} takes their dimensions apart")
        return state.then(value, dims=dims)

    def _product(self, value: Value, c: Contraction) -> State | None:
        a, b = (self.states.get(x) for x in (c.a, c.b))
        wa, wb = isinstance(a, Weights), isinstance(b, Weights)
        if wa and wb:
            return self._lost(value, a, "two sets of weights are multiplied")
        if wa or wb:
            return self._value_product(value, c, a if wa else b, wb)
        scores = _scores(value, c)
        if scores is None or value.op != "baddbmm":
            return scores
        return _baddbmm(value, scores)

    def _softmax(self, value: Value, state: State | None) -> State | None:
        if isinstance(state, Scores):
            dim = value.args.get("dim")
            if not isinstance(dim, int):
                self.misses[value] = "the softmax names no dimension"
                return None
            keys = resolve(state.dims[dim])
            a, b = (set(flat(x.dims)) for x in (state.a, state.b))
            if not keys:
                self.misses[value] = "the softmax runs over a dimension of size 1"
            elif set(keys) <= a - b or set(keys) <= b - a:
                return Weights(state, value, keys, state.dims, (*state.path, value))
            else:
                self.misses[value] = (
                    "the softmax runs over a batch or head dimension, or over several dimensions, "
                    "not over the keys"
                )
            return None
        reason = "its input is not the product of a query and a key"
        self.misses[value] = state.reason if isinstance(state, Lost) else reason
        return None

    def _value_product(self, value: Value, c: Contraction, weights: Weights, right: bool) -> State:
        lw, lv = (c.lb, c.la) if right else (c.la, c.lb)
        v = c.a if right else c.b
        axes = {x: resolve(g) for x, g in zip(lw, weights.dims, strict=True) if x is not None}
        keys = [a for x in c.summed for a in axes.get(x, ())]
        if set(keys) != weights.key_axes():
            return self._lost(
                value, weights, "they are multiplied along another dimension than the keys"
            )
        new = [x for x in c.lo if x is not None and x not in axes]
        if len(new) > 1:
            return self._lost(value, weights, "the value has dimensions that the weights lack")
        axes |= {x: (Axis(c.sizes[x], "features"),) for x in new}
        dims = [tuple(() if x is None else axes[x] for x in labels) for labels in (lv, c.lo)]
        features = axes[new[0]] if new else ()
        self.cores.append(Core(weights, Leaf(v, dims[0]), features, dims[1], value))
        return None


def _scores(value: Value, c: Contraction) -> Scores | None:
    if not value.dtype.is_floating_point:
        return None
    axes = {x: Axis(n, x) for x, n in c.sizes.items()}
    dims = [tuple(() if x is None else (axes[x],) for x in ls) for ls in (c.la, c.lb, c.lo)]
    summed = tuple(axes[x] for x in c.summed)
    return Scores(Leaf(c.a, dims[0]), Leaf(c.b, dims[1]), summed, value, dims[2], dims[2], (value,))


def _baddbmm(value: Value, scores: Scores) -> State | None:
    """beta * input + alpha * product"""
    alpha, beta = (number(value.args.get(x, 1)) for x in ("alpha", "beta"))
    if alpha is None or beta is None:
        return None
    scores = dataclasses.replace(scores, scale=float(alpha))
    if beta == 0:
        return scores
    joined = _join(value, scores, value.args["input"])
    if isinstance(joined, str):
        return None
    leaf, dims = joined
    return dataclasses.replace(scores, dims=dims, terms=(Bias(leaf, value.dtype, float(beta)),))


def _join(value: Value, state: Scores | Weights, x: object) -> tuple[Leaf, Dims] | str:
    """x aligned with the scores, and the scores' dims after broadcasting against it; or why not."""
    constant = number(x)
    if constant is not None:
        return Leaf(float(constant)), state.dims
    if not isinstance(x, Value):
        return "something unknown joins them"
    if not isinstance(x.tensor, Tensor):
        scalar = isinstance(x.tensor, (torch.SymFloat, torch.SymInt))
        return (Leaf(x), state.dims) if scalar else "something unknown joins them"
    if x in state.path:
        return "they are combined with themselves"
    dims = _grown(value.shape, x.shape, state.dims)
    return Leaf(x, broadcast_dims(x.shape, dims)), dims


def _grown(shape: torch.Size, other: torch.Size, dims: Dims) -> Dims:
    """Dims of scores that broadcast against a tensor larger than they are."""
    dims = ((),) * (len(shape) - len(dims)) + dims
    big = (1,) * (len(shape) - len(other)) + tuple(other)
    return tuple(
        (Axis(n, "bias"),) if not g and not is_one(n) else g for g, n in zip(dims, big, strict=True)
    )


def _scores_add(value: Value, s: Scores, name: str) -> State | str:
    alpha = number(value.args.get("alpha", 1))
    joined = _join(value, s, value.args["other" if name == "input" else "input"])
    if isinstance(joined, str) or alpha is None:
        return joined if isinstance(joined, str) else "alpha is not a number"
    leaf, dims = joined
    sign = -1.0 if value.op == "sub" else 1.0
    if name == "input":
        return s.then(value, dims=dims, terms=(*s.terms, Bias(leaf, value.dtype, sign * alpha)))
    if sign * alpha != 1.0:
        return "they are subtracted from something"
    return s.then(value, dims=dims, terms=(*s.terms, Bias(leaf, value.dtype)))


def _scores_mul(value: Value, s: Scores, name: str) -> State | str:
    if value.op == "div" and (name != "input" or value.args.get("rounding_mode")):
        return "they are a divisor, or rounded"
    joined = _join(value, s, value.args["other" if name == "input" else "input"])
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
    c = 1.0 / leaf.value if value.op == "div" else leaf.value
    return _scaled(value, s, c)


def _scaled(value: Value, s: Scores, c: float) -> State | str:
    if c < 0 and (s.softcap or any(isinstance(t, Fill) for t in s.terms)):
        return "they are negated after a mask or a softcap"
    field = {Bias: "coefficient", Fill: "value"}
    terms = tuple(
        dataclasses.replace(t, **{field[type(t)]: getattr(t, field[type(t)]) * c}) for t in s.terms
    )
    return s.then(value, scale=s.scale * c, softcap=s.softcap * c, terms=terms)


def _scores_neg(value: Value, s: Scores, name: str) -> State | str:
    return _scaled(value, s, -1.0)


def _scores_tanh(value: Value, s: Scores, name: str) -> State | str:
    """tanh(u) is a softcap of 1; a later multiplication makes it the user's."""
    if s.softcap or s.terms:
        return "tanh follows a bias, a mask or another tanh"
    return s.then(value, softcap=1.0)


def _scores_masked_fill(value: Value, s: Scores, name: str) -> State | str:
    if name != "input":
        return "they are used as a mask"
    return _filled(value, s, value.args.get("mask"), True, value.args.get("value"))


def _scores_where(value: Value, s: Scores, name: str) -> State | str:
    if name == "condition":
        return "they are used as a mask"
    other = value.args.get("other" if name == "input" else "input")
    return _filled(value, s, value.args.get("condition"), name != "input", other)


def _filled(value: Value, s: Scores, mask: object, where: bool, fill: object) -> State | str:
    constant = number(fill)
    if constant is None:
        return "they are replaced by something that is not one number"
    if not isinstance(mask, Value) or not isinstance(mask.tensor, Tensor):
        return "their mask is not a tensor"
    if mask.dtype != torch.bool:
        return "their mask is not boolean"
    joined = _join(value, s, mask)
    if isinstance(joined, str):
        return joined
    leaf, dims = joined
    return s.then(
        value, dims=dims, terms=(*s.terms, Fill(leaf, where, held(float(constant), value.dtype)))
    )


def _same(value: Value, state: State, name: str) -> State | str:
    p, training = number(value.args.get("p", 0.5)), number(value.args.get("training", True))
    if training in (False, 0) or p == 0:
        return state.then(value)
    return "dropout is applied to them"


def _weights_dropout(value: Value, w: Weights, name: str) -> State | str:
    p, training = number(value.args.get("p", 0.5)), number(value.args.get("training", True))
    if training in (False, 0) or p == 0:
        return w.then(value)
    if p is None or training is None:
        return "the dropout probability is not a constant of the graph"
    if w.dropout_p or not 0.0 < p < 1.0:
        return f"dropout with p = {p}" + (" is applied twice" if w.dropout_p else "")
    return w.then(value, dropout_p=float(p))


def _weights_mul(value: Value, w: Weights, name: str) -> State | str:
    if value.op == "div":
        return "they are divided by something"
    joined = _join(value, w, value.args["other" if name == "input" else "input"])
    if isinstance(joined, str):
        return joined
    leaf, dims = joined
    if leaf.axes() & w.key_axes() or len(flat(dims)) != len(flat(w.dims)):
        return "they are multiplied by a tensor that varies along the keys"
    return w.then(value, factors=(*w.factors, leaf))


Handler = Callable[[Value, State, str], State | str]
_SCORES: dict[str, Handler] = {
    "add": _scores_add,
    "sub": _scores_add,
    "mul": _scores_mul,
    "div": _scores_mul,
    "neg": _scores_neg,
    "tanh": _scores_tanh,
    "masked_fill": _scores_masked_fill,
    "where": _scores_where,
    "dropout": _same,
}
_WEIGHTS: dict[str, Handler] = {
    "dropout": _weights_dropout,
    "mul": _weights_mul,
    "div": _weights_mul,
}
