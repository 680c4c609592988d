"""What the terms of the scores mean: which masks are causal or windows, and what is left to a dense
mask.

A finite fill (finfo.min, -1e9) is not -inf: a row whose keys are all filled averages every value.
It may become a flag of the operator only where every row provably attends a key. Else the fill is
kept: as part of an additive mask where the user adds it, and where scores are replaced by it, by
giving the rows without keys a zero query and all keys.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import sympy
import torch

from compile_passes.axes import Axis, resolve_dims
from compile_passes.elements import Reader, as_number, coordinates
from compile_passes.expressions import (
    All,
    AtMost,
    Choice,
    Condition,
    Element,
    all_of,
    any_of,
    negate,
    symbolic,
)
from compile_passes.plan import Plan, Refused
from compile_passes.states import Bias, Fill, Leaf

# A fill at or below this is out of reach of real scores: exp(fill - score) is 0 in every dtype.
FAR = -1e4


class Dead(enum.Enum):
    """What a row is whose keys are all masked."""

    ZERO = "0 (eager: NaN)"
    UNIFORM = "the mean of the values; scores are replaced by the fill"
    ABSORBED = "the mean of the values; scores vanish beside the fill, gradients pass to them"
    ADDED = "as if nothing were masked; the fill is common to the row"


@dataclasses.dataclass(frozen=True)
class Keep:
    """Scores stay where the leaf is `kept`: True, False, or 0 for an additive mask."""

    leaf: Leaf
    kept: bool | float


@dataclasses.dataclass(frozen=True)
class Masks:
    """`window` is (left, right) around the bottom-right diagonal; None: unbounded, right 0: causal.

    `biases` and `keeps` stay dense.
    """

    left: int | None = None
    right: int | None = None
    biases: tuple[Bias, ...] = ()
    keeps: tuple[Keep, ...] = ()
    dead: Dead = Dead.ZERO
    zeroed: Fill | None = None  # by zeroed keys and a bias

    def describe(self) -> str:
        parts = []
        if self.right == 0:
            parts.append("is_causal")
        if self.left is not None or self.right not in (None, 0):
            parts.append(f"window=({self.left}, {self.right})")
        if self.biases or self.keeps or self.zeroed:
            parts.append("dense attn_mask")
        return ", ".join(parts) or "no mask"


Meaning = tuple[Condition, float] | None  # (which scores stay, what the others get)
Term = Bias | Fill


def understand(plan: Plan, reader: Reader) -> Masks:
    """Raises Refused where a fill can't be kept."""
    terms = _without_constants(plan)
    meanings = {t: _read(t, reader) for t in terms}
    terms = [t for t in terms if meanings[t] is None or meanings[t][0] is not True]
    if plan.sunk or _zeroed_alike(plan, terms):  # rows without keys give 0, as -inf does
        meanings = {t: m and (m[0], -math.inf) for t, m in meanings.items()}
    bands = [t for t in terms if meanings[t] and _window([meanings[t]], plan) is not None]
    dense = [t for t in terms if t not in bands]
    window = _window([meanings[t] for t in bands], plan)
    if dense or not _every_row_attends(window, plan):  # then only an exact -inf may be a flag
        bands = [t for t in bands if meanings[t][1] == -math.inf]
        dense = [t for t in terms if t not in bands]
        window = _window([meanings[t] for t in bands], plan)
    if len(dense) == 1 and not bands:
        keep = _additive(dense[0], meanings[dense[0]])
        if keep is not None:
            return Masks(keeps=(keep[0],), dead=keep[1])
        zeroed = _small_fill(dense[0], plan)
        if zeroed is not None:
            return Masks(zeroed=zeroed)
    return _fallback(window, dense, meanings, bool(bands))


def _zeroed_alike(plan: Plan, terms: list[Term]) -> bool:
    """Whether the weights are masked again after the softmax, with the scores' own mask."""
    zeroed = plan.core.weights.zeroed
    if zeroed is None:
        return False
    masked = [t for t in terms if isinstance(t, Fill)]
    for fill in masked:
        alike = fill.mask.value is zeroed.mask.value and fill.where == zeroed.where
        if alike and fill.value <= FAR and len(masked) == len(terms) == 1:
            return resolve_dims(fill.mask.dims) == resolve_dims(zeroed.mask.dims)
    raise Refused("the attention weights are masked after the softmax, not as the scores were")


def _small_fill(term: Term, plan: Plan) -> Fill | None:
    """A fill that real scores could pass, the same for every query: then the keys can be zeroed and
    the fill added.
    """
    if not isinstance(term, Fill) or not FAR < term.value < math.inf:
        return None
    keys = {*plan.batch, *plan.kv_heads, *plan.keys}
    return term if term.mask.axes() <= keys else None


def _additive(term: Term, meaning: Meaning) -> tuple[Keep, Dead] | None:
    """An additive mask of 0 and one far number as a bool mask, which says what dead rows are."""
    if not isinstance(term, Bias) or meaning is None:
        return None
    fill = meaning[1]
    if fill == -math.inf:
        return Keep(term.leaf, 0.0), Dead.ZERO
    absorbed = -fill * torch.finfo(term.dtype).eps >= 64
    return Keep(term.leaf, 0.0), Dead.ABSORBED if absorbed else Dead.ADDED


