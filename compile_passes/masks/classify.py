"""Classification of the masks among the terms: causal, windows, key intervals, or dense.

A finite fill (finfo.min, -1e9) is not -inf: a row whose keys are all filled averages every value.
It may become a flag of the operator only where every row provably attends a key. Else the fill is
kept: as part of an additive mask where the user adds it, and where scores are replaced by it, by
giving the rows without keys a zero query and all keys.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import torch

from compile_passes.graph.axes import resolve_dims
from compile_passes.graph.constants import finite
from compile_passes.graph.ir import Value, alike, requires_grad
from compile_passes.masks.affine import all_of
from compile_passes.masks.key_intervals import KeyInterval, attends_itself, key_interval
from compile_passes.masks.mask_terms import (
    MaskEffect,
    Term,
    Window,
    every_row_attends,
    only,
    read,
    terms_of,
    window_of,
)
from compile_passes.masks.symbolic_eval import SymbolicEvaluator
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import (
    FAR,
    LARGEST_SUM,
    BiasTerm,
    FillTerm,
    FloorTerm,
    Leaf,
    vanishes_beside,
)
from compile_passes.report import Refused

NEAR = 1e3  # a bias made of greater constants may be a mask


class Dead(enum.Enum):
    """What a dead row gives: one whose keys are all masked."""

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
    biases: tuple[BiasTerm, ...] = ()
    keeps: tuple[Keep, ...] = ()
    dead: Dead = Dead.ZERO
    zeroed: FillTerm | None = None  # by zeroed keys and a bias
    interval: KeyInterval | None = None  # as kv_lens or key_ranges
    added: FillTerm | None = None  # as a bias: real scores vanish beside it
    levels: tuple[Term, ...] = ()  # one float mask, whose dead rows are found as it runs
    share: float = 1.0  # of an absorbed row's gradient that reaches its scores
    fill: float | None = None  # of the one mask that makes rows dead
    inexact: torch.dtype | None = None  # why a mask of positions stays dense

    @property
    def terms(self) -> tuple[BiasTerm | Keep | FillTerm, ...]:
        """The tensors that the masks are written from."""
        return (*self.biases, *self.keeps, *self.levels)

    def describe(self) -> str:
        parts = []
        if self.right == 0:
            parts.append("is_causal")
        if self.left is not None or self.right not in (None, 0):
            parts.append(f"window=({self.left}, {self.right})")
        if self.interval:
            parts.append("a key range for each query")
        if self.biases or self.keeps or self.zeroed or self.added or self.levels:
            why = f" (positions may not be exact in {self.inexact})" if self.inexact else ""
            parts.append("dense attn_mask" + why)
        return ", ".join(parts) or "no mask"


def classify_masks(
    site: AttentionSite, evaluator: SymbolicEvaluator, intervals: bool = True
) -> Masks:
    """Which arguments of the operator the masks become.

    Raises Refused where a fill can't be kept. Without `intervals`, a mask that is no window stays
    dense.
    """
    masks = _classified(site, evaluator, intervals)
    leaves = [t.mask if isinstance(t, FillTerm) else t.leaf for t in masks.terms]
    inexact = (evaluator.inexact(leaf.value) for leaf in leaves)
    return dataclasses.replace(masks, inexact=next(filter(None, inexact), None))


def _classified(site: AttentionSite, evaluator: SymbolicEvaluator, intervals: bool) -> Masks:
    terms = terms_of(site, evaluator)
    effects = {t: read(t, evaluator) for t in terms}
    _check_floor(site, effects)
    terms = [t for t in terms if effects[t] is None or effects[t].keep is not True]
    zeroed = _zeroed_alike(site, terms, effects)
    if zeroed and effects[zeroed]:
        exact = dataclasses.replace(zeroed, value=-math.inf)
        effects[exact] = effects[zeroed]
        terms = [exact if t is zeroed else t for t in terms]
        zeroed = exact
    for t in terms if site.sunk else [zeroed] if zeroed else []:
        if effects[t]:  # rows without keys give 0, as -inf does
            effects[t] = MaskEffect(effects[t].keep, -math.inf)
    if _rows_attend_themselves(terms, effects, site):  # then any fill does what -inf does
        effects |= {t: MaskEffect(effects[t].keep, -math.inf) for t in terms}
    bands = [t for t in terms if effects[t] and window_of([effects[t]], site) is not None]
    dense = [t for t in terms if t not in bands]
    window = window_of([effects[t] for t in bands], site)
    if dense or not every_row_attends(window, site):  # then only an exact -inf may be a flag
        bands = [t for t in bands if effects[t].fill == -math.inf]
        dense = [t for t in terms if t not in bands]
        window = window_of([effects[t] for t in bands], site)
    made = _as_interval(site, window, dense, bands, effects) if intervals else None
    if made is not None:
        return made
    if len(dense) == 1 and not bands:
        keep = _additive(dense[0], effects[dense[0]])
        if keep is not None:
            share = _share(site, dense[0], effects)
            fill = effects[dense[0]].fill
            return Masks(keeps=(keep[0],), dead=keep[1], share=share, fill=fill)
        zeroed = _small_fill(dense[0], site)
        if zeroed is not None:
            return Masks(zeroed=zeroed)
    return _fallback(site, window, dense, effects, terms)


def _as_interval(
    site: AttentionSite, window: Window, dense: list[Term], bands: list[Term], effects: dict
) -> Masks | None:
    """Masks that leave each query one interval of keys."""
    masks = [t for t in dense if effects[t]]
    others = tuple(t for t in dense if not effects[t])
    j = only(site.keys)
    if j is None or not masks or not all(isinstance(t, BiasTerm) for t in others):
        return None
    if site.trains and any(_is_mask(t, None) for t in others):
        return None
    keep = all_of(*(effects[t].keep for t in masks))
    made = key_interval(keep, j)
    if made is None:
        return None
    first = masks[0]
    made = dataclasses.replace(made, leaf=first.leaf if isinstance(first, BiasTerm) else first.mask)
    whole = all_of(keep, *(effects[t].keep for t in bands))
    alive = not others and attends_itself(whole, only(site.queries), j)
    if alive or all(effects[t].fill == -math.inf for t in masks):
        return Masks(*window, biases=others, interval=made)
    if others or bands or len(masks) > 1 or not effects[first].level:
        return None
    if isinstance(first, FillTerm):
        return Masks(interval=made, dead=Dead.UNIFORM, fill=first.value)
    dead = _additive(first, effects[first])[1]
    share = _share(site, first, effects)
    return Masks(interval=made, dead=dead, share=share, fill=effects[first].fill)


def _rows_attend_themselves(terms: list[Term], effects: dict, site: AttentionSite) -> bool:
    """Whether all masks are known and leave every query the key on its own place."""
    j = only(site.keys)
    if j is None or not all(effects[t] for t in terms):
        return False
    return attends_itself(all_of(*(effects[t].keep for t in terms)), only(site.queries), j)


def _check_floor(site: AttentionSite, effects: dict[Term, MaskEffect | None]) -> None:
    """A lower bound changes nothing but rows without keys, and there only what lay below it."""
    terms = site.scores.terms
    last = max((i for i, t in enumerate(terms) if isinstance(t, FloorTerm)), default=0)
    for term in terms[:last]:
        if isinstance(term, BiasTerm) and term in effects:
            effect = effects[term]
            if effect is None or (effect.keep is not True and effect.fill < terms[last].value):
                raise Refused("a lower bound follows a bias that may lie below it")


def _share(site: AttentionSite, term: BiasTerm, effects: dict[Term, MaskEffect | None]) -> float:
    """What a lower bound leaves of the gradient of scores that lie at it."""
    floors = [t for t in site.scores.terms if isinstance(t, FloorTerm)]
    fill = effects[term].fill
    if not floors or fill == -math.inf:
        return 1.0
    if len(floors) > 1 or not (_absorbs(term, effects[term]) or floors[0].value < 2 * fill):
        raise Refused("a lower bound on the scores is within the reach of masked ones")
    return floors[0].share if fill == floors[0].value else 1.0


def _zeroed_alike(site: AttentionSite, terms: list[Term], effects: dict) -> Term | None:
    """The mask of the scores with which the weights are masked again after the softmax. Keys that
    another mask hides further down would come up beside a finite fill.
    """
    zeroed = site.core.weights.zeroed
    if zeroed is None:
        return None
    masked = [t for t in terms if isinstance(t, FillTerm)]
    for fill in masked:
        same = alike(fill.mask.value, zeroed.mask.value) and fill.where == zeroed.where
        same = same and resolve_dims(fill.mask.dims) == resolve_dims(zeroed.mask.dims)
        beside = any(_is_mask(t, effects[t]) for t in terms if isinstance(t, BiasTerm))
        lowest = fill.value == -math.inf or (fill.value <= FAR and not beside)
        if same and lowest and len(masked) == 1:
            return fill
    raise Refused("the attention weights are masked after the softmax, not as the scores were")


def _small_fill(term: Term, site: AttentionSite) -> FillTerm | None:
    """A fill that real scores could pass, the same for every query: then the keys can be zeroed and
    the fill added.
    """
    if not isinstance(term, FillTerm) or not FAR < term.value < math.inf:
        return None
    if site.trains and abs(term.value) > LARGEST_SUM:
        return None
    keys = {*site.batch, *site.kv_heads, *site.keys}
    return term if term.mask.axes() <= keys else None


def _additive(term: Term, effect: MaskEffect | None) -> tuple[Keep, Dead] | None:
    """An additive mask of 0 and one far number as a bool mask, and what dead rows give."""
    if not isinstance(term, BiasTerm) or effect is None or not effect.level:
        return None
    if effect.fill == -math.inf:
        return Keep(term.leaf, 0.0), Dead.ZERO
    return Keep(term.leaf, 0.0), Dead.ABSORBED if _absorbs(term, effect) else Dead.ADDED


def _absorbs(term: BiasTerm, effect: MaskEffect) -> bool:
    """Whether real scores vanish beside the fill."""
    return vanishes_beside(effect.fill, term.dtype)


def _fallback(
    site: AttentionSite, window: Window, dense: list[Term], effects: dict, terms: list[Term]
) -> Masks:
    """Dense masks: biases added up and bool masks joined."""
    exact = {t for t in dense if effects[t] and effects[t].fill == -math.inf}
    biases = tuple(t for t in dense if isinstance(t, BiasTerm) and t not in exact)
    fills = [t for t in dense if isinstance(t, FillTerm)]
    finites = [t for t in fills if t not in exact]
    if site.trains and any(_may_fill_rows(t, effects[t], site) for t in biases):
        return _levels(site, window, terms)
    if not site.trains and _vanishes_in(terms, finites, site):
        rest = tuple(t for t in biases if t is not finites[0])
        keeps = tuple(_keep_of(t) for t in dense if t in exact)
        return Masks(*window, rest, keeps, added=finites[0])
    others = len(terms) > len(dense) or len(exact) > 0
    if _tangled(dense, finites, others or any(_is_mask(t, effects[t]) for t in biases)):
        return _levels(site, window, terms)
    keeps = tuple(_keep_of(t) for t in dense if t in exact or t in fills)
    if not finites:
        return Masks(*window, biases, keeps)
    return Masks(*window, biases, keeps, Dead.UNIFORM, fill=finites[0].value)


def _levels(site: AttentionSite, window: Window, terms: list[Term]) -> Masks:
    """Several masks with finite fills, or masks of unknown content. The window, which hides keys
    with -inf, is among the terms and a flag as well, unless a fill then replaces that -inf.
    """
    near = [t for t in terms if isinstance(t, FillTerm) and not _far(t, site)]
    known = site.sunk and any(isinstance(t, FillTerm) for t in terms)
    if near or known or any(isinstance(t, FloorTerm) for t in site.scores.terms):
        raise Refused("several masks with different fill values: rows without keys would differ")
    if any(isinstance(t, FillTerm) and t.value != -math.inf for t in terms[1:]):
        window = (None, None)
    replaced = [i for i, t in enumerate(terms) if isinstance(t, FillTerm) and t.value != -math.inf]
    for term in terms[replaced[0] :] if replaced and site.trains else []:
        if isinstance(term, BiasTerm) and requires_grad(term.leaf.value):
            raise Refused("a bias that learns is added to scores after a finite fill value")
    return Masks(*window, levels=tuple(terms), dead=Dead.ABSORBED)


def _far(fill: FillTerm, site: AttentionSite) -> bool:
    return vanishes_beside(fill.value, site.scores.product.dtype)


def _may_fill_rows(term: BiasTerm, effect: MaskEffect | None, site: AttentionSite) -> bool:
    """Whether a bias may leave a row nothing but numbers beside which real scores vanish, or the
    sum of their exponentials does. A sink is greater than a fill.
    """
    if effect is None:
        return _is_mask(term, effect)
    return not site.sunk and _absorbs(term, effect)


def _is_mask(term: BiasTerm, effect: MaskEffect | None) -> bool:
    """Whether a bias hides keys, as far as is known."""
    x, near = term.leaf.value, abs(term.coefficient) < NEAR
    return effect is not None or (isinstance(x, Value) and not (near and finite(x, limit=NEAR)))


def _keep_of(term: Term) -> Keep:
    return Keep(term.leaf, 0.0) if isinstance(term, BiasTerm) else Keep(term.mask, not term.where)


def _vanishes_in(terms: list[Term], fills: list[FillTerm], site: AttentionSite) -> bool:
    """Whether a fill before biases can be added instead: what it replaces is absorbed by it."""
    if len(fills) != 1 or len(terms) < 2:
        return False
    (fill,), before = fills, terms[: terms.index(fills[0])]
    later = any(isinstance(t, BiasTerm) for t in terms[len(before) + 1 :])
    far = _far(fill, site)
    known = all(isinstance(t, BiasTerm) and finite(t.leaf.value, limit=NEAR) for t in before)
    return later and far and known and math.isfinite(fill.value)


def _tangled(dense: list[Term], finite: list[FillTerm], others: bool) -> bool:
    """Whether one bool mask cannot express what the finite fills do."""
    if not finite:
        return False
    if any(not f.value <= FAR for f in finite):
        raise Refused(
            f"scores are filled with {finite[0].value:g}, which is not far enough below them to "
            "be a mask"
        )
    first = dense.index(finite[0])
    return (
        len({f.value for f in finite}) > 1
        or others
        or any(isinstance(t, BiasTerm) for t in dense[first:])
    )
