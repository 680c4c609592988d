"""ALiBi: biases of a slope for each head times a distance, which are an option of the operator."""

from __future__ import annotations

from typing import NamedTuple

import sympy

from compile_passes.ir import layout
from compile_passes.ir.axes import Dims, Group, resolve_dims
from compile_passes.ir.constants import constant_value
from compile_passes.ir.graph import Value, is_tensor, requires_grad
from compile_passes.masks.affine import AbsoluteValue, Affine, Coordinates, symbolic
from compile_passes.masks.mask_terms import ClassifiedMasks, EmptyRows, Term, single_axis
from compile_passes.masks.symbolic_evaluator import (
    RULES,
    SymbolicEvaluator,
    broadcast_coordinates,
    coordinates,
)
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.states import BiasTerm, Leaf

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
            views = x.op in _VIEWS and (x.op != "getitem" or layout.only_inserts_dims(x))
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
