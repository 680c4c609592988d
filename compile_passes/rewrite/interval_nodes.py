"""Emission of key intervals as `key_ranges`, or as `kv_lens` where all queries attend the keys up
to the same one, and of conditions on keys as bool masks.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator

import sympy
import torch
from torch import fx

from compile_passes.graph.axes import Axis, Dims, is_one, sizes_equal
from compile_passes.graph.ir import GraphView, Value, example, is_tensor
from compile_passes.masks.affine import (
    Affine,
    All,
    Any,
    AtMost,
    Condition,
    Not,
    Opaque,
    Quotient,
    Rank,
    sort_key,
    symbolic,
)
from compile_passes.masks.classified_masks import ClassifiedMasks, EmptyRows
from compile_passes.masks.exactness import MAX_SIZE
from compile_passes.masks.key_intervals import Bound, Extreme
from compile_passes.report import Refused
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.operands import inverted

# Integers from tensors are clamped to this: beyond every key, even after an offset of half of it.
MAX_BOUND = 2**60


def _tensors_read(x: object) -> Iterator[Value]:
    """The tensors that a bound is computed from."""
    if isinstance(x, Extreme):
        for bound in x.bounds:
            yield from _tensors_read(bound)
    elif isinstance(x, (All, Any)):
        for condition in x.conditions:
            yield from _tensors_read(condition)
    elif isinstance(x, Not):
        yield from _tensors_read(x.condition)
    elif isinstance(x, Rank):
        yield from _tensors_read(x.element)
        yield from _tensors_read(x.target)
    elif isinstance(x, Affine):
        for variable, _ in x.terms:
            yield from _tensors_read(variable)
    elif isinstance(x, (Quotient, AtMost)):
        yield from _tensors_read(x.a)
    elif isinstance(x, Opaque):
        if not is_tensor(x.value):
            raise Refused("a bound of the mask is not known")
        yield x.value


class IntervalEmitter:
    """Emits the bounds of an interval, or conditions, laid out as `dims`: beside the call, or
    before the mask that they replace if the tensors that they read are written to later.
    """

    def __init__(self, emitter: Emitter, view: GraphView, mask: Value, dims: Dims) -> None:
        self._site, self._view, self._emitter = emitter.site, view, emitter
        self._mask, self._dims = mask, dims

    def bounds(self, *bounds: Bound | None) -> list[fx.Node | None]:
        """Each (B or 1, Hq or 1, Sq or 1) or None. Raises Refused if impossible."""
        with self._position([b for b in bounds if b is not None]):
            return [None if b is None else self._bound(b) for b in bounds]

    def conditions(self, conditions: tuple[Condition, ...]) -> list[fx.Node]:
        """Each as a bool tensor. Raises Refused if impossible."""
        with self._position(conditions):
            return [self._condition(c) for c in conditions]

    def _position(self, expressions: Iterable) -> contextlib.AbstractContextManager:
        """The position in the graph at which the expressions are emitted."""
        reads = [x for e in expressions for x in _tensors_read(e)]
        late = all(self._view.is_unmodified(x, self._site.core.out) for x in reads)
        position = contextlib.nullcontext() if late else self._emitter.before(self._mask.node)
        if not all(self._view.is_unmodified(x, self._mask) for x in reads):
            raise Refused("a bound of the mask is written to")
        return position

    def _condition(self, c: Condition) -> fx.Node:
        if isinstance(c, AtMost):
            return self._emitter.function(operator.le, self._affine(c.a), 0)
        if isinstance(c, Not):
            return inverted(self._emitter, self._condition(c.condition))
        if isinstance(c, (All, Any)):
            join = operator.and_ if isinstance(c, All) else operator.or_
            parts = (self._condition(x) for x in sorted(c.conditions, key=sort_key))
            return self._emitter.reduce(join, parts)
        return self._elements(c)

    def _bound(self, bound: Bound) -> fx.Node:
        if isinstance(bound, Extreme):
            function = torch.maximum if bound.is_max else torch.minimum
            return self._emitter.reduce(function, [self._bound(b) for b in bound.bounds])
        return self._affine(bound)

    def _affine(self, a: Affine, factor: int = 1) -> fx.Node:
        """An affine bound, which its use multiplies by `factor`."""
        _check_magnitude(a, factor)
        total = self._constant(a.constant)
        for x, c in sorted(a.terms, key=sort_key):
            term = self._variable(x, abs(c) * factor)
            term = term if c == 1 else self._emitter.function(operator.mul, term, c)
            total = self._emitter.function(operator.add, term, total)
        if not a.terms:
            device = self._mask.tensor.device
            total = self._emitter.function(
                torch.full, (1, 1, 1), total, dtype=torch.int64, device=device
            )
        return total

    def _constant(self, expr: sympy.Expr) -> int | fx.Node:
        """A number, or a sum of multiples of sizes."""
        total: int | fx.Node = 0
        for symbol, c in expr.as_coefficients_dict().items():
            if not isinstance(c, sympy.Integer):
                raise Refused(f"no tensor has the size {expr}, a bound of the mask")
            value = 1 if symbol == 1 else self._size(symbol)
            value = value if c == 1 else self._combine(operator.mul, value, int(c))
            total = self._combine(operator.add, value, total)
        return total

    def _combine(self, function: Callable, a: int | fx.Node, b: int | fx.Node) -> int | fx.Node:
        fixed = isinstance(a, int) and isinstance(b, int)
        return function(a, b) if fixed else self._emitter.function(function, a, b)

    def _size(self, symbol: sympy.Expr) -> int | fx.Node:
        for axis in (*self._site.queries, *self._site.keys):
            if symbolic(axis.size) == symbol:
                return self._emitter.size(axis)
        raise Refused(f"no tensor has the size {symbol}, a bound of the mask")

    def _variable(self, x: object, factor: int) -> fx.Node:
        if isinstance(x, Quotient):
            divided = self._affine(x.a, -(-factor // x.n))
            return self._emitter.function(operator.floordiv, divided, x.n)
        if isinstance(x, Opaque):
            return self._read(x, MAX_BOUND // factor)
        if isinstance(x, Rank):
            return self._rank(x)
        if not isinstance(x, Axis):
            raise Refused("a bound of the mask is not known")
        device = self._mask.tensor.device
        node = self._emitter.function(torch.arange, self._emitter.size(x), device=device)
        return self._emitter.arrange(node, ((x,),), self._dims)

    def _rank(self, x: Rank) -> fx.Node:
        """The number of keys below a target, by binary search."""
        batch, heads, _ = self._dims
        target, dims = self._affine(x.target), self._dims
        self._dims = (batch, heads, self._site.keys)
        keys = self._read(x.element, MAX_BOUND)
        self._dims = dims
        rows = [n for n in example(target).shape[:2]]
        for dim, (m, n) in enumerate(zip(example(keys).shape[:2], rows, strict=True)):
            if not sizes_equal(m, n):
                keys, target = self._broadcast(keys, target, dim)
        keys, target = (self._emitter.method("contiguous", t) for t in (keys, target))
        return self._emitter.function(torch.searchsorted, keys, target, right=x.inclusive)

    def _broadcast(self, a: fx.Node, b: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
        """Both with the same size of a dimension, which is 1 in one of them."""
        if not is_one(example(a).shape[dim]):
            return tuple(reversed(self._broadcast(b, a, dim)))
        sizes = [-1, -1, -1]
        sizes[dim] = self._emitter.method("size", b, dim)
        return self._emitter.method("expand", a, *sizes), b

    def _read(self, x: Opaque, magnitude: int) -> fx.Node:
        """The elements of a tensor as int64, clamped to `magnitude` in absolute value."""
        node, dtype = self._elements(x), x.value.dtype
        if dtype != torch.int64:
            node = self._emitter.method("to", node, torch.int64)
        if _fits(dtype, magnitude):
            return node
        return self._emitter.method("clamp", node, -magnitude, magnitude)

    def _elements(self, x: Opaque) -> fx.Node:
        """The elements of a tensor, laid out."""
        value, node, dims = x.value, x.value.node, []
        if value.tensor.device != self._mask.tensor.device:
            raise Refused("a bound of the mask is on another device")
        for dim, (at, n) in enumerate(zip(x.coordinates, value.shape, strict=True)):
            first, group = at.constant, tuple(axis for axis, _ in at.terms)
            shifted = len(group) < 2 and all(isinstance(a, Axis) and c == 1 for a, c in at.terms)
            if not shifted or not isinstance(first, sympy.Integer) or first < 0:
                raise Refused("a bound of the mask is not read from a slice of a tensor")
            if first != 0 or not sizes_equal(n, group[0].size if group else 1):
                length = self._emitter.size(group[0]) if group else 1
                node = self._emitter.method("narrow", node, dim, int(first), length)
            dims.append(group)
        return self._emitter.arrange(node, tuple(dims), self._dims)


def _check_magnitude(a: Affine, factor: int) -> None:
    """Raises Refused where int64 may not hold the sum, or a clamped integer could matter."""
    largest = [
        abs(c) * (1 if symbol == 1 else MAX_SIZE)
        for symbol, c in a.constant.as_coefficients_dict().items()
    ]
    clamped = 0
    for x, c in a.terms:
        if isinstance(x, Axis):
            largest.append(abs(c) * (x.size if type(x.size) is int else MAX_SIZE))
        elif isinstance(x, Rank):
            largest.append(abs(c) * MAX_SIZE)
        elif isinstance(x, Opaque):
            clamped += not _fits(x.value.dtype, MAX_BOUND // (abs(c) * factor))
    if clamped > 1 or sum(largest) * factor > MAX_BOUND // 2:
        raise Refused("a bound of the mask may not fit into int64")


def emit_conditions(emitter: Emitter, view: GraphView, masks: ClassifiedMasks) -> list[fx.Node]:
    """Conditions on keys as bool masks, (B or 1, Hq or 1, 1, Sk or 1)."""
    if not masks.conditions:
        return []
    mask, conditions = masks.conditions
    return IntervalEmitter(emitter, view, mask, emitter.site.mask_dims).conditions(conditions)


def _is_per_text(high: fx.Node) -> bool:
    """Whether a bound is the same for all heads and queries."""
    return all(map(is_one, example(high).shape[1:]))


def _fits(dtype: torch.dtype, magnitude: int) -> bool:
    return torch.iinfo(dtype).max <= magnitude


def emit_key_interval(
    emitter: Emitter,
    view: GraphView,
    masks: ClassifiedMasks,
    q: fx.Node,
) -> tuple[dict[str, fx.Node], fx.Node | None]:
    """(kv_lens or key_ranges, empty rows). Where these are treated specially they are given all
    keys, and otherwise they are not emitted.
    """
    interval, fill_empty = masks.interval, masks.empty_rows is not EmptyRows.ZERO
    intervals = IntervalEmitter(emitter, view, interval.leaf.value, emitter.site.row_dims)
    bounds = intervals.bounds(interval.low, interval.high)
    count, empty = emitter.size(emitter.site.keys[0]), None
    low, high = (x and emitter.method("clamp", x, 0, count) for x in bounds)
    if fill_empty:
        attended = emitter.function(operator.gt, high or count, low or 0)
        empty = emitter.function(torch.logical_not, attended)
        low = low and emitter.method("masked_fill", low, empty, 0)
        high = high and emitter.method("masked_fill", high, empty, count)
        empty = emitter.method("unsqueeze", empty, -1)
    # a length of the keys moves the diagonal, at which a window is aligned
    if low is None and masks.left is None and masks.right is None and _is_per_text(high):
        lens = emitter.method("reshape", high, -1)
        lens = emitter.method("expand", lens, emitter.method("size", q, 0))
        return {"kv_lens": emitter.method("to", lens, torch.int32)}, empty
    low = low or emitter.function(torch.zeros_like, high)
    high = high or emitter.function(torch.full_like, low, count)
    bounds = emitter.function(torch.broadcast_tensors, low, high)
    ranges = emitter.function(torch.stack, bounds, -1)
    return {"key_ranges": emitter.method("to", ranges, torch.int32)}, empty
