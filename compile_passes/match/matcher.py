"""The matcher: one forward pass over the graph, from the product of query and key through the
softmax to the product with the value.

Rules give the effect of each operation on scores or weights. Where there is no rule the result is a
`Mismatch`, with a reason for the user.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from compile_passes.ir.axes import Axis, Dims, Group, resolve
from compile_passes.ir.constants import constant_value
from compile_passes.ir.graph import GraphView, Value, only_inserts_dims, result_dims
from compile_passes.ir.vocabulary import LAYOUT, raw_name
from compile_passes.match import score_rules, weight_rules
from compile_passes.match.products import (
    Addition,
    Contraction,
    Labels,
    addition,
    align,
    contraction,
    other_operand,
)
from compile_passes.match.states import (
    BiasTerm,
    Core,
    DetachedScores,
    ExpSum,
    HiddenScores,
    InverseExpSum,
    Leaf,
    LogWeights,
    MatchedScores,
    MatchedWeights,
    MatchState,
    Mismatch,
    NanWeights,
    RowStatistic,
    ScoreExps,
    ShiftExp,
    State,
    UnnormalizedOutput,
)
from compile_passes.report import Refusal

NO_SCORES = "its input is not the product of a query and a key"
TALKING_HEADS = "their heads are mixed (talking heads), which needs all of them at once"
WRITTEN = "the scores are written to by"
ONE_KEY = "the softmax runs over a dimension of size 1"
NOT_DIVIDED = "the product of the exponentials with a value is not divided by their sum"
_SOFTMAXES = ("softmax", "log_softmax", "softmin")


class Exponentials:
    """Exponentials of scores: which are multiplied with a value and which became weights. `reasons`
    says why others do not.
    """

    def __init__(self) -> None:
        self.multiplied: set[Value] = set()
        self.finished: set[Value] = set()
        self.reasons: dict[Value, str] = {}

    def unfinished(self) -> list[tuple[Value, str]]:
        """Those that would be weights if a rule described what follows, with the reasons."""
        left = sorted(self.multiplied - self.finished, key=lambda value: value.index)
        return [(exp, self.reasons.get(exp, NOT_DIVIDED)) for exp in left]


class Matcher:
    """The attentions of a graph: `cores`, all `softmaxes`, the reasons (`misses`) why a softmax has
    no core, and the log-sum-exps of scores, `lses`.
    """

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.states: dict[Value, State] = {}
        self.cores: list[Core] = []
        self.softmaxes: list[Value] = []
        self.misses: dict[Value, str] = {}
        self.lses: list[RowStatistic] = []
        self._exponentials = Exponentials()
        for value in view.values.values():
            if value.op and (isinstance(value.tensor, Tensor) or value.op == "max"):
                state = self._transfer(value)
                if state is not None:
                    self.states[value] = state
                if isinstance(state, RowStatistic) and value.op == "logsumexp":
                    self.lses.append(state)
                if isinstance(state, Mismatch):
                    self._note(state)
        for exp, reason in self._exponentials.unfinished():
            self.softmaxes.append(exp)
            self.misses[exp] = reason

    def _note(self, state: Mismatch) -> None:
        if state.softmax:
            self.misses.setdefault(state.softmax, state.reason)
        if state.exp:
            self._exponentials.reasons.setdefault(state.exp, state.reason)

    def _transfer(self, value: Value) -> State | None:
        product = contraction(value)
        masked = product and [self.states.get(x) for x in product.through]
        if product is not None and not any(isinstance(x, ScoreExps) for x in masked):
            return self._product(value, product)
        name, state = self._tracked_argument(value)
        if state is not None and self._guard(value) is state:  # the weights follow
            kept = weight_rules.kept_operand(value, state)
            x = value.args.get(kept)
            name, state = kept, self.states.get(x) if isinstance(x, Value) else None
        if value.op in _SOFTMAXES:
            return self._softmax(value, state)
        if isinstance(state, Mismatch):
            return _still_mismatched(value, state)
        if state is None:
            return None
        try:
            return self._apply(value, state, name)
        except Refusal as refusal:
            return _mismatch(value, state, refusal)

    def _apply(self, value: Value, state: MatchState, name: str) -> State | None:
        if value.writes and name != "input":
            raise Refusal(f"{raw_name(value.node)} writes them into another tensor")
        if isinstance(state, RowStatistic) and value.op == "getitem" and state.path[-1].op == "max":
            if value.args.get("index") != 0:
                raise Refusal("the index of their maximum is used")
            return state.extend(value)
        drops_sink = isinstance(state, MatchedWeights) and value.op == "getitem"
        if value.op in LAYOUT and (not drops_sink or only_inserts_dims(value)):
            return _rearranged(value, state)
        x = other_operand(value, name)
        operand_state = self.states.get(x) if isinstance(x, Value) else None
        if isinstance(state, MatchedScores):
            return _apply_to_scores(value, state, name, operand_state)
        if isinstance(state, DetachedScores):
            return weight_rules.detached_maximum(value, state)
        guard = self._guard(value)
        if isinstance(state, MatchedWeights) and guard:
            return weight_rules.without_empty_rows(value, state, guard)
        if isinstance(state, HiddenScores):
            return weight_rules.hidden_rule(value, state)
        if isinstance(state, NanWeights):
            raise Refusal("it is read where they are NaN")
        if isinstance(state, MatchedWeights):
            return weight_rules.RULES.get(value.op, _unsupported)(value, state, name)
        if isinstance(state, LogWeights) and value.op == "exp":
            self.softmaxes.append(value)
            path = (*state.path, value)
            return dataclasses.replace(state.weights, softmax=value, path=path, dims=state.dims)
        if isinstance(state, RowStatistic):
            return weight_rules.row_rule(value, state, name)
        return self._apply_to_exponentials(value, state, name, x, operand_state)

    def _guard(self, value: Value) -> NanWeights | HiddenScores | None:
        """Where weights are NaN or all scores -inf, if that is the mask of a fill."""
        name = {"masked_fill": "mask", "where": "condition"}.get(value.op)
        mask = value.args.get(name) if name else None
        state = self.states.get(mask) if isinstance(mask, Value) else None
        return state if isinstance(state, (NanWeights, HiddenScores)) else None

    def _apply_to_exponentials(
        self, value: Value, state: MatchState, name: str, x: object, operand_state: State | None
    ) -> State | None:
        """The effect of an operation on exponentials of scores, their sum or their product."""
        if isinstance(state, ScoreExps) and value.op in ("sum", "mean", "norm", "einsum"):
            return weight_rules.sum_of_exps(value, state)
        if isinstance(state, ScoreExps) and weight_rules.hides_exps(value, name):
            return weight_rules.hidden_exps(value, state, name)
        if isinstance(state, ScoreExps) and value.op == "normalize":
            return self._normalised(value, state, weight_rules.normalize(value, state))
        if isinstance(state, ShiftExp) and isinstance(operand_state, ExpSum):
            state, x, operand_state = operand_state, None, state
        if isinstance(state, InverseExpSum) and value.op == "mul":
            state, operand_state, name = operand_state, state, "input"
        if isinstance(state, ExpSum):
            return weight_rules.sum_rule(value, state, name, operand_state or x)
        divisor = {"div": ExpSum, "mul": InverseExpSum}.get(value.op, ())
        if name == "input" and isinstance(operand_state, divisor):
            if not isinstance(state, (ScoreExps, UnnormalizedOutput)):
                raise Refusal("they are divided by something")
            found = weight_rules.normalised(value, state, operand_state)
            return self._normalised(value, state, found)
        if isinstance(state, UnnormalizedOutput) and constant_value(x) and name == "input":
            return weight_rules.scaled_output(value, state, float(constant_value(x)))
        raise Refusal(f"{raw_name(value.node)} is applied to their exponentials")

    def _normalised(
        self, value: Value, state: ScoreExps | UnnormalizedOutput, found: MatchedWeights | Core
    ) -> MatchedWeights | None:
        """The weights that exponentials become, or None with the attention that they complete."""
        self._exponentials.finished.add(_exp_of(state))
        self.softmaxes.append(value)
        if isinstance(found, MatchedWeights):
            return found
        self.cores.append(found)
        return None

    def _tracked_argument(self, value: Value) -> tuple[str, State | None]:
        """The name and state of the first argument that is tracked; a mismatch counts last."""
        found: tuple[str, State | None] = ("", None)
        for name, given in value.args.items():
            several = name in ("tensors", "operands") and isinstance(given, (tuple, list))
            for x in given if several else (given,):
                state = self.states.get(x) if isinstance(x, Value) else None
                if state is not None and (found[1] is None or isinstance(found[1], Mismatch)):
                    found = name, state
        return found

    def _product(self, value: Value, c: Contraction) -> State | None:
        a, b = (self.states.get(x) for x in (c.a, c.b))
        for state in (a, b):
            if isinstance(state, Mismatch) and state.size_one_softmax and not c.through:
                self.misses.setdefault(state.size_one_softmax, state.reason)
            if isinstance(state, Mismatch) and state.exp:
                self._exponentials.multiplied.add(state.exp)
        left, right = (isinstance(state, (MatchedWeights, ScoreExps)) for state in (a, b))
        if left and right:
            return _mismatch(value, a, "two sets of weights are multiplied")
        if left or right:
            state = b if right else a
            try:
                return self._value_product(value, c, state, right)
            except Refusal as refusal:
                return _mismatch(value, state, refusal)
        scores = _new_scores(value, c)
        added = addition(value)
        return _with_addition(value, scores, added) if scores and added else scores

    def _softmax(self, value: Value, state: State | None) -> State | None:
        self.softmaxes.append(value)
        if value.op == "softmin" and isinstance(state, MatchedScores):
            try:
                state = dataclasses.replace(score_rules.neg(value, state, "input"), path=state.path)
            except Refusal as refusal:
                self.misses[value] = str(_mismatch(value, state, refusal).reason)
                return None
        if isinstance(state, DetachedScores):
            state = _mismatch(value, state, weight_rules.DETACHED)
        if not isinstance(state, MatchedScores):
            written = self._writer_of_scores(value.args.get("input"))
            why = f"{WRITTEN} {written}, which is no mask or bias" if written else NO_SCORES
            why += _einsum_before(value)
            self.misses[value] = state.reason if isinstance(state, Mismatch) else why
            return None
        dim = value.args.get("dim")
        if not isinstance(dim, int):
            self.misses[value] = "the softmax has no dim argument"
            return None
        keys = resolve(state.dims[dim])
        if not keys:
            return Mismatch(ONE_KEY, value, size_one_softmax=value)
        try:
            weight_rules.check_over_keys(state, keys)
        except Refusal as refusal:
            self.misses[value] = str(refusal)
            return None
        weights = MatchedWeights(state.dims, (*state.path, value), state, value, keys)
        if value.op != "log_softmax":
            return weights
        self.softmaxes.pop()  # the exp of it counts as the softmax
        return LogWeights(state.dims, weights.path, weights)

    def _writer_of_scores(self, x: object) -> str:
        """The operation that wrote to scores in a way that no rule describes; empty if none did."""
        if not isinstance(x, Value) or x.op or x.writes:
            return ""
        value = self.view.values[x.node]
        written = x.index > value.index and isinstance(self.states.get(value), MatchedScores)
        return raw_name(self.view.at(x.index)) if written else ""

    def _value_product(
        self, value: Value, c: Contraction, state: MatchedWeights | ScoreExps, right: bool
    ) -> State | None:
        added = addition(value)
        if added and (added.coefficient, added.factor) != (0, 1):
            raise Refusal("a tensor is added to their product with the value, or it is scaled")
        labels, v, v_labels = c.a_labels, c.b, c.b_labels
        if right:
            labels, v, v_labels = c.b_labels, c.a, c.a_labels
        axes = {x: resolve(g) for x, g in zip(labels, state.dims, strict=True) if x is not None}
        keys = [a for x in c.summed for a in axes.get(x, ())]
        if isinstance(state, MatchedWeights) and set(keys) != state.key_axes():
            of_both = set(keys) <= state.scores.a.axes() & state.scores.b.axes()
            rows = {axis for group in state.dims[-2:] for axis in resolve(group)}
            if keys and (of_both or rows.isdisjoint(keys)):
                raise Refusal(TALKING_HEADS)
            raise Refusal("they are multiplied along another dimension than the keys")
        # several where rows share their weights, as in an MSA transformer
        new = [x for x in c.out_labels if x is not None and x not in axes]
        axes |= {x: (Axis(c.sizes[x], "features"),) for x in new}
        if any(x is not None and x not in axes for x in v_labels):
            raise Refusal("their product with the value is summed over its features too")
        features = tuple(axis for x in new for axis in axes[x])
        leaf, dims = Leaf(v, _dims(v_labels, axes)), _dims(c.out_labels, axes)
        if isinstance(state, ScoreExps):
            path = (*state.path, *c.through, value)
            if constant_value(v) == 1:
                return weight_rules.sum_by_ones(state, path, tuple(keys), dims, features)
            self._exponentials.multiplied.add(state.exp)
            return UnnormalizedOutput(dims, path, state, tuple(keys), leaf, features)
        if state.scores.sink and state.keys != state.scores.keys_without_sink:
            raise Refusal("the column of the sink is not removed from them")
        state = dataclasses.replace(state, path=(*state.path, *c.through))
        self.cores.append(Core(state, leaf, features, dims, value))
        return None


def _mismatch(value: Value, state: MatchState, what: Refusal | str) -> Mismatch:
    if isinstance(state, MatchedWeights):
        reason = f"the attention weights are not used as they are: {what}"
        return Mismatch(reason, value, state.softmax)
    exp = value if value.op == "gumbel_softmax" else _exp_of(state)
    what_is_left = "scores are not scale, bias and mask alone"
    if exp and exp is not value:
        what_is_left = "exponentials of the scores do not become weights"
    return Mismatch(f"the {what_is_left}: {what}", value, exp=exp)


def _still_mismatched(value: Value, state: Mismatch) -> Mismatch | None:
    """The state of a mismatch after an operation; None if it is no longer followed."""
    exp = value if value.op in ("exp", "exp2") and not state.softmax else state.exp
    known = value.op in score_rules.RULES or value.op in LAYOUT or exp is value
    return dataclasses.replace(state, value=value, exp=exp) if known else None


def _exp_of(state: MatchState) -> Value | None:
    """The node that computed the exponentials of a state."""
    if isinstance(state, InverseExpSum):
        state = state.total
    if isinstance(state, (ExpSum, UnnormalizedOutput)):
        state = state.exps
    return state.exp if isinstance(state, ScoreExps) else None


def _rearranged(value: Value, state: MatchState) -> State:
    if value.op == "cast" and not value.dtype.is_floating_point:
        raise Refusal(f"they are cast to {value.dtype}")
    dims = result_dims(value, state.dims)
    if dims is None and value.op == "getitem":
        raise Refusal("they are indexed")
    if dims is None:
        raise Refusal(f"{raw_name(value.node)} rearranges their dimensions")
    return state.extend(value, dims=dims)


def _apply_to_scores(
    value: Value, s: MatchedScores, name: str, operand_state: State | None
) -> State:
    if value.op == "sub" and name == "input" and isinstance(operand_state, RowStatistic):
        return weight_rules.subtract_row(value, s, operand_state)
    base = 2.0 if value.op == "exp2" else constant_value(value.args.get("input"))
    is_power = value.op == "exp2" or (value.op == "pow" and name == "other")
    if is_power and not s.sink and base and base > 0 and base != 1:
        return weight_rules.exponentials(value, s, base)
    if value.op == "eq" and not s.sink:
        return weight_rules.hidden_scores(value, s, name)
    if value.op == "exp":
        return ScoreExps(s.dims, (*s.path, value), s, value)
    if value.op == "detach":
        return DetachedScores(s.dims, (*s.path, value), s)
    rule = score_rules.RULES.get(value.op, _unsupported)
    if s.sink and rule not in (_unsupported, *score_rules.ALLOWED_WITH_SINK):
        raise Refusal(f"{raw_name(value.node)} is applied to them and their sink")
    return rule(value, s, name)


def _einsum_before(softmax: Value, depth: int = 12) -> str:
    """What a softmax is of, if it is of an einsum that is no product of two tensors."""
    x = softmax.args.get("input")
    while isinstance(x, Value) and x.op and depth:
        if x.op == "einsum":
            n = len(x.node.all_input_nodes)
            return f", but an einsum of {n} tensors that is no product of two with a sum over both"
        x, depth = x.args.get("input"), depth - 1
    return ""


def _unsupported(value: Value, state: MatchState, name: str) -> State:
    if raw_name(value.node) in ("conv1d", "conv2d", "linear") and name == "input":
        raise Refusal(TALKING_HEADS)
    if value.op == "einsum":
        raise Refusal("an einsum is applied to them that is no product with a value")
    raise Refusal(f"{raw_name(value.node)} is applied to them")


def _dims(labels: Labels, axes: dict[str, Group]) -> Dims:
    return tuple(() if x is None else axes[x] for x in labels)


def _new_scores(value: Value, c: Contraction) -> MatchedScores | None:
    if not value.dtype.is_floating_point:
        return None
    axes = {x: (Axis(n, x),) for x, n in c.sizes.items()}
    a, b = Leaf(c.a, _dims(c.a_labels, axes)), Leaf(c.b, _dims(c.b_labels, axes))
    summed = tuple(axes[x][0] for x in c.summed)
    out = _dims(c.out_labels, axes)
    return MatchedScores(out, (value,), a, b, summed, value, out)


def _with_addition(value: Value, scores: MatchedScores, added: Addition) -> State | None:
    """The scores with what the node of their product adds to them."""
    term, coefficient, factor = added
    if coefficient is None or factor is None:
        return None
    scores = dataclasses.replace(scores, scale=float(factor))
    if coefficient == 0:
        return scores
    try:
        leaf, dims = align(value, scores, term)
    except Refusal:
        return None
    bias = BiasTerm(leaf, value.dtype, float(coefficient))
    return dataclasses.replace(scores, dims=dims, terms=(bias,))
