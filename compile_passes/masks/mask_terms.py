"""The effect of each term of the scores by itself: which scores stay and what the others become;
and whether several terms leave a window.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import sympy
import torch

from compile_passes.graph import layout
from compile_passes.graph.axes import Axis, Dims, broadcast_dims, resolve_dims
from compile_passes.graph.constants import number
from compile_passes.graph.ir import Value
from compile_passes.masks.affine import (
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
from compile_passes.masks.symbolic_eval import SymbolicEvaluator, as_number, coordinates
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import (
    FAR,
    BiasTerm,
    FillTerm,
    FloorTerm,
    Leaf,
    vanishes_beside,
)
from compile_passes.report import Refused

Term = BiasTerm | FillTerm
Window = tuple[int | None, int | None]


class MaskEffect(NamedTuple):
    """Which scores stay, and what the others become or get added: at most `fill`, and just that
    if `level`.
    """

    keep: Condition
    fill: float
    level: bool = True


_NOTHING = MaskEffect(True, 0.0)


def terms_of(site: AttentionSite, evaluator: SymbolicEvaluator) -> list[Term]:
    """The terms that tell rows or keys apart."""
    return [part for t in _without_constants(site) for part in _parted(t, site, evaluator)]


def _without_constants(site: AttentionSite) -> list[Term]:
    """A number added to all scores changes nothing but the fills before it, and softmax ignores
    what is common to a row.
    """
    result, shift = [], 0.0
    for term in site.scores.terms:
        if isinstance(term, BiasTerm) and isinstance(term.leaf.value, float):
            number = term.coefficient * term.leaf.value
            if vanishes_beside(number, term.dtype):
                raise Refused(f"{number:g} is added to the scores, which vanish beside it")
            shift += number
        elif isinstance(term, FloorTerm):
            bound = term.value - shift
            if bound > FAR:
                raise Refused("a lower bound on the scores is within their reach")
            result = [
                dataclasses.replace(t, value=max(t.value, bound)) if isinstance(t, FillTerm) else t
                for t in result
            ]
        elif isinstance(term, FillTerm):
            result.append(dataclasses.replace(term, value=term.value - shift))
        else:
            result.append(term)
    if shift and site.sunk:
        raise Refused("a number is added to the scores but not to their sink")
    return result


def _parted(term: Term, site: AttentionSite, evaluator: SymbolicEvaluator) -> list[Term]:
    """A sum in its parts where that is of use: a gradient reaches one of them, or one hides keys
    with -inf, whatever is added there.
    """
    parts = _summands(term, site)
    effects = [read(part, evaluator) for part in parts] if not site.trains else []
    return parts if site.trains or any(m and m.fill == -math.inf for m in effects) else [term]


def _summands(term: Term, site: AttentionSite) -> list[Term]:
    """A bias that is a sum, in its parts: a learned one and a mask."""
    x, dims = _behind_views(term.leaf, site) if isinstance(term, BiasTerm) else (None, ())
    if not isinstance(x, Value) or x.op != "add" or x.writes or number(x.args.get("alpha", 1)) != 1:
        return [term]
    parts = [x.args.get(name) for name in ("input", "other")]
    if not all(isinstance(p, Value) and isinstance(p.tensor, torch.Tensor) for p in parts):
        return [term]
    if x.grad != site.core.out.grad or any(p.dtype != x.dtype for p in parts):
        return [term]
    peeled = [layout.peel(p, broadcast_dims(p.shape, dims), p.dtype, x) for p in parts]
    whole = [dataclasses.replace(term, leaf=Leaf(*p)) for p in peeled]
    return [part for w in whole for part in _summands(w, site)]


def _behind_views(leaf: Leaf, site: AttentionSite) -> tuple[object, Dims]:
    """What a bias was before views that were made under the attention's gradient mode."""
    x, dims = leaf.value, leaf.dims
    while isinstance(x, Value) and x.grad == site.core.out.grad:
        step = layout.backward(x, resolve_dims(dims)) if x.op in layout.LAYOUT else None
        if step is None:
            break
        x, dims = layout.source(x), step[0]
    return x, dims


def read(term: Term, evaluator: SymbolicEvaluator) -> MaskEffect | None:
    """(which scores are kept, what the others are filled with or get added)."""
    leaf = term.leaf if isinstance(term, BiasTerm) else term.mask
    element = _element(leaf, evaluator)
    if element is None:
        return None
    if isinstance(term, FillTerm):
        keep = negate(element) if term.where else element
        return MaskEffect(keep, term.value) if term.value <= FAR else None
    return _keep(element, term.coefficient)


def _element(leaf: Leaf, evaluator: SymbolicEvaluator) -> Element | None:
    at = coordinates(resolve_dims(leaf.dims))
    return (
        None if at is None or isinstance(leaf.value, float) else evaluator.element(leaf.value, at)
    )


def _keep(x: Element, coefficient: float) -> MaskEffect | None:
    """An additive mask: 0 where kept, one far negative number (or several) elsewhere."""
    if isinstance(x, Choice):
        yes, no = _keep(x.yes, coefficient), _keep(x.no, coefficient)
        if yes is None or no is None:
            return None
        keep = any_of(all_of(x.condition, yes.keep), all_of(negate(x.condition), no.keep))
        fills = {m.fill for m in (yes, no) if m.keep is not True}
        return MaskEffect(keep, max(fills, default=0.0), yes.level and no.level and len(fills) < 2)
    value = as_number(x)
    if value is None:
        return None
    if value == 0:
        return _NOTHING
    return MaskEffect(False, value * coefficient) if value * coefficient <= FAR else None


def window_of(effects: list[MaskEffect], site: AttentionSite) -> Window | None:
    """(left, right) if the scores kept are a band around the diagonal; None if they are anything
    else.
    """
    keep = all_of(*(m.keep for m in effects))
    if keep is True:
        return None, None
    literals = keep.conditions if isinstance(keep, All) else {keep}
    i, j = (only(g) for g in (site.queries, site.keys))
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


def only(group: tuple[Axis, ...]) -> Axis | None:
    return group[0] if len(group) == 1 else None


def every_row_attends(window: Window, site: AttentionSite) -> bool:
    """A band holds the diagonal, whose key exists for every query if there are as many keys as
    queries.
    """
    i, j = only(site.queries), only(site.keys)
    if window == (None, None):
        return True
    surplus = sympy.expand(symbolic(j.size) - symbolic(i.size))
    return bool(surplus.is_nonnegative)
