"""The matcher: one pass over the graph in order, from a product of query and key through a softmax
to the product with the value.

Rules say what an operation does to scores or weights; what no rule knows is lost, with a reason in
the user's words.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from compile_passes.graph import layout
from compile_passes.graph.axes import Axis, Dims, Group, resolve
from compile_passes.graph.constants import number
from compile_passes.graph.ir import Value, View
from compile_passes.graph.vocabulary import raw_name
from compile_passes.match import score_rules, softmaxes, weight_rules
from compile_passes.match.joining import join, other
from compile_passes.match.match_state import (
    BiasTerm,
    Core,
    Exps,
    Followed,
    Late,
    Leaf,
    LogWeights,
    Lost,
    MatchedScores,
    MatchedWeights,
    RowStatistic,
    ShiftExp,
    State,
    Total,
)
from compile_passes.match.products import Contraction, contraction

NO_SCORES = "its input is not the product of a query and a key"
ONE_KEY = "the softmax runs over a dimension of size 1"


class Matcher:
    """Fills `cores`; `softmaxes` are all that were met, `misses` says why one has no core, `sums`
    are the log-sum-exps of scores.
    """

    def __init__(self, view: View) -> None:
        self.states: dict[Value, State] = {}
        self.cores: list[Core] = []
        self.softmaxes: list[Value] = []
        self.misses: dict[Value, str] = {}
        self.sums: list[RowStatistic] = []
        for value in view.values.values():
            if value.op and (isinstance(value.tensor, Tensor) or value.op == "max"):
                state = self._transfer(value)
                if state is not None:
                    self.states[value] = state
                if isinstance(state, RowStatistic) and value.op == "logsumexp":
                    self.sums.append(state)
                if isinstance(state, Lost) and state.softmax:
                    self.misses.setdefault(state.softmax, state.reason)

    def _transfer(self, value: Value) -> State | None:
        product = contraction(value)
        if product is not None:
            return self._product(value, product)
        name, state = self._subject(value)
        if value.op in ("softmax", "log_softmax"):
            return self._softmax(value, state)
        if isinstance(state, Lost):
            known = value.op in score_rules.RULES or value.op in layout.LAYOUT
            return dataclasses.replace(state, value=value) if known else None
        if state is None:
            return None
        if value.writes and name != "input":
            return _lost(value, state, f"{raw_name(value.node)} writes them into another tensor")
        result = self._apply(value, state, name)
        return _lost(value, state, result) if isinstance(result, str) else result

    def _apply(self, value: Value, state: Followed, name: str) -> State | str | None:
        if isinstance(state, RowStatistic) and value.op == "getitem" and state.path[-1].op == "max":
            first = value.args.get("index") == 0
            return state.then(value) if first else "the place of their maximum is used"
        if value.op in layout.LAYOUT and not (value.op == "getitem" and _slices(value, state)):
            return _rearranged(value, state)
        x = other(value, name)
        beside = self.states.get(x) if isinstance(x, Value) else None
        if isinstance(state, MatchedScores):
            return _scores(value, state, name, beside)
        if isinstance(state, MatchedWeights):
            rule = weight_rules.RULES.get(value.op)
            return (
                rule(value, state, name) if rule else f"{raw_name(value.node)} is applied to them"
            )
        if isinstance(state, LogWeights) and value.op == "exp":
            found = dataclasses.replace(state.weights, softmax=value, path=(*state.path, value))
            self.softmaxes.append(value)
            return dataclasses.replace(found, dims=state.dims)
        if isinstance(state, RowStatistic):
            return softmaxes.row_rule(value, state, name)
        return self._exponentials(value, state, name, x, beside)

    def _exponentials(self, value: Value, state: Followed, name: str, x, beside) -> State | str:
        if isinstance(state, Exps) and value.op == "sum":
            return softmaxes.total(value, state)
        if isinstance(state, ShiftExp) and isinstance(beside, Total):
            state, x, beside = beside, None, state
        if isinstance(state, Total):
            return softmaxes.add_sink(value, state, beside or x)
        if value.op == "div" and name == "input" and isinstance(beside, Total):
            if isinstance(state, Exps):
                found = softmaxes.divide(value, state, beside)
            elif isinstance(state, Late):
                found = softmaxes.divide_late(value, state, beside)
            else:
                return "they are divided by something"
            if not isinstance(found, str):
                self.softmaxes.append(value)
            if isinstance(found, Core):
                self.cores.append(found)
                return None
            return found
        return f"{raw_name(value.node)} is applied to their exponentials"

    def _subject(self, value: Value) -> tuple[str, State | None]:
        """The argument that carries scores or weights; the first if several do."""
        found: tuple[str, State | None] = ("", None)
        for name, given in value.args.items():
            for x in given if name == "tensors" and isinstance(given, (tuple, list)) else (given,):
                state = self.states.get(x) if isinstance(x, Value) else None
                if state is not None and (found[1] is None or isinstance(found[1], Lost)):
                    found = name, state
        return found

    def _product(self, value: Value, c: Contraction) -> State | None:
        a, b = (self.states.get(x) for x in (c.a, c.b))
        for state in (a, b):
            if isinstance(state, Lost) and state.single:
                self.misses.setdefault(state.single, state.reason)
        ours = (MatchedWeights, Exps)
        if isinstance(a, ours) and isinstance(b, ours):
            return _lost(value, a, "two sets of weights are multiplied")
        if isinstance(a, ours) or isinstance(b, ours):
            right = isinstance(b, ours)
            state = b if right else a
            found = self._value_product(value, c, state, right)
            return _lost(value, state, found) if isinstance(found, str) else found
        scores = _begin(value, c)
        return _baddbmm(value, scores) if scores and value.op == "baddbmm" else scores

    def _softmax(self, value: Value, state: State | None) -> State | None:
        self.softmaxes.append(value)
        if not isinstance(state, MatchedScores):
            self.misses[value] = state.reason if isinstance(state, Lost) else NO_SCORES
            return None
        dim = value.args.get("dim")
        if not isinstance(dim, int):
            self.misses[value] = "the softmax names no dimension"
            return None
        keys = resolve(state.dims[dim])
        if not keys:
            return Lost(ONE_KEY, value, single=value)
        elif wrong := softmaxes.objection(state, keys):
            self.misses[value] = wrong
        else:
            weights = MatchedWeights(state.dims, (*state.path, value), state, value, keys)
            if value.op == "softmax":
                return weights
            self.softmaxes.pop()  # its exp will be the anchor
            return LogWeights(state.dims, weights.path, weights)
        return None

    def _value_product(
        self, value: Value, c: Contraction, state: MatchedWeights | Exps, right: bool
    ) -> State | str | None:
        lw, lv = (c.lb, c.la) if right else (c.la, c.lb)
        v = c.a if right else c.b
        axes = {x: resolve(g) for x, g in zip(lw, state.dims, strict=True) if x is not None}
        keys = [a for x in c.summed for a in axes.get(x, ())]
        if isinstance(state, MatchedWeights) and set(keys) != state.key_axes():
            return "they are multiplied along another dimension than the keys"
        new = [x for x in c.lo if x is not None and x not in axes]
        if len(new) > 1:
            return "the value has dimensions that the weights lack"
        axes |= {x: (Axis(c.sizes[x], "features"),) for x in new}
        dims = [tuple(() if x is None else axes[x] for x in labels) for labels in (lv, c.lo)]
        features = axes[new[0]] if new else ()
        leaf = Leaf(v, dims[0])
        if isinstance(state, Exps):
            return Late(dims[1], (*state.path, value), state, tuple(keys), leaf, features)
        if state.scores.column and state.keys != state.scores.keys_before:
            return "the column of the sink stays in them"
        self.cores.append(Core(state, leaf, features, dims[1], value))
        return None


def _lost(value: Value, state: Followed, what: str) -> Lost:
    if isinstance(state, MatchedWeights):
        reason = f"the attention weights are not used as they are: {what}"
        return Lost(reason, value, state.softmax)
    return Lost(f"the scores are not scale, bias and mask alone: {what}", value)


def _slices(value: Value, state: Followed) -> bool:
    return isinstance(state, MatchedWeights) and not layout.only_inserts(value)


def _rearranged(value: Value, state: Followed) -> State | str:
    if value.op == "cast" and not value.dtype.is_floating_point:
        return f"they are cast to {value.dtype}"
    dims = layout.forward(value, state.dims)
    if dims is None:
        return f"{raw_name(value.node)} takes their dimensions apart"
    return state.then(value, dims=dims)


def _scores(value: Value, s: MatchedScores, name: str, beside: State | None) -> State | str:
    if value.op == "sub" and name == "input" and isinstance(beside, RowStatistic):
        return softmaxes.shift(value, s, beside)
    if value.op == "exp":
        return softmaxes.exp_of_scores(value, s)
    rule = score_rules.RULES.get(value.op)
    if rule and s.column and rule not in score_rules.BESIDE_A_SINK:
        return f"{raw_name(value.node)} is applied to them and their sink"
    return rule(value, s, name) if rule else f"{raw_name(value.node)} is applied to them"


def _begin(value: Value, c: Contraction) -> MatchedScores | None:
    if not value.dtype.is_floating_point:
        return None
    axes = {x: Axis(n, x) for x, n in c.sizes.items()}

    def dims(labels: tuple[str | None, ...]) -> Dims:
        return tuple(() if x is None else (axes[x],) for x in labels)

    summed: Group = tuple(axes[x] for x in c.summed)
    out = dims(c.lo)
    return MatchedScores(
        out, (value,), Leaf(c.a, dims(c.la)), Leaf(c.b, dims(c.lb)), summed, value, out
    )


def _baddbmm(value: Value, scores: MatchedScores) -> State | None:
    """beta * input + alpha * product"""
    alpha, beta = (number(value.args.get(x, 1)) for x in ("alpha", "beta"))
    if alpha is None or beta is None:
        return None
    scores = dataclasses.replace(scores, scale=float(alpha))
    if beta == 0:
        return scores
    joined = join(value, scores, value.args["input"])
    if isinstance(joined, str):
        return None
    leaf, dims = joined
    return dataclasses.replace(scores, dims=dims, terms=(BiasTerm(leaf, value.dtype, float(beta)),))
