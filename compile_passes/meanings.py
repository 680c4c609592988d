"""What each term of the scores means by itself: which scores stay, and what becomes of the others;
and whether several leave a window.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import sympy
import torch

from compile_passes import layout
from compile_passes.axes import Axis, Dims, broadcast_dims, resolve_dims
from compile_passes.constants import number
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
from compile_passes.ir import Value
from compile_passes.plan import Plan, Refused
from compile_passes.states import FAR, Bias, Fill, Floor, Leaf, vanishes_beside

Term = Bias | Fill
Window = tuple[int | None, int | None]


class Meaning(NamedTuple):
    """Which scores stay, and what the others become or get added: at most `fill`, and just that
    if `level`.
    """

    keep: Condition
    fill: float
    level: bool = True


_NOTHING = Meaning(True, 0.0)


def terms_of(plan: Plan, reader: Reader) -> list[Term]:
    """The terms that tell rows or keys apart."""
    return [part for t in _without_constants(plan) for part in _parted(t, plan, reader)]


def _without_constants(plan: Plan) -> list[Term]:
    """A number added to all scores changes nothing but the fills before it, and softmax ignores
    what is common to a row.
    """
    result, shift = [], 0.0
    for term in plan.scores.terms:
        if isinstance(term, Bias) and isinstance(term.leaf.value, float):
            number = term.coefficient * term.leaf.value
            if vanishes_beside(number, term.dtype):
                raise Refused(f"{number:g} is added to the scores, which vanish beside it")
            shift += number
        elif isinstance(term, Floor):
            bound = term.value - shift
            if bound > FAR:
                raise Refused("a lower bound on the scores is within their reach")
            result = [
                dataclasses.replace(t, value=max(t.value, bound)) if isinstance(t, Fill) else t
                for t in result
            ]
        elif isinstance(term, Fill):
            result.append(dataclasses.replace(term, value=term.value - shift))
        else:
            result.append(term)
    if shift and plan.sunk:
        raise Refused("a number is added to the scores but not to their sink")
    return result


def _parted(term: Term, plan: Plan, reader: Reader) -> list[Term]:
    """A sum in its parts where that tells more: a gradient reaches one of them, or one hides keys
    with -inf, whatever is added there.
    """
    parts = _summands(term, plan)
    meanings = [read(part, reader) for part in parts] if not plan.trains else []
    return parts if plan.trains or any(m and m.fill == -math.inf for m in meanings) else [term]


def _summands(term: Term, plan: Plan) -> list[Term]:
    """A bias that is a sum, in its parts: a learned one and a mask."""
    x, dims = _behind_views(term.leaf, plan) if isinstance(term, Bias) else (None, ())
    if not isinstance(x, Value) or x.op != "add" or x.writes or number(x.args.get("alpha", 1)) != 1:
        return [term]
    parts = [x.args.get(name) for name in ("input", "other")]
    if not all(isinstance(p, Value) and isinstance(p.tensor, torch.Tensor) for p in parts):
        return [term]
    if x.grad != plan.core.out.grad or any(p.dtype != x.dtype for p in parts):
        return [term]
    peeled = [layout.peel(p, broadcast_dims(p.shape, dims), p.dtype, x) for p in parts]
    whole = [dataclasses.replace(term, leaf=Leaf(*p)) for p in peeled]
    return [part for w in whole for part in _summands(w, plan)]


def _behind_views(leaf: Leaf, plan: Plan) -> tuple[object, Dims]:
    """What a bias was before views that were made under the attention's gradient mode."""
    x, dims = leaf.value, leaf.dims
    while isinstance(x, Value) and x.grad == plan.core.out.grad:
        step = layout.backward(x, resolve_dims(dims)) if x.op in layout.LAYOUT else None
        if step is None:
            break
        x, dims = layout.source(x), step[0]
    return x, dims


def read(term: Term, reader: Reader) -> Meaning | None:
    """(which scores are kept, what the others are filled with or get added)."""
    leaf = term.leaf if isinstance(term, Bias) else term.mask
    element = _element(leaf, reader)
    if element is None:
        return None
    if isinstance(term, Fill):
        keep = negate(element) if term.where else element
        return Meaning(keep, term.value) if term.value <= FAR else None
    return _keep(element, term.coefficient)


def _element(leaf: Leaf, reader: Reader) -> Element | None:
    at = coordinates(resolve_dims(leaf.dims))
    return None if at is None or isinstance(leaf.value, float) else reader.element(leaf.value, at)


def _keep(x: Element, coefficient: float) -> Meaning | None:
    """An additive mask: 0 where kept, one far negative number (or several) elsewhere."""
    if isinstance(x, Choice):
        yes, no = _keep(x.yes, coefficient), _keep(x.no, coefficient)
        if yes is None or no is None:
            return None
        keep = any_of(all_of(x.condition, yes.keep), all_of(negate(x.condition), no.keep))
        fills = {m.fill for m in (yes, no) if m.keep is not True}
        return Meaning(keep, max(fills, default=0.0), yes.level and no.level and len(fills) < 2)
    value = as_number(x)
    if value is None:
        return None
    if value == 0:
        return _NOTHING
    return Meaning(False, value * coefficient) if value * coefficient <= FAR else None


def window_of(meanings: list[Meaning], plan: Plan) -> Window | None:
    """(left, right) if the scores kept are a band around the diagonal; None if they are anything
    else.
    """
    keep = all_of(*(m.keep for m in meanings))
    if keep is True:
        return None, None
    literals = keep.conditions if isinstance(keep, All) else {keep}
    i, j = (only(g) for g in (plan.queries, plan.keys))
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


def every_row_attends(window: Window, plan: Plan) -> bool:
    """A band holds the diagonal, whose key exists for every query if there are as many keys as
    queries.
    """
    i, j = only(plan.queries), only(plan.keys)
    if window == (None, None):
        return True
    surplus = sympy.expand(symbolic(j.size) - symbolic(i.size))
    return bool(surplus.is_nonnegative)
