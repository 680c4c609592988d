"""Emission of key intervals as `key_ranges`, or as `kv_lens` where there is one query."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator

import sympy
import torch
from torch import fx

from compile_passes.graph.axes import Axis, is_one, sizes_equal
from compile_passes.graph.ir import GraphView, Value, example, is_tensor
from compile_passes.masks.affine import Affine, Opaque, Quotient, sort_key, symbolic
from compile_passes.masks.exactness import MAX_SIZE
from compile_passes.masks.key_intervals import Bound, Extreme, KeyInterval
from compile_passes.report import Refused
from compile_passes.rewrite.emitter import Emitter

# Integers from tensors are clamped to this: beyond every key, even after an offset of half of it.
MAX_BOUND = 2**60


def _tensors_read(x: object) -> Iterator[Value]:
    """The tensors that a bound is computed from."""
    if isinstance(x, Extreme):
        for bound in x.bounds:
            yield from _tensors_read(bound)
    elif isinstance(x, Affine):
        for variable, _ in x.terms:
            yield from _tensors_read(variable)
    elif isinstance(x, Quotient):
        yield from _tensors_read(x.a)
    elif isinstance(x, Opaque):
        if not is_tensor(x.value):
            raise Refused("a bound of the mask is not known")
        yield x.value


class IntervalEmitter:
    """Emits the bounds of an interval: beside the call, or before the mask that they replace if the
    tensors that they read are written to later.
    """

    def __init__(self, emitter: Emitter, view: GraphView, interval: KeyInterval) -> None:
        self._site, self._view, self._emitter = emitter.site, view, emitter
        self._interval, self._mask = interval, interval.leaf.value

    def emit(self) -> tuple[fx.Node | None, fx.Node | None]:
        """(low, high), each (B or 1, Hq or 1, Sq or 1) or None. Raises Refused if impossible."""
        bounds = (self._interval.low, self._interval.high)
        reads = [x for b in bounds if b is not None for x in _tensors_read(b)]
        late = all(self._view.is_unmodified(x, self._site.core.out) for x in reads)
        position = contextlib.nullcontext() if late else self._emitter.before(self._mask.node)
        if not all(self._view.is_unmodified(x, self._mask) for x in reads):
            raise Refused("a bound of the mask is written to")
        with position:
            low, high = (None if b is None else self._bound(b) for b in bounds)
        return low, high

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
        if not isinstance(x, Axis):
            raise Refused("a bound of the mask is not known")
        device = self._mask.tensor.device
        node = self._emitter.function(torch.arange, self._emitter.size(x), device=device)
        return self._emitter.arrange(node, ((x,),), self._site.row_dims)

    def _read(self, x: Opaque, magnitude: int) -> fx.Node:
        """The elements of a tensor as int64, clamped to `magnitude` in absolute value."""
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
        node = self._emitter.arrange(node, tuple(dims), self._site.row_dims)
        if value.dtype != torch.int64:
            node = self._emitter.method("to", node, torch.int64)
        if _fits(value.dtype, magnitude):
            return node
        return self._emitter.method("clamp", node, -magnitude, magnitude)


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
        elif isinstance(x, Opaque):
            clamped += not _fits(x.value.dtype, MAX_BOUND // (abs(c) * factor))
    if clamped > 1 or sum(largest) * factor > MAX_BOUND // 2:
        raise Refused("a bound of the mask may not fit into int64")


def _fits(dtype: torch.dtype, magnitude: int) -> bool:
    return torch.iinfo(dtype).max <= magnitude


def emit_key_interval(
    emitter: Emitter, view: GraphView, interval: KeyInterval, q: fx.Node, fill_empty: bool
) -> tuple[dict[str, fx.Node], fx.Node | None]:
    """(kv_lens or key_ranges, empty rows); if `fill_empty`, empty rows are given all keys, and
    otherwise they are not emitted.
    """
    bounds = IntervalEmitter(emitter, view, interval).emit()
    count, empty = emitter.size(emitter.site.keys[0]), None
    low, high = (x and emitter.method("clamp", x, 0, count) for x in bounds)
    if fill_empty:
        attended = emitter.function(operator.gt, high or count, low or 0)
        empty = emitter.function(torch.logical_not, attended)
        low = low and emitter.method("masked_fill", low, empty, 0)
        high = high and emitter.method("masked_fill", high, empty, count)
        empty = emitter.method("unsqueeze", empty, -1)
    if low is None and not emitter.site.queries and is_one(example(high).shape[1]):
        lens = emitter.method("reshape", high, -1)
        lens = emitter.method("expand", lens, emitter.method("size", q, 0))
        return {"kv_lens": emitter.method("to", lens, torch.int32)}, empty
    low = low or emitter.function(torch.zeros_like, high)
    high = high or emitter.function(torch.full_like, low, count)
    bounds = emitter.function(torch.broadcast_tensors, low, high)
    ranges = emitter.function(torch.stack, bounds, -1)
    return {"key_ranges": emitter.method("to", ranges, torch.int32)}, empty
