"""The terms of the scores that are masks, masks that are applied to weights again, and masks with
which each query attends one interval of keys.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import NamedTuple

import sympy
import torch

from compile_passes.ir.axes import Axis, Dims, broadcast_dims, is_nonnegative, resolve_dims
from compile_passes.ir.constants import constant_value, is_zero_or_one, number_beside_zeros
from compile_passes.ir.graph import Value, input_dims, is_tensor, same_contents, source, undo_layout
from compile_passes.ir.vocabulary import LAYOUT
from compile_passes.masks.affine import (
    Affine,
    All,
    Any,
    AtMost,
    Choice,
    Condition,
    Element,
    Opaque,
    Quotient,
    Rank,
    all_of,
    any_of,
    as_number,
    at_most,
    negate,
    sort_key,
    symbolic,
)
from compile_passes.masks.symbolic_evaluator import SymbolicEvaluator, coordinates
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.states import (
    MAX_MASK_FILL,
    BiasTerm,
    ClampTerm,
    Core,
    FillTerm,
    Leaf,
    absorbs_scores,
)
from compile_passes.report import Refusal

# Documents packed into one row, as models recognise them in position ids: a new document starts
# where the positions do not count on by one.
#
# `document = (positions.diff() != 1).cumsum(-1)` never decreases along the keys, so the keys of a
# document are an interval, and inside it positions differ as indices do.


def never_decreases(x: object) -> bool:
    """Whether the elements along the last dimension provably never decrease."""
    if not is_tensor(x) or x.writes or not x.shape:
        return False
    given = x.args.get("input")
    if x.op in ("cast", "copy"):
        same = x.dtype == torch.int64 or (is_tensor(given) and x.dtype == given.dtype)
        return same and never_decreases(given)
    return _counts_along_last(x) and _is_zero_or_one(given)


def _counts_along_last(x: Value) -> bool:
    """Whether x is a cumulative sum along its last dimension, in int64."""
    last = x.args.get("dim") in (-1, len(x.shape) - 1)
    return x.op == "cumsum" and not x.writes and last and x.dtype == torch.int64


def _is_zero_or_one(x: object) -> bool:
    if not is_tensor(x) or x.writes:
        return False
    return x.dtype == torch.bool or (x.op in LAYOUT and _is_zero_or_one(x.args.get("input")))


def with_indices_for_positions(keep: Condition) -> Condition:
    """The condition with indices in place of positions where both are of the same document."""
    if not isinstance(keep, All):
        return keep
    pairs = [(c, _compared(c)) for c in keep.conditions]
    ordered = [pair for c, pair in pairs if pair and c.a.constant == 0]
    documents = [(x, y) for x, y in ordered if (y, x) in ordered]
    numbered = [(pair, _positions_of(pair[0].value)) for pair in documents]
    found = [(pair, positions) for pair, positions in numbered if positions is not None]
    return all_of(*(_with_indices(c, found) for c in keep.conditions)) if found else keep


def _compared(c: Condition) -> tuple[Opaque, Opaque] | None:
    """(x, y) of the condition x <= y, or x + c <= y, of elements of one tensor."""
    if not isinstance(c, AtMost) or len(c.a.terms) != 2:
        return None
    by_sign = {sign: x for x, sign in c.a.terms}
    x, y = by_sign.get(1), by_sign.get(-1)
    if not isinstance(x, Opaque) or not isinstance(y, Opaque) or x.value is not y.value:
        return None
    return (x, y) if x.coordinates[:-1] == y.coordinates[:-1] else None


def _positions_of(document: object) -> Value | None:
    """The positions in `(positions.diff() != 1).cumsum(-1)`."""
    steps = document.args.get("input") if _counts_along_last(document) else None
    if not isinstance(steps, Value) or steps.op != "ne" or steps.writes:
        return None
    difference, one = steps.args.get("input"), steps.args.get("other")
    if constant_value(one) != 1 or not isinstance(difference, Value) or difference.op != "diff":
        return None
    first_order = difference.args.get("n", 1) == 1 and difference.args.get("append") is None
    if not first_order or difference.args.get("dim", -1) not in (-1, len(difference.shape) - 1):
        return None
    positions = difference.args.get("input")
    same = is_tensor(positions) and positions.shape == difference.shape
    return positions if same and positions.dtype == torch.int64 else None


def _with_indices(c: Condition, documents: list) -> Condition:
    pair = _compared(c)
    for (first, second), positions in documents if pair else ():
        x, y = pair
        rows = {first.coordinates, second.coordinates}
        if same_contents(x.value, positions) and {x.coordinates, y.coordinates} == rows:
            constant = Affine.from_size(c.a.constant)
            return at_most(x.coordinates[-1].plus(y.coordinates[-1], -1).plus(constant))
    return c


# Masks with which each query attends one interval of keys.
#
# A condition on the key j is an interval if its bounds on j do not depend on j: causal masks with
# an offset that is known only at run time, windows, chunks (i // c == j // c), prefixes, documents
# numbered by a cumulative sum.


class Extreme(NamedTuple):
    """The maximum or minimum of several bounds."""

    is_max: bool
    bounds: tuple


Bound = Affine | Extreme


@dataclasses.dataclass(frozen=True)
class KeyInterval:
    """low <= j < high, unbounded where None. `leaf` is the mask that it replaces."""

    low: Bound | None
    high: Bound | None
    leaf: Leaf | None = None


def key_interval(keep: Condition, j: Axis) -> KeyInterval | None:
    """The interval of keys that a condition keeps; None if it is not provably one."""
    if keep is True:
        return KeyInterval(None, None)
    if isinstance(keep, AtMost):
        return _inequality_interval(keep.a, j)
    if not isinstance(keep, (All, Any)):
        return None
    intervals = [key_interval(c, j) for c in sorted(keep.conditions, key=sort_key)]
    if None in intervals:
        return None
    lows = [r.low for r in intervals if r.low is not None]
    highs = [r.high for r in intervals if r.high is not None]
    if isinstance(keep, All):
        return KeyInterval(_extreme(True, lows), _extreme(False, highs))
    if lows and highs:
        return None
    return KeyInterval(_extreme(False, lows), _extreme(True, highs))  # all unbounded on one side


def _extreme(is_max: bool, bounds: list[Bound]) -> Bound | None:
    if len(bounds) < 2:
        return bounds[0] if bounds else None
    return Extreme(is_max, tuple(bounds))


def _inequality_interval(a: Affine, j: Axis) -> KeyInterval | None:
    """The keys at which a <= 0.

    a is c * j + rest, or c * ((j + shift) // n) + rest, with c = 1 or -1.
    """
    terms = [(x, c) for x, c in a.terms if _depends(x, j)]
    if len(terms) != 1 or abs(terms[0][1]) != 1:
        return None
    ((x, c),) = terms
    rest = a.plus(Affine.variable(x).times(c), -1)
    shift, n = Affine.from_size(0), 1
    if isinstance(x, Opaque):
        return _sorted_interval(x, c, rest, j)
    if isinstance(x, Quotient):
        shift, n = x.a.plus(Affine.variable(j), -1), x.n
        if any(_depends(y, j) for y, _ in shift.terms):
            return None
    elif x is not j:
        return None
    if c > 0:  # (j + shift) // n <= -rest
        return KeyInterval(None, Affine.from_size(1).plus(rest, -1).times(n).plus(shift, -1))
    return KeyInterval(rest.times(n).plus(shift, -1), None)


def _sorted_interval(x: Opaque, c: int, rest: Affine, j: Axis) -> KeyInterval | None:
    """The keys at which x[..., j] <= -rest, or >= rest if c = -1, for a sorted tensor."""
    *others, last = x.coordinates
    if last != Affine.variable(j) or any(_depends(y, j) for at in others for y, _ in at.terms):
        return None
    if not never_decreases(x.value):
        return None
    if c > 0:
        return KeyInterval(None, Affine.variable(Rank(x, Affine.from_size(0).plus(rest, -1), True)))
    return KeyInterval(Affine.variable(Rank(x, rest, False)), None)


def _depends(x: object, j: Axis) -> bool:
    if isinstance(x, Quotient):
        return any(_depends(y, j) for y, _ in x.a.terms)
    if isinstance(x, Opaque):
        return any(_depends(y, j) for at in x.coordinates for y, _ in at.terms)
    return x is j


def attends_itself(keep: Condition, i: Axis | None, j: Axis) -> bool:
    """Whether each query provably keeps the key at its own position, and that key exists."""
    if i is None:
        return False
    surplus = sympy.expand(symbolic(j.size) - symbolic(i.size))
    position = Affine.variable(i).plus(Affine.from_size(surplus))
    return bool(surplus.is_nonnegative) and _at(keep, j, position) is True


def _at(c: Condition, j: Axis, position: Affine) -> Condition:
    """The condition for the key at `position`."""
    if isinstance(c, (All, Any)):
        join = all_of if isinstance(c, All) else any_of
        return join(*(_at(x, j, position) for x in c.conditions))
    return at_most(_substitute(c.a, j, position)) if isinstance(c, AtMost) else c


def _substitute(a: Affine, j: Axis, position: Affine) -> Affine:
    result = Affine.from_size(a.constant)
    for x, c in a.terms:
        if isinstance(x, Quotient):
            x = Affine.variable(Quotient(_substitute(x.a, j, position), x.n))
        elif isinstance(x, Opaque):
            at = tuple(_substitute(y, j, position) for y in x.coordinates)
            x = Affine.variable(Opaque(x.value, at))
        else:
            x = position if x is j else Affine.variable(x)
        result = result.plus(x.times(c))
    return result


# The terms of the scores that are masks: which scores each keeps, what the others become, and
# whether several terms together keep a window.

Term = BiasTerm | FillTerm
Window = tuple[int | None, int | None]


class MaskEffect(NamedTuple):
    """Which scores a mask keeps. `fill` replaces the others or is added to them, or a lower number
    unless `uniform`.
    """

    keep: Condition
    fill: float
    uniform: bool = True


def mask_terms(site: AttentionSite, evaluator: SymbolicEvaluator) -> list[Term]:
    """The terms that differ between the scores of a row, sums split where that helps."""
    return [part for t in _without_constants(site) for part in _split_sum(t, site, evaluator)]


def _without_constants(site: AttentionSite) -> list[Term]:
    """The terms without numbers added to all scores, which softmax ignores but which shift earlier
    fills, and without clamps, which change only fills.
    """
    result, shift = [], 0.0
    for term in site.scores.terms:
        if isinstance(term, BiasTerm) and isinstance(term.leaf.value, float):
            added = term.coefficient * term.leaf.value
            if absorbs_scores(added, term.dtype, term.rescaled):
                raise Refusal(f"{added:g} is added to the scores, which vanish beside it")
            shift += added
        elif isinstance(term, ClampTerm):
            bound = term.value - shift
            if bound > MAX_MASK_FILL:
                raise Refusal("a lower bound on the scores is not far enough below them")
            result = [
                dataclasses.replace(t, value=max(t.value, bound)) if isinstance(t, FillTerm) else t
                for t in result
            ]
        elif isinstance(term, FillTerm):
            result.append(dataclasses.replace(term, value=term.value - shift))
        else:
            result.append(term)
    if shift and site.has_sink:
        raise Refusal("a number is added to the scores but not to their sink")
    return result


def _split_sum(term: Term, site: AttentionSite, evaluator: SymbolicEvaluator) -> list[Term]:
    """The summands of a bias if gradients flow or if one hides keys with -inf, to which the others
    add nothing; otherwise the term itself.
    """
    parts = _summands(term, site)
    effects = [mask_effect(part, evaluator) for part in parts] if not site.requires_grad else []
    hides = any(m and m.fill == -math.inf for m in effects)
    return parts if site.requires_grad or hides else [term]


def _summands(term: Term, site: AttentionSite) -> list[Term]:
    """The summands of a bias that is a sum of tensors of its dtype."""
    x, dims = _behind_views(term.leaf, site) if isinstance(term, BiasTerm) else (None, ())
    if not isinstance(x, Value) or x.op != "add" or x.writes:
        return [term]
    parts = [x.args.get(name) for name in ("input", "other")]
    if not all(map(is_tensor, parts)) or constant_value(x.args.get("alpha", 1)) != 1:
        return [term]
    if x.grad != site.core.out.grad or any(p.dtype != x.dtype for p in parts):
        return [term]
    bases = [undo_layout(p, broadcast_dims(p.shape, dims), p.dtype, x) for p in parts]
    biases = [dataclasses.replace(term, leaf=Leaf(*base)) for base in bases]
    return [part for bias in biases for part in _summands(bias, site)]


def _behind_views(leaf: Leaf, site: AttentionSite) -> tuple[object, Dims]:
    """A bias and its dims before views, as far as these are under the attention's gradient mode."""
    x, dims = leaf.value, leaf.dims
    while isinstance(x, Value) and x.grad == site.core.out.grad:
        step = input_dims(x, resolve_dims(dims)) if x.op in LAYOUT else None
        if step is None:
            break
        x, dims = source(x), step[0]
    return x, dims


def mask_effect(term: Term, evaluator: SymbolicEvaluator) -> MaskEffect | None:
    """The effect of a term if it is a mask of known content, else None."""
    leaf = term.leaf if isinstance(term, BiasTerm) else term.mask
    at = coordinates(resolve_dims(leaf.dims))
    if at is None or isinstance(leaf.value, float):
        return None
    element = evaluator.element(leaf.value, at)
    if isinstance(term, FillTerm):
        element = evaluator.convert(element, torch.bool)
        if element is None:
            return None
        keep = negate(element) if term.where else element
        return MaskEffect(keep, term.value) if term.value <= MAX_MASK_FILL else None
    return _additive_effect(element, term.coefficient)


def _additive_effect(x: Element, coefficient: float) -> MaskEffect | None:
    """The effect of an additive mask: 0 where scores are kept, mask fills elsewhere."""
    if isinstance(x, Choice):
        yes, no = _additive_effect(x.yes, coefficient), _additive_effect(x.no, coefficient)
        if yes is None or no is None:
            return None
        keep = any_of(all_of(x.condition, yes.keep), all_of(negate(x.condition), no.keep))
        fills = {m.fill for m in (yes, no) if m.keep is not True}
        uniform = yes.uniform and no.uniform and len(fills) < 2
        return MaskEffect(keep, max(fills, default=0.0), uniform)
    value = as_number(x)
    if value is None:
        return None
    if value == 0:
        return MaskEffect(True, 0.0)
    fill = value * coefficient
    return MaskEffect(False, fill) if fill <= MAX_MASK_FILL else None


def common_window(effects: list[MaskEffect], site: AttentionSite) -> Window | None:
    """(left, right) if the scores that all masks keep are a band around the diagonal, else None."""
    keep = all_of(*(m.keep for m in effects))
    if keep is True:
        return None, None
    i, j = (single_axis(g) for g in (site.queries, site.keys))
    if i is None or j is None:
        return None
    diagonal = symbolic(j.size) - symbolic(i.size)
    left: int | None = None
    right: int | None = None
    for inequality in keep.conditions if isinstance(keep, All) else {keep}:
        if not isinstance(inequality, AtMost):
            return None
        terms, c = dict(inequality.a.terms), inequality.a.constant
        if terms == {j: 1, i: -1}:  # j <= i - c
            width = sympy.expand(-c - diagonal)
            right = _narrower(right, width)
        elif terms == {j: -1, i: 1}:  # j >= i + c
            width = sympy.expand(diagonal - c)
            left = _narrower(left, width)
        else:
            return None
        if not isinstance(width, sympy.Integer) or width < 0:
            return None
    return left, right


def _narrower(side: int | None, width: sympy.Expr) -> int | None:
    if not isinstance(width, sympy.Integer):
        return side
    return int(width) if side is None else min(side, int(width))


def single_axis(group: tuple[Axis, ...]) -> Axis | None:
    """The only axis of a group, or None."""
    return group[0] if len(group) == 1 else None


def every_row_attends(window: Window, site: AttentionSite) -> bool:
    """Whether a window, which contains the diagonal, leaves each query a key."""
    if window == (None, None):
        return True
    i, j = single_axis(site.queries), single_axis(site.keys)
    return is_nonnegative(j.size - i.size)


# The mask of the scores that is applied to the weights again, after the softmax.


def mask_applied_twice(
    site: AttentionSite, terms: list[Term], may_hide_keys: Callable[[Term], bool]
) -> Term | None:
    """The term whose mask also zeroes the weights after the softmax; None if none are zeroed.

    A finite fill must be the only mask: beside it, keys that another mask hides with a lower number
    would be averaged. Raises Refusal where the weights are masked in another way than the scores.
    """
    zero = site.core.weights.zero_fill
    if zero is None:
        return None
    fills = [t for t in terms if isinstance(t, FillTerm)]
    biases = [t for t in terms if isinstance(t, BiasTerm)]
    equal = [t for t in fills if _is_same_mask(t, zero)]
    equal += [t for t in biases if _number_added(t, zero) is not None]
    if len(equal) == 1 and set(fills) <= set(equal):
        (found,) = equal
        fill = found.value if isinstance(found, FillTerm) else _number_added(found, zero)
        others = any(may_hide_keys(t) for t in biases if t is not found)
        if fill == -math.inf or (fill <= MAX_MASK_FILL and not others):
            return found
    raise NotMaskedAlike(
        "the attention weights are masked after the softmax, not as the scores were"
    )


class NotMaskedAlike(Refusal):
    """Weights are masked after the softmax in another way than the scores were."""


def with_gate_for_fill(core: Core) -> Core:
    """The core with the mask of its weights as a gate of the values, which it is if it is the same
    for every query.
    """
    weights = core.weights
    gates = (*weights.gates, weights.zero_fill)
    return dataclasses.replace(
        core, weights=dataclasses.replace(weights, zero_fill=None, gates=gates)
    )


def _is_same_mask(fill: FillTerm, zero: FillTerm) -> bool:
    (x, when), (y, other) = (_zero_one(t.mask.value, t.where) for t in (fill, zero))
    equal = same_contents(x, y) and when == other
    return equal and resolve_dims(fill.mask.dims) == resolve_dims(zero.mask.dims)


def _zero_one(x: Value, when: bool) -> tuple[Value, bool]:
    """The tensor of 0 and 1 behind casts and comparisons, and its value where x is `when`."""
    while x.op in ("cast", "eq", "ne") and not x.writes and is_zero_or_one(x.args.get("input")):
        number = constant_value(x.args.get("other"))
        if x.op != "cast" and number not in (0, 1):
            break
        flips = x.op != "cast" and (x.op == "eq") == (number == 0)
        x, when = x.args["input"], when != flips
    return x, when


def _number_added(bias: BiasTerm, zero: FillTerm) -> float | None:
    """The number that is added where weights are multiplied by 0, if nothing is added elsewhere."""
    if zero.factor is None or resolve_dims(bias.leaf.dims) != resolve_dims(zero.mask.dims):
        return None
    number = number_beside_zeros(bias.leaf.value, zero.factor)
    return None if number is None else number * bias.coefficient


# What the terms become: arguments of the operator, and the treatment of rows without keys.


class EmptyRows(enum.Enum):
    """The result of eager mode for an empty row, one whose keys are all masked."""

    ZERO = "NaN, for which the operator gives 0"
    UNIFORM = "the mean of the values: the fill replaces the scores"
    ABSORBED = "the mean of the values, but gradients reach the scores, which the fill absorbs"
    ADDED = "as without a mask: the fill is added to the whole row"


@dataclasses.dataclass(frozen=True)
class KeepMask:
    """Scores are kept where the leaf equals `kept_value`: a bool, or 0 for an additive mask."""

    leaf: Leaf
    kept_value: bool | float


@dataclasses.dataclass(frozen=True)
class ClassifiedMasks:
    """The arguments that the masks become.

    `left` and `right` are the window around the bottom-right diagonal, unbounded where None; with
    right = 0 it is causal. `biases` and `keeps` are a dense mask.
    """

    left: int | None = None
    right: int | None = None
    biases: tuple[BiasTerm, ...] = ()
    keeps: tuple[KeepMask, ...] = ()
    empty_rows: EmptyRows = EmptyRows.ZERO
    fill: float | None = None  # of the one mask that makes rows empty
    grad_share: float = 1.0  # of an absorbed row's gradient that reaches its scores
    interval: KeyInterval | None = None  # becomes kv_lens or key_ranges
    # (a mask, the conditions on keys alone that are left of it beside a window or interval)
    conditions: tuple[Value, tuple[Condition, ...]] | None = None
    added_fill: FillTerm | None = None  # becomes a bias that absorbs the scores
    zeroed_keys: FillTerm | None = None  # becomes keys of 0 and a bias
    float_terms: tuple[BiasTerm | FillTerm, ...] = ()  # become one float mask
    alibi: tuple[Leaf, float] | None = None  # slopes of the heads, and their factor
    inexact_dtype: torch.dtype | None = None  # why a mask of positions stays dense

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors from which the masks are emitted."""
        terms = (*self.biases, *self.keeps, *self.float_terms)
        slopes = [self.alibi[0]] if self.alibi else []
        return [*(t.mask if isinstance(t, FillTerm) else t.leaf for t in terms), *slopes]

    @property
    def is_dense(self) -> bool:
        """Whether the call has an attn_mask."""
        given = (self.biases, self.keeps, self.zeroed_keys, self.added_fill, self.float_terms)
        given += (self.conditions,)
        return any(given)
