"""What the matcher has found about a value: scores, weights, a softmax in parts, or why they were
lost.
"""

from __future__ import annotations

import dataclasses

import torch

from compile_passes.graph.axes import Axis, Dims, Group, flat, resolve
from compile_passes.graph.ir import Value

# A fill at or below this is out of reach of real scores: exp(fill - score) is 0 in every dtype.
FAR = -1e4
# A number is as far from 0 as that over eps: real scores vanish beside it. finfo(float16).min is.
VANISHING = 63.0
# In training no row's masks may exceed it: the log-sum-exp that the backward pass reads the weights
# from is one float32.
LARGEST_SUM = 64.0


def vanishes_beside(number: float, dtype: torch.dtype) -> bool:
    """Whether real scores added to the number in this dtype are lost to rounding."""
    return abs(number) * torch.finfo(dtype).eps >= VANISHING


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What joins the scores from outside: a number, a symbol, or a tensor aligned with them."""

    value: Value | float
    dims: Dims = ()

    def axes(self) -> set[Axis]:
        return set(flat(self.dims))


@dataclasses.dataclass(frozen=True)
class BiasTerm:
    """scores + coefficient * leaf, in `dtype`"""

    leaf: Leaf
    dtype: torch.dtype
    coefficient: float = 1.0


@dataclasses.dataclass(frozen=True)
class FillTerm:
    """Scores become `value` where the mask is `where`."""

    mask: Leaf
    where: bool
    value: float


@dataclasses.dataclass(frozen=True)
class FloorTerm:
    """Scores below `value` become it; those at it pass on this share of their gradient."""

    value: float
    share: float


@dataclasses.dataclass(frozen=True)
class _Followed:
    """`path`: every node so far, none of which survives the rewrite."""

    dims: Dims
    path: tuple[Value, ...]

    def then(self, value: Value, **changes):
        return dataclasses.replace(self, **{"path": (*self.path, value), **changes})


@dataclasses.dataclass(frozen=True)
class MatchedScores(_Followed):
    """softcap * tanh(scale * factors * (a . b) / softcap), then the terms in order.

    `column`: a sink logit was concatenated to the keys, which were `keys_before`; it stands `ahead`
    of them or behind.
    """

    a: Leaf
    b: Leaf
    summed: Group
    product: Value
    product_dims: Dims
    scale: float = 1.0
    factors: tuple[Leaf, ...] = ()  # multiply
    divisors: tuple[Leaf, ...] = ()
    softcap: float = 0.0
    terms: tuple[BiasTerm | FillTerm | FloorTerm, ...] = ()
    shift: RowStatistic | None = None  # subtracted: the same number in a whole row
    column: Leaf | None = None
    ahead: bool = False
    keys_before: Group = ()


@dataclasses.dataclass(frozen=True)
class MatchedWeights(_Followed):
    """softmax(scores) over the axes `keys`, perhaps dropped out, times gain and factors (constant
    along the keys).
    """

    scores: MatchedScores
    softmax: Value
    keys: Group
    dropout_p: float = 0.0
    gain: float = 1.0
    factors: tuple[Leaf, ...] = ()
    zero_sink: bool = False  # 1 + sum(exp(scores)) was the denominator
    zeroed: FillTerm | None = None  # masked again after the softmax, with 0

    def key_axes(self) -> set[Axis]:
        return set(resolve(self.keys))


@dataclasses.dataclass(frozen=True)
class LogWeights(_Followed):
    """log(weights)"""

    weights: MatchedWeights


@dataclasses.dataclass(frozen=True)
class RowStatistic(_Followed):
    """One number per row of the scores: their maximum, or something made of it; `lse`: their
    log-sum-exp.
    """

    scores: MatchedScores
    keys: Group
    lse: bool = False
    negative: bool = False


@dataclasses.dataclass(frozen=True)
class Exps(_Followed):
    """exp(scores - shift)"""

    scores: MatchedScores


@dataclasses.dataclass(frozen=True)
class ShiftExp(_Followed):
    """exp(-shift), a sink of 0 beside shifted scores"""

    row: RowStatistic


@dataclasses.dataclass(frozen=True)
class Total(_Followed):
    """The sum of Exps over the keys, perhaps with a sink of 0."""

    exps: Exps
    keys: Group
    zero_sink: bool = False


@dataclasses.dataclass(frozen=True)
class Late(_Followed):
    """Exps times the value, not yet divided by their Total."""

    exps: Exps
    keys: Group
    v: Leaf
    features: Group


@dataclasses.dataclass(frozen=True)
class Lost:
    """Was scores or weights until `value` did something that a softmax attention does not do."""

    reason: str
    value: Value
    softmax: Value | None = None
    single: Value | None = None  # a softmax over one key: attention only if a value follows


@dataclasses.dataclass(frozen=True)
class Core:
    """One whole attention: weights times `v`, laid out as `dims`."""

    weights: MatchedWeights
    v: Leaf
    features: Group
    dims: Dims
    out: Value

    @property
    def path(self) -> tuple[Value, ...]:
        return self.weights.path


Followed = (
    MatchedScores | MatchedWeights | LogWeights | RowStatistic | Exps | ShiftExp | Total | Late
)
State = Followed | Lost
