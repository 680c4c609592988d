"""What the matcher has found about a value: scores, weights, a softmax in parts, or why it is none
of these.
"""

from __future__ import annotations

import dataclasses

import torch

from compile_passes.ir.axes import Axis, Dims, Group, all_axes, resolve
from compile_passes.ir.graph import Value, is_tensor

# A fill at or below this is taken as a mask: exp(fill - score) is 0 in every dtype.
MAX_MASK_FILL = -1e4
# Real scores are lost to rounding beside a number whose spacing (number * eps) is at least this.
# finfo(float16).min is such a number.
MIN_ABSORBING_SPACING = 63.0
# The largest maximum of a row's masks in training: the backward pass reads the weights from a
# log-sum-exp, which is one float32.
MAX_ROW_MASK = 64.0


def absorbing_number(dtype: torch.dtype, rescaled: float = 1.0) -> float:
    """The smallest magnitude of a number to which real scores are lost by rounding when both are
    added in this dtype. The number is given after later multiplications, by `rescaled` in all.
    """
    return MIN_ABSORBING_SPACING / torch.finfo(dtype).eps * abs(rescaled)


def absorbs_scores(number: float, dtype: torch.dtype, rescaled: float = 1.0) -> bool:
    """Whether real scores are lost beside a number, as `absorbing_number` says."""
    return abs(number) >= absorbing_number(dtype, rescaled)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An operand of the scores or weights: a number, a symbol, or a tensor with its dims."""

    value: Value | float
    dims: Dims = ()

    def axes(self) -> set[Axis]:
        """The axes along which the operand varies."""
        return set(all_axes(self.dims))


@dataclasses.dataclass(frozen=True)
class BiasTerm:
    """scores + coefficient * leaf, in `dtype`; `rescaled`: the part of the coefficient by which
    both were multiplied after the addition.
    """

    leaf: Leaf
    dtype: torch.dtype
    coefficient: float = 1.0
    rescaled: float = 1.0


@dataclasses.dataclass(frozen=True)
class FillTerm:
    """Scores are replaced in `dtype` where the mask equals `where`. `value` is the number after all
    later multiplications, whose product is `rescaled`. The mask is bool, or holds 0 and 1.
    `factor`: the tensor of 0 and 1 that they were multiplied by.
    """

    mask: Leaf
    where: bool
    value: float
    dtype: torch.dtype
    rescaled: float = 1.0
    factor: Value | None = None


@dataclasses.dataclass(frozen=True)
class ClampTerm:
    """max(scores, value); scores equal to `value` receive this share of their gradient."""

    value: float
    grad_share: float


@dataclasses.dataclass(frozen=True)
class MatchState:
    """A tensor with axes `dims`, computed by the nodes in `path`, which a rewrite removes."""

    dims: Dims
    path: tuple[Value, ...]

    def extend(self, value: Value, **changes):
        """The state of `value`, the next node of the path."""
        return dataclasses.replace(self, **{"path": (*self.path, value), **changes})


@dataclasses.dataclass(frozen=True)
class MatchedScores(MatchState):
    """softcap * tanh(scale * factors / divisors * (a . b) / softcap), then the terms in order.

    `sink`: a logit that was concatenated to the keys, before them if `sink_first`.
    """

    a: Leaf
    b: Leaf
    summed: Group
    product: Value
    product_dims: Dims
    scale: float = 1.0
    factors: tuple[Leaf, ...] = ()
    divisors: tuple[Leaf, ...] = ()
    softcap: float = 0.0
    terms: tuple[BiasTerm | FillTerm | ClampTerm, ...] = ()
    shift: RowStatistic | None = None  # subtracted from each row
    sink: Leaf | None = None
    sink_first: bool = False
    keys_without_sink: Group = ()


@dataclasses.dataclass(frozen=True)
class KeyGate:
    """A factor of the weights that varies along the keys, or a divisor."""

    leaf: Leaf
    divides: bool = False


@dataclasses.dataclass(frozen=True)
class MatchedWeights(MatchState):
    """softmax(scores) over `keys`, with dropout, times `gain` and `factors` without key axes, and
    times `gates`, or 0 where these are fills.
    """

    scores: MatchedScores
    softmax: Value
    keys: Group
    dropout_p: float = 0.0
    gain: float = 1.0
    factors: tuple[Leaf, ...] = ()
    zero_sink: bool = False  # the denominator was 1 + sum(exp(scores))
    zero_fill: FillTerm | None = None  # weights that were filled with 0 after the softmax
    row_fills: tuple[FillTerm, ...] = ()  # rows that were, by masks without key axes
    gates: tuple[KeyGate | FillTerm, ...] = ()
    by_lse: bool = False  # computed as exp(scores - logsumexp(scores))

    def key_axes(self) -> set[Axis]:
        """The axes of the keys."""
        return set(resolve(self.keys))

    def gate_leaves(self) -> tuple[Leaf, ...]:
        """The tensors of the gates."""
        return tuple(g.leaf if isinstance(g, KeyGate) else g.mask for g in self.gates)


@dataclasses.dataclass(frozen=True)
class NanWeights(MatchState):
    """Whether weights are NaN"""

    weights: MatchedWeights


@dataclasses.dataclass(frozen=True)
class HiddenScores(MatchState):
    """Whether scores are -inf, or are not if `inverted`. Of rows once `keys` are given: whether all
    are, or any is not.
    """

    scores: MatchedScores
    inverted: bool = False
    keys: Group = ()


@dataclasses.dataclass(frozen=True)
class LogWeights(MatchState):
    """log(weights)"""

    weights: MatchedWeights


@dataclasses.dataclass(frozen=True)
class DetachedScores(MatchState):
    """Scores without their gradient, of which only the maximum is used."""

    scores: MatchedScores


@dataclasses.dataclass(frozen=True)
class RowStatistic(MatchState):
    """The log-sum-exp of each row of the scores if `lse`, else a function of their maximum."""

    scores: MatchedScores
    keys: Group
    lse: bool = False
    negative: bool = False


@dataclasses.dataclass(frozen=True)
class ScoreExps(MatchState):
    """exp(scores - shift), computed by `exp`"""

    scores: MatchedScores
    exp: Value


@dataclasses.dataclass(frozen=True)
class ShiftExp(MatchState):
    """exp(-shift), a sink of 0 beside shifted scores"""

    row: RowStatistic


@dataclasses.dataclass(frozen=True)
class ExpSum(MatchState):
    """The sum of ScoreExps over the keys, and of a sink of 0 if `zero_sink`, over a number."""

    exps: ScoreExps
    keys: Group
    zero_sink: bool = False
    divisor: float = 1.0  # the number of keys where it is their mean


@dataclasses.dataclass(frozen=True)
class InverseExpSum(MatchState):
    """1 / ExpSum"""

    total: ExpSum


@dataclasses.dataclass(frozen=True)
class UnnormalizedOutput(MatchState):
    """ScoreExps times the value and `gain`, not yet divided by their ExpSum."""

    exps: ScoreExps
    keys: Group
    v: Leaf
    features: Group
    gain: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A value derived from scores or weights by an operation that softmax attention lacks.

    `exp` computed the exponentials that it is derived from.
    """

    reason: str
    value: Value
    softmax: Value | None = None
    size_one_softmax: Value | None = None  # attention over one key, if a value follows
    exp: Value | None = None


@dataclasses.dataclass(frozen=True)
class Core:
    """One complete attention: weights times `v`, with axes `dims`."""

    weights: MatchedWeights
    v: Leaf
    features: Group
    dims: Dims
    out: Value

    @property
    def path(self) -> tuple[Value, ...]:
        """The nodes that compute the weights."""
        return self.weights.path


State = MatchState | Mismatch


def without_cast(leaf: Leaf) -> Leaf:
    """A mask of 0 and 1 before it was cast from bool."""
    x = leaf.value
    if isinstance(x, Value) and x.op == "cast" and not x.writes:
        inner = x.args.get("input")
        if is_tensor(inner) and inner.dtype == torch.bool:
            return Leaf(inner, leaf.dims)
    return leaf
