"""Classification of masks: causal, windows, key intervals, or dense, masks that are split, and
ALiBi.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import sympy
import torch

from compile_passes.ir.axes import Axis, Dims, Group, resolve_dims
from compile_passes.ir.constants import constant_value, is_bounded
from compile_passes.ir.graph import Value, is_tensor, only_inserts_dims, requires_grad
from compile_passes.masks.affine import (
    AbsoluteValue,
    Affine,
    All,
    Any,
    AtMost,
    Condition,
    Coordinates,
    Not,
    Opaque,
    Quotient,
    all_of,
    sort_key,
    symbolic,
)
from compile_passes.masks.mask_terms import (
    ClassifiedMasks,
    EmptyRows,
    KeepMask,
    KeyInterval,
    MaskEffect,
    Term,
    Window,
    attends_itself,
    common_window,
    every_row_attends,
    key_interval,
    mask_applied_twice,
    mask_effect,
    mask_terms,
    single_axis,
    with_indices_for_positions,
)
from compile_passes.masks.symbolic_evaluator import (
    RULES,
    SymbolicEvaluator,
    broadcast_coordinates,
    coordinates,
)
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.states import (
    MAX_MASK_FILL,
    MAX_ROW_MASK,
    BiasTerm,
    ClampTerm,
    FillTerm,
    Leaf,
    absorbs_scores,
)
from compile_passes.report import Refusal

# ALiBi: biases of a slope for each head times a distance, which are an option of the operator.

_VIEWS = ("reshape", "permute", "expand", "copy", "getitem")


class Alibi(NamedTuple):
    """-coefficient * slopes * |distance to the diagonal| is added to the scores as `term`.

    With `causal` it is that up to a number for each row, and only for keys up to the diagonal.
    """

    term: Term
    slopes: Leaf
    coefficient: float
    causal: bool

    def fits(self, masks: ClassifiedMasks, site: AttentionSite) -> bool:
        """Whether the operator computes it beside these masks."""
        if masks.empty_rows is not EmptyRows.ZERO or masks.interval or masks.float_terms:
            return False
        if masks.added_fill or masks.zeroed_keys:
            return False
        reads_rows = site.lses or site.has_sink
        return not self.causal or (masks.right == 0 and not reads_rows)


def alibi_of(terms: list[Term], site: AttentionSite, evaluator: SymbolicEvaluator) -> Alibi | None:
    """The first of the terms that is ALiBi."""
    biases = (t for t in terms if isinstance(t, BiasTerm) and t.rescaled == 1.0)
    found = (_alibi(term, site, evaluator) for term in biases)
    return next(filter(None, found), None)


def _alibi(term: BiasTerm, site: AttentionSite, evaluator: SymbolicEvaluator) -> Alibi | None:
    i, j = single_axis(site.queries), single_axis(site.keys)
    at = coordinates(resolve_dims(term.leaf.dims))
    x = term.leaf.value
    if i is None or j is None or at is None or not is_tensor(x) or x.dtype.itemsize < 4:
        return None  # 16-bit numbers would be rounded
    factors = _Factors(evaluator).element(x, at)
    coefficient, distance, slopes = term.coefficient, None, None
    for x in factors:
        if isinstance(x, float):
            coefficient *= x
        elif isinstance(x, Leaf) and slopes is None:
            slopes = x
        elif not isinstance(x, Leaf) and distance is None:
            distance = x
        else:
            return None
    if slopes is None or not slopes.axes() <= {*site.heads} or requires_grad(slopes.value):
        return None
    diagonal = symbolic(j.size) - symbolic(i.size)
    if isinstance(distance, AbsoluteValue):
        sign = _sign(distance.a, {j: 1, i: -1})
        shift = sympy.expand(distance.a.constant + sign * diagonal)
        return Alibi(term, slopes, -coefficient, False) if sign and shift == 0 else None
    sign = _sign(distance, {j: 1, i: -1}) if isinstance(distance, Affine) else 0
    return Alibi(term, slopes, coefficient * sign, True) if sign else None


def _sign(a: Affine, terms: dict) -> int:
    """1 or -1 if these are the terms of `a`, or their negatives; 0 otherwise."""
    given = dict(a.terms)
    negative = {x: -c for x, c in terms.items()}
    return 1 if given == terms else -1 if given == negative else 0


class _Factors:
    """Reads an element as a product: the list of its factors, which are numbers, positions, and
    elements of other tensors as leaves.
    """

    def __init__(self, evaluator: SymbolicEvaluator) -> None:
        self._evaluator = evaluator

    def argument(self, value: Value, name: str, at: Coordinates) -> list:
        """The factors of an operand."""
        x = value.args.get(name)
        return self.element(x, broadcast_coordinates(x, at) if is_tensor(x) else ())

    def element(self, x: object, at: Coordinates) -> list:
        """The factors of an element."""
        known = constant_value(x)
        if known is not None:
            return [float(known)]
        if is_tensor(x) and not x.writes:
            if x.op == "neg":
                return [-1.0, *self.argument(x, "input", at)]
            if x.op == "mul":
                return [*self.argument(x, "input", at), *self.argument(x, "other", at)]
            views = x.op in _VIEWS and (x.op != "getitem" or only_inserts_dims(x))
            found = RULES[x.op](self, x, at) if views else None
            if x.op == "cast" and x.dtype.is_floating_point:
                found = self.argument(x, "input", at)
            if found is not None:
                return found
        return [self._factor(x, at)]

    def _factor(self, x: object, at: Coordinates) -> object:
        position = self._evaluator.element(x, at)
        if isinstance(position, (Affine, AbsoluteValue)):
            return position
        dims = _dims(at)
        return Leaf(x, dims) if dims is not None and is_tensor(x) else None


def _dims(at: Coordinates) -> Dims | None:
    """The axes of a tensor that is read at these coordinates; None where it is a part of it."""
    groups = [_merged(a) for a in at]
    return None if None in groups else tuple(groups)


def _merged(a: Affine) -> Group | None:
    """The axes, the outermost first, of which the number is the merged index."""
    group, stride = [], 1
    for axis, coefficient in sorted(a.terms, key=lambda term: term[1]):
        if coefficient != stride:
            return None
        group.insert(0, axis)
        size = getattr(axis, "size", None)
        stride = stride * size if type(size) is int else None
    return tuple(group) if a.constant == 0 else None


# Masks of which a part is a window or an interval of keys, such as a causal mask with padding: the
# part becomes a flag or key ranges, so that masked tiles are skipped, and the rest stays a mask, of
# the keys alone where it does not depend on the query.


class SplitMask(NamedTuple):
    """The window and interval of a mask, and the conditions that they leave; `on_keys` if these are
    the same for every query.
    """

    window: Window
    interval: KeyInterval | None
    rest: tuple[Condition, ...]
    on_keys: bool


def split_mask(keep: Condition, site: AttentionSite) -> SplitMask | None:
    """The parts of a condition on query and key; None where no part is a window or interval."""
    i, j = single_axis(site.queries), single_axis(site.keys)
    if j is None or not isinstance(keep, All):
        return None
    conditions = sorted(keep.conditions, key=sort_key)
    banded = [c for c in conditions if _is_band(c, site)]
    window = common_window([MaskEffect(c, 0.0) for c in banded], site)
    others = [c for c in conditions if c not in banded]
    ranged = [c for c in others if key_interval(c, j) is not None]
    rest = tuple(c for c in others if c not in ranged)
    interval = key_interval(all_of(*ranged), j) if ranged else None
    if not banded and not ranged:
        return None
    return SplitMask(window or (None, None), interval, rest, i is None or not depends(rest, (i,)))


def _is_band(c: Condition, site: AttentionSite) -> bool:
    """Whether a condition alone is a window."""
    if single_axis(site.queries) is None:
        return False
    return common_window([MaskEffect(c, 0.0)], site) is not None


def depends(x: object, axes: Group) -> bool:
    """Whether an expression, or one of several, varies along any of the axes."""
    if isinstance(x, Axis):
        return x in axes
    if isinstance(x, (Quotient, AtMost)):
        return depends(x.a, axes)
    if isinstance(x, Affine):
        return any(depends(y, axes) for y, _ in x.terms)
    if isinstance(x, Opaque):
        return depends(x.coordinates, axes)
    if isinstance(x, Not):
        return depends(x.condition, axes)
    if isinstance(x, (All, Any)):
        return depends(x.conditions, axes)
    return isinstance(x, Iterable) and any(depends(y, axes) for y in x)


# Classification of masks: causal, windows, key intervals, or dense.
#
# A finite fill (finfo.min, -1e9) is not -inf: a row whose keys are all filled averages every value.
# Such a fill may become a flag of the operator only where every row provably attends a key.
# Elsewhere it is kept: as a part of an additive mask where the model adds it, and where it replaces
# scores by giving empty rows a query of zero and all keys.

MAX_BIAS = 1e3  # a bias made of greater constants may be a mask
Effects = dict[Term, MaskEffect | None]  # None: not a mask of known content


def classify_masks(
    site: AttentionSite, evaluator: SymbolicEvaluator, intervals: bool = True
) -> ClassifiedMasks:
    """The arguments of the operator that the masks become.

    Raises Refusal where a fill can't be kept. Without `intervals`, masks that are no windows stay
    dense.
    """
    terms = mask_terms(site, evaluator)
    alibi = alibi_of(terms, site, evaluator)
    masks = _beside_alibi(alibi, terms, site, evaluator) if alibi else None
    masks = masks or _classified(site, terms, evaluator, intervals)
    _check_denominator(site, masks)
    inexact = (evaluator.inexact_dtype(leaf.value) for leaf in masks.leaves)
    return dataclasses.replace(masks, inexact_dtype=next(filter(None, inexact), None))


def _check_denominator(site: AttentionSite, masks: ClassifiedMasks) -> None:
    """Raises Refusal where a row under a finite fill would be averaged and eager mode adds it up:
    beside the fill, the log-sum-exp that is subtracted cannot hold the number of keys.
    """
    filled = masks.empty_rows in (EmptyRows.UNIFORM, EmptyRows.ABSORBED) or masks.added_fill
    if site.core.weights.by_lse and (filled or any(_may_hide_keys(t, None) for t in masks.biases)):
        raise Refusal("the log-sum-exp of the scores is subtracted: rows without keys would differ")


def _beside_alibi(
    alibi: Alibi, terms: list[Term], site: AttentionSite, evaluator: SymbolicEvaluator
) -> ClassifiedMasks | None:
    """The other masks with ALiBi as an option; None where they need it as a bias."""
    others = [t for t in terms if t is not alibi.term]
    if any(isinstance(t, ClampTerm) for t in site.scores.terms):
        return None
    for intervals in (True, False):
        try:
            masks = _classified(site, others, evaluator, intervals)
        except Refusal:
            continue
        if alibi.fits(masks, site):
            return dataclasses.replace(masks, alibi=(alibi.slopes, alibi.coefficient))
    return None


def _classified(
    site: AttentionSite, terms: list[Term], evaluator: SymbolicEvaluator, intervals: bool
) -> ClassifiedMasks:
    effects = {t: _with_documents(mask_effect(t, evaluator)) for t in terms}
    _check_clamps(site, effects)
    terms = [t for t in terms if effects[t] is None or effects[t].keep is not True]
    terms, effects = _with_exact_fills(site, terms, effects, evaluator)
    bands = [t for t in terms if effects[t] and common_window([effects[t]], site) is not None]
    dense = [t for t in terms if t not in bands]
    window = common_window([effects[t] for t in bands], site)
    if dense or not every_row_attends(window, site):  # then only an exact -inf may be a flag
        bands = [t for t in bands if effects[t].fill == -math.inf]
        dense = [t for t in terms if t not in bands]
        window = common_window([effects[t] for t in bands], site)
    masks = _as_interval(site, window, dense, bands, effects) if intervals else None
    if masks is None and intervals:
        masks = _as_parts(site, window, dense, effects)
    if masks is None and len(dense) == 1 and not bands:
        masks = _as_single_mask(site, dense[0], effects)
    return masks or _as_dense(site, window, dense, effects, terms)


def _with_documents(effect: MaskEffect | None) -> MaskEffect | None:
    return effect and effect._replace(keep=with_indices_for_positions(effect.keep))


def _with_exact_fills(
    site: AttentionSite, terms: list[Term], effects: Effects, evaluator: SymbolicEvaluator
) -> tuple[list[Term], Effects]:
    """The terms with fills of -inf where these have the same effect: where masked weights are
    zeroed, beside a sink, and where each query keeps the key at its own position.
    """
    zeroed = mask_applied_twice(site, terms, lambda t: _may_hide_keys(t, effects[t]))
    if zeroed:
        exact = dataclasses.replace(site.core.weights.zero_fill, value=-math.inf)
        effects = {**effects, exact: _with_documents(mask_effect(exact, evaluator))}
        if effects[exact] is None:
            raise Refusal("the attention weights are masked, and it is not known where")
        terms = [exact if t is zeroed else t for t in terms]
        zeroed = exact
    if site.has_sink or _rows_attend_themselves(terms, effects, site):
        exact_terms = terms
    else:
        exact_terms = [zeroed] if zeroed else []
    exact_effects = {t: MaskEffect(effects[t].keep, -math.inf) for t in exact_terms if effects[t]}
    return terms, {**effects, **exact_effects}


def _rows_attend_themselves(terms: list[Term], effects: Effects, site: AttentionSite) -> bool:
    """Whether all masks are known and leave each query the key at its own position."""
    j = single_axis(site.keys)
    if j is None or not all(effects[t] for t in terms):
        return False
    keep = all_of(*(effects[t].keep for t in terms))
    return attends_itself(keep, single_axis(site.queries), j)


def _check_clamps(site: AttentionSite, effects: Effects) -> None:
    """Raises Refusal where a clamp would change anything but empty rows."""
    terms = site.scores.terms
    last = max((i for i, t in enumerate(terms) if isinstance(t, ClampTerm)), default=0)
    for term in terms[:last]:
        if isinstance(term, BiasTerm) and term in effects:
            effect = effects[term]
            if effect is None or (effect.keep is not True and effect.fill < terms[last].value):
                raise Refusal("a lower bound follows a bias that may lie below it")


def _grad_share(site: AttentionSite, term: BiasTerm, effects: Effects) -> float:
    """The share of the gradient that a clamp passes on to scores that equal its bound."""
    clamps = [t for t in site.scores.terms if isinstance(t, ClampTerm)]
    fill = effects[term].fill
    if not clamps or fill == -math.inf:
        return 1.0
    if len(clamps) > 1 or not (_absorbs(term, fill) or clamps[0].value < 2 * fill):
        raise Refusal("masked scores may lie below a lower bound on the scores")
    return clamps[0].grad_share if fill == clamps[0].value else 1.0


def _as_interval(
    site: AttentionSite, window: Window, dense: list[Term], bands: list[Term], effects: Effects
) -> ClassifiedMasks | None:
    """Masks that together leave each query one interval of keys."""
    masks = [t for t in dense if effects[t]]
    biases = tuple(t for t in dense if not effects[t])
    j = single_axis(site.keys)
    if j is None or not masks or not all(isinstance(t, BiasTerm) for t in biases):
        return None
    if site.requires_grad and any(_may_hide_keys(t, None) for t in biases):
        return None
    keep = all_of(*(effects[t].keep for t in masks))
    interval = key_interval(keep, j)
    if interval is None:
        return None
    first = masks[0]
    leaf = first.leaf if isinstance(first, BiasTerm) else first.mask
    interval = dataclasses.replace(interval, leaf=leaf)
    keep = all_of(keep, *(effects[t].keep for t in bands))
    no_empty_rows = not biases and attends_itself(keep, single_axis(site.queries), j)
    if no_empty_rows or all(effects[t].fill == -math.inf for t in masks):
        return ClassifiedMasks(*window, biases=biases, interval=interval)
    if biases or bands or len(masks) > 1 or not effects[first].uniform:
        return None
    if isinstance(first, FillTerm):
        return ClassifiedMasks(interval=interval, empty_rows=EmptyRows.UNIFORM, fill=first.value)
    return dataclasses.replace(_additive_mask(site, first, effects), interval=interval)


def _as_parts(
    site: AttentionSite, window: Window, dense: list[Term], effects: Effects
) -> ClassifiedMasks | None:
    """Masks of -inf of which a part is a window or an interval, with biases."""
    known = [t for t in dense if effects[t]]
    biases = tuple(t for t in dense if not effects[t])
    if not known or not all(isinstance(t, BiasTerm) for t in biases):
        return None
    if any(effects[t].fill != -math.inf for t in known):
        return None
    if site.requires_grad and any(_may_hide_keys(t, None) for t in biases):
        return None
    split = split_mask(all_of(*(effects[t].keep for t in known)), site)
    if split is None:
        return None
    left, right = (_narrower(*sides) for sides in zip(window, split.window, strict=True))
    mask = known[0].leaf if isinstance(known[0], BiasTerm) else known[0].mask
    if split.on_keys:
        interval = split.interval and dataclasses.replace(split.interval, leaf=mask)
        conditions = (mask.value, split.rest) if split.rest else None
        return ClassifiedMasks(left, right, biases, interval=interval, conditions=conditions)
    if split.window == (None, None):
        return None
    return ClassifiedMasks(left, right, biases, tuple(map(_keep_mask, known)))


def _narrower(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _as_single_mask(site: AttentionSite, term: Term, effects: Effects) -> ClassifiedMasks | None:
    """A single mask, if it is additive or has a small fill."""
    if isinstance(term, BiasTerm) and effects[term] and effects[term].uniform:
        keeps = (KeepMask(term.leaf, 0.0),)
        return dataclasses.replace(_additive_mask(site, term, effects), keeps=keeps)
    return ClassifiedMasks(zeroed_keys=term) if _can_zero_keys(term, site) else None


def _additive_mask(site: AttentionSite, term: BiasTerm, effects: Effects) -> ClassifiedMasks:
    """The treatment of empty rows under an additive mask of 0 and one fill."""
    fill, empty_rows = effects[term].fill, EmptyRows.ADDED
    if fill == -math.inf:
        empty_rows = EmptyRows.ZERO
    elif _absorbs(term, fill):
        empty_rows = EmptyRows.ABSORBED
    share = _grad_share(site, term, effects)
    return ClassifiedMasks(empty_rows=empty_rows, grad_share=share, fill=fill)


def _can_zero_keys(term: Term, site: AttentionSite) -> bool:
    """Whether a fill is near real scores and its mask the same for every query, so that keys can be
    zeroed and the fill added.
    """
    if not isinstance(term, FillTerm) or not MAX_MASK_FILL < term.value < math.inf:
        return False
    if site.requires_grad and abs(term.value) > MAX_ROW_MASK:
        return False
    return term.mask.axes() <= {*site.batch, *site.kv_heads, *site.keys}


def _as_dense(
    site: AttentionSite, window: Window, dense: list[Term], effects: Effects, terms: list[Term]
) -> ClassifiedMasks:
    """Dense masks: the sum of the biases and the conjunction of the bool masks."""
    exact = {t for t in dense if effects[t] and effects[t].fill == -math.inf}
    if _lowered_sum(site, dense, effects):
        raise Refusal("a lower bound follows several masks: rows without keys would differ")
    biases = tuple(t for t in dense if isinstance(t, BiasTerm) and t not in exact)
    fills = [t for t in dense if isinstance(t, FillTerm)]
    finite = [t for t in fills if t not in exact]
    if site.requires_grad and any(_may_empty_rows(t, effects[t], site) for t in biases):
        return _as_float_mask(site, window, terms)
    if not site.requires_grad and _can_add_fill(terms, finite, site):
        others = tuple(t for t in biases if t is not finite[0])
        keeps = tuple(_keep_mask(t) for t in dense if t in exact)
        return ClassifiedMasks(*window, others, keeps, added_fill=finite[0])
    several = len(terms) > len(dense) or len(exact) > 0
    several = several or any(_may_hide_keys(t, effects[t]) for t in biases)
    if finite and _needs_float_mask(dense, finite, several):
        return _as_float_mask(site, window, terms)
    keeps = tuple(_keep_mask(t) for t in dense if t in exact or t in fills)
    if not finite:
        return ClassifiedMasks(*window, biases, keeps)
    return ClassifiedMasks(*window, biases, keeps, EmptyRows.UNIFORM, fill=finite[0].value)


def _lowered_sum(site: AttentionSite, dense: list[Term], effects: Effects) -> bool:
    """Whether the sum of several finite masks may lie below a clamp that follows them."""
    terms = site.scores.terms
    last = max((i for i, t in enumerate(terms) if isinstance(t, ClampTerm)), default=0)
    before = [t for t in dense if isinstance(t, FillTerm) or t in terms[:last]]
    return last > 0 and len([t for t in before if effects[t]]) > 1


def _as_float_mask(site: AttentionSite, window: Window, terms: list[Term]) -> ClassifiedMasks:
    """Several masks with finite fills, or masks of unknown content. The window, which hides keys
    with -inf, is among the terms and a flag as well, unless a later fill replaces that -inf.
    """
    fills = [t for t in terms if isinstance(t, FillTerm)]
    near = any(not _absorbs(t, t.value) for t in fills)
    clamped = any(isinstance(t, ClampTerm) for t in site.scores.terms)
    if near or (site.has_sink and fills) or clamped:
        raise Refusal("several masks with different fill values: rows without keys would differ")
    finite = [i for i, t in enumerate(terms) if t in fills and t.value != -math.inf]
    if any(finite):  # after the first term
        window = (None, None)
    for term in terms[finite[0] :] if finite and site.requires_grad else []:
        if isinstance(term, BiasTerm) and requires_grad(term.leaf.value):
            raise Refusal("a bias that requires grad is added after a finite fill value")
    return ClassifiedMasks(*window, float_terms=tuple(terms), empty_rows=EmptyRows.ABSORBED)


def _absorbs(term: Term, fill: float) -> bool:
    """Whether real scores are lost beside the fill of a mask where the model adds it. For one that
    replaces scores: whether adding it would give the same.
    """
    return absorbs_scores(fill, term.dtype, term.rescaled)


def _may_empty_rows(term: BiasTerm, effect: MaskEffect | None, site: AttentionSite) -> bool:
    """Whether a bias may leave a row only numbers that absorb its scores, or the sum of their
    exponentials. A sink is greater than a fill.
    """
    if effect is None:
        return _may_hide_keys(term, effect)
    return not site.has_sink and _absorbs(term, effect.fill)


def _may_hide_keys(term: BiasTerm, effect: MaskEffect | None) -> bool:
    """Whether a bias is not provably free of mask fills."""
    x, small = term.leaf.value, abs(term.coefficient) < MAX_BIAS
    bounded = small and is_bounded(x, MAX_BIAS)
    return effect is not None or (isinstance(x, Value) and not bounded)


def _keep_mask(term: Term) -> KeepMask:
    if isinstance(term, BiasTerm):
        return KeepMask(term.leaf, 0.0)
    return KeepMask(term.mask, not term.where)


def _can_add_fill(terms: list[Term], fills: list[FillTerm], site: AttentionSite) -> bool:
    """Whether the one fill, which precedes biases, can be added: it absorbs what it replaces."""
    if len(fills) != 1 or len(terms) < 2:
        return False
    (fill,), before = fills, terms[: terms.index(fills[0])]
    biased_later = any(isinstance(t, BiasTerm) for t in terms[len(before) + 1 :])
    added_in = torch.promote_types(site.dtype, torch.float32)  # by the kernels
    absorbed = _absorbs(fill, fill.value) and absorbs_scores(fill.value, added_in)
    absorbed = absorbed and math.isfinite(fill.value)
    bounded = all(isinstance(t, BiasTerm) and is_bounded(t.leaf.value, MAX_BIAS) for t in before)
    return biased_later and absorbed and bounded


def _needs_float_mask(dense: list[Term], finite: list[FillTerm], several: bool) -> bool:
    """Whether one bool mask cannot express what the finite fills do."""
    small = [fill.value for fill in finite if not fill.value <= MAX_MASK_FILL]
    if small:
        raise Refusal(
            f"scores are filled with {small[0]:g}, which is not far enough below them to be a mask"
        )
    biased_later = any(isinstance(t, BiasTerm) for t in dense[dense.index(finite[0]) :])
    return several or biased_later or len({fill.value for fill in finite}) > 1