def _fallback(window: Window, dense: list[Term], meanings: dict, flagged: bool) -> Masks:
    """Biases added up, masks joined."""
    exact = {t for t in dense if meanings[t] and meanings[t][1] == -math.inf}
    biases = tuple(t for t in dense if isinstance(t, Bias) and t not in exact)
    fills = [t for t in dense if isinstance(t, Fill)]
    finite = [t for t in fills if t not in exact]
    _check_fills(dense, finite, flagged or len(exact) > 0)
    masks = (t for t in dense if t in exact or t in fills)
    keeps = tuple(
        Keep(t.leaf, 0.0) if isinstance(t, Bias) else Keep(t.mask, not t.where) for t in masks
    )
    return Masks(*window, biases, keeps, Dead.UNIFORM if finite else Dead.ZERO)


_NOTHING = (True, 0.0)
Window = tuple[int | None, int | None]


def _without_constants(plan: Plan) -> list[Term]:
    """A number added to all scores changes nothing but the fills before it, and softmax ignores
    what is common to a row.
    """
    result, shift = [], 0.0
    for term in plan.scores.terms:
        if isinstance(term, Bias) and isinstance(term.leaf.value, float):
            shift += term.coefficient * term.leaf.value
        elif isinstance(term, Fill):
            result.append(dataclasses.replace(term, value=term.value - shift))
        else:
            result.append(term)
    if shift and plan.sunk:
        raise Refused("a number is added to the scores but not to their sink")
    return result


def _read(term: Term, reader: Reader) -> Meaning:
    """(which scores are kept, what the others are filled with or get added)."""
    leaf = term.leaf if isinstance(term, Bias) else term.mask
    element = _element(leaf, reader)
    if element is None:
        return None
    if isinstance(term, Fill):
        keep = negate(element) if term.where else element
        return (keep, term.value) if term.value <= FAR else None
    return _keep(element, term.coefficient)


def _element(leaf: Leaf, reader: Reader) -> Element | None:
    at = coordinates(resolve_dims(leaf.dims))
    return None if at is None or isinstance(leaf.value, float) else reader.element(leaf.value, at)


def _keep(x: Element, coefficient: float) -> Meaning:
    """An additive mask: 0 where kept, one far negative number (or several) elsewhere."""
    if isinstance(x, Choice):
        yes, no = _keep(x.yes, coefficient), _keep(x.no, coefficient)
        if yes is None or no is None:
            return None
        keep = any_of(all_of(x.condition, yes[0]), all_of(negate(x.condition), no[0]))
        return keep, max((f for f in (yes[1], no[1]) if f), default=0.0)
    value = as_number(x)
    if value is None:
        return None
    if value == 0:
        return _NOTHING
    return (False, value * coefficient) if value * coefficient <= FAR else None


def _window(meanings: list[Meaning], plan: Plan) -> Window | None:
    """(left, right) if the scores kept are a band around the diagonal; None if they are anything
    else.
    """
    keep = all_of(*(m[0] for m in meanings))
    if keep is True:
        return None, None
    literals = keep.conditions if isinstance(keep, All) else {keep}
    i, j = (_only(g) for g in (plan.queries, plan.keys))
    if i is None or j is None:
        return None
    diagonal = symbolic(j.size) - symbolic(i.size)
    left: int | None = None
    right: int | None = None
    for literal in literals:
        if not isinstance(literal, AtMost):
            return None
        terms, c = dict(literal.a.terms), literal.a.constant
        if terms == {j: 1, i: -1}:  # j <= i - c
            reach = sympy.expand(-c - diagonal)
            right = _tighter(right, reach)
        elif terms == {j: -1, i: 1}:  # j >= i + c
            reach = sympy.expand(diagonal - c)
            left = _tighter(left, reach)
        else:
            return None
        if not isinstance(reach, sympy.Integer) or reach < 0:
            return None
    return left, right


def _tighter(bound: int | None, reach: sympy.Expr) -> int | None:
    if not isinstance(reach, sympy.Integer):
        return bound
    return int(reach) if bound is None else min(bound, int(reach))


def _only(group: tuple[Axis, ...]) -> Axis | None:
    return group[0] if len(group) == 1 else None


def _every_row_attends(window: Window, plan: Plan) -> bool:
    """A band holds the diagonal, whose key exists for every query if there are as many keys as
    queries.
    """
    i, j = _only(plan.queries), _only(plan.keys)
    if window == (None, None):
        return True
    surplus = sympy.expand(symbolic(j.size) - symbolic(i.size))
    return bool(surplus.is_nonnegative)


def _check_fills(dense: list[Term], finite: list[Fill], others: bool) -> None:
    """Whether the dense mask can say what the finite fills do."""
    if not finite:
        return
    if any(not f.value <= FAR for f in finite):
        raise Refused(
            f"scores are filled with {finite[0].value:g}, which is not far enough below them to "
            "be a mask"
        )
    first = dense.index(finite[0])
    if len({f.value for f in finite}) > 1 or others:
        raise Refused("several masks with different fill values: rows without keys would differ")
    if any(isinstance(t, Bias) for t in dense[first:]):
        raise Refused("a bias is added to scores after a finite fill value")
