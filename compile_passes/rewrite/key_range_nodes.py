"""Key intervals as tensors: `key_ranges`, or `kv_lens` for one query."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator

import sympy
import torch
from torch import fx

from compile_passes.graph.axes import Axis, Dims, is_one, same
from compile_passes.graph.ir import Value, View, example
from compile_passes.masks.affine import (
    Affine,
    Opaque,
    Quotient,
    order,
    symbolic,
)
from compile_passes.masks.exactness import LARGEST_SIZE
from compile_passes.masks.key_intervals import Bound, Extreme, KeyInterval
from compile_passes.match.attention_site import AttentionSite
from compile_passes.report import Refused
from compile_passes.rewrite.emitter import Emitter

OUT_OF_REACH = 2**60  # so far off every key that a sum with what is within half of it is too


def _reads(x: object) -> Iterator[Value]:
    """The tensors that a bound is made of."""
    if isinstance(x, Extreme):
        for bound in x.bounds:
            yield from _reads(bound)
    elif isinstance(x, Affine):
        for variable, _ in x.terms:
            yield from _reads(variable)
    elif isinstance(x, Quotient):
        yield from _reads(x.a)
    elif isinstance(x, Opaque):
        if not isinstance(x.value, Value) or not isinstance(x.value.tensor, torch.Tensor):
            raise Refused("a bound of the mask is not known")
        yield x.value


@dataclasses.dataclass
class IntervalNodes:
    """Bounds as nodes: (B or 1, Hq or 1, Sq or 1) each; None where there is no bound."""

    low: fx.Node | None
    high: fx.Node | None


class BoundWriter:
    """Writes bounds as tensors: beside the call, or before the mask that they stand for if what
    they read is written to later.
    """

    def __init__(
        self, site: AttentionSite, view: View, emitter: Emitter, made: KeyInterval
    ) -> None:
        self._site, self._view, self._emitter = site, view, emitter
        self._interval, self._mask = made, made.leaf.value
        self._dims: Dims = (site.batch, site.heads, site.queries)

    def write(self) -> IntervalNodes:
        made = (self._interval.low, self._interval.high)
        reads = [x for b in made if b is not None for x in _reads(b)]
        late = all(self._view.intact(x, self._site.core.out) for x in reads)
        place = contextlib.nullcontext() if late else self._emitter.before(self._mask.node)
        if not all(self._view.intact(x, self._mask) for x in reads):
            raise Refused("a bound of the mask is written to")
        with place:
            return IntervalNodes(*(None if b is None else self._bound(b) for b in made))

    def _bound(self, bound: Bound) -> fx.Node:
        if isinstance(bound, Extreme):
            pick = torch.maximum if bound.greatest else torch.minimum
            first, *rest = (self._bound(b) for b in bound.bounds)
            for one in rest:
                first = self._emitter.function(pick, first, one)
            return first
        return self._affine(bound)

    def _affine(self, a: Affine, factor: int = 1) -> fx.Node:
        """`factor`: what the sum is multiplied by where it is used."""
        _check_reach(a, factor)
        total = self._constant(a.constant)
        for x, c in sorted(a.terms, key=order):
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
        """A number, or a sum of sizes."""
        total: int | fx.Node = 0
        for symbol, c in expr.as_coefficients_dict().items():
            if not isinstance(c, sympy.Integer):
                raise Refused(f"no tensor shows {expr}, a bound of the mask")
            value = 1 if symbol == 1 else self._size(symbol)
            value = value if c == 1 else self._times(value, int(c))
            both_int = isinstance(total, int) and isinstance(value, int)
            total = (
                total + value if both_int else self._emitter.function(operator.add, value, total)
            )
        return total

    def _times(self, value: int | fx.Node, c: int) -> int | fx.Node:
        if isinstance(value, int):
            return value * c
        return self._emitter.function(operator.mul, value, c)

    def _size(self, symbol: sympy.Expr) -> int | fx.Node:
        for axis in (*self._site.queries, *self._site.keys):
            if symbolic(axis.size) == symbol:
                return self._emitter.size(axis)
        raise Refused(f"no tensor shows {symbol}, a bound of the mask")

    def _variable(self, x: object, factor: int) -> fx.Node:
        if isinstance(x, Quotient):
            divided = self._affine(x.a, -(-factor // x.n))
            return self._emitter.function(operator.floordiv, divided, x.n)
        if isinstance(x, Opaque):
            return self._read(x, OUT_OF_REACH // factor)
        if not isinstance(x, Axis):
            raise Refused("a bound of the mask is not known")
        device = self._mask.tensor.device
        node = self._emitter.function(torch.arange, self._emitter.size(x), device=device)
        return self._emitter.arrange(node, ((x,),), self._dims)

    def _read(self, x: Opaque, reach: int) -> fx.Node:
        """What the tensor holds there, as int64, no further than `reach` from 0."""
        value, node, dims = x.value, x.value.node, []
        if value.tensor.device != self._mask.tensor.device:
            raise Refused("a bound of the mask is on another device")
        for dim, (at, n) in enumerate(zip(x.coordinates, value.shape, strict=True)):
            first, group = at.constant, tuple(axis for axis, _ in at.terms)
            plain = len(group) < 2 and all(isinstance(a, Axis) and c == 1 for a, c in at.terms)
            if not plain or not isinstance(first, sympy.Integer) or first < 0:
                raise Refused("a bound of the mask is read from somewhere inside a tensor")
            if first != 0 or not same(n, group[0].size if group else 1):
                length = self._emitter.size(group[0]) if group else 1
                node = self._emitter.method("narrow", node, dim, int(first), length)
            dims.append(group)
        node = self._emitter.arrange(node, tuple(dims), self._dims)
        if value.dtype != torch.int64:
            node = self._emitter.method("to", node, torch.int64)
        if _within(value.dtype, reach):
            return node
        return self._emitter.method("clamp", node, -reach, reach)


def _check_reach(a: Affine, factor: int) -> None:
    """Raises Refused where int64 may not hold the sum, or a clamped integer not be out of reach."""
    largest = [
        abs(c) * (1 if symbol == 1 else LARGEST_SIZE)
        for symbol, c in a.constant.as_coefficients_dict().items()
    ]
    clamped = 0
    for x, c in a.terms:
        if isinstance(x, Axis):
            largest.append(abs(c) * (x.size if type(x.size) is int else LARGEST_SIZE))
        elif isinstance(x, Opaque):
            clamped += not _within(x.value.dtype, OUT_OF_REACH // (abs(c) * factor))
    if clamped > 1 or sum(largest) * factor > OUT_OF_REACH // 2:
        raise Refused("a bound of the mask may not fit into int64")


def _within(dtype: torch.dtype, reach: int) -> bool:
    return torch.iinfo(dtype).max <= reach


def limits(
    site: AttentionSite,
    made: KeyInterval,
    view: View,
    emitter: Emitter,
    q: fx.Node,
    fill_dead: bool,
) -> tuple[dict[str, fx.Node], fx.Node | None]:
    """(kv_lens or key_ranges, rows without keys); if `fill_dead`, such rows are given all keys."""
    written = BoundWriter(site, view, emitter, made).write()
    count, dead = emitter.size(site.keys[0]), None
    low, high = (x and emitter.method("clamp", x, 0, count) for x in (written.low, written.high))
    if fill_dead:
        alive = emitter.function(operator.gt, high or count, low or 0)
        dead = emitter.function(torch.logical_not, alive)
        low = low and emitter.method("masked_fill", low, dead, 0)
        high = high and emitter.method("masked_fill", high, dead, count)
        dead = emitter.method("unsqueeze", dead, -1)
    if low is None and not site.queries and is_one(example(high).shape[1]):
        lens = emitter.method("reshape", high, -1)
        lens = emitter.method("expand", lens, emitter.method("size", q, 0))
        return {"kv_lens": emitter.method("to", lens, torch.int32)}, dead
    low = low or emitter.function(torch.zeros_like, high)
    high = high or emitter.function(torch.full_like, low, count)
    both = emitter.function(torch.broadcast_tensors, low, high)
    ranges = emitter.function(torch.stack, both, -1)
    return {"key_ranges": emitter.method("to", ranges, torch.int32)}, dead
