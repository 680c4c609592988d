"""Masks that let each query attend one run of keys: `key_ranges`, or `kv_lens` for one query.

A condition on the key j is a run if it bounds j from below and above by what does not depend on j:
causal with an offset that is only known at run time, windows, chunks (i // c == j // c), prefixes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from typing import NamedTuple

import sympy
import torch
from torch import fx

from compile_passes.axes import Axis, Dims, is_one, same
from compile_passes.emit import Emitter
from compile_passes.exactness import LARGEST_SIZE
from compile_passes.expressions import (
    Affine,
    All,
    Any,
    AtMost,
    Condition,
    Opaque,
    Quotient,
    all_of,
    any_of,
    at_most,
    order,
    symbolic,
)
from compile_passes.ir import Value, View, example
from compile_passes.plan import Plan, Refused
from compile_passes.states import Leaf

OUT_OF_REACH = 2**61  # so far off every key that a sum with what is within half of it is too


class Extreme(NamedTuple):
    """The greatest or the least of several bounds."""

    greatest: bool
    bounds: tuple


Bound = Affine | Extreme


@dataclasses.dataclass(frozen=True)
class Run:
    """low <= j < high; None: the first or the last key. `leaf` is the mask that says so."""

    low: Bound | None
    high: Bound | None
    leaf: Leaf | None = None


def run(keep: Condition, j: Axis) -> Run | None:
    """The run of keys that a condition keeps; None if it is not one, or not known to be."""
    if keep is True:
        return Run(None, None)
    if isinstance(keep, AtMost):
        return _literal(keep.a, j)
    if not isinstance(keep, (All, Any)):
        return None
    runs = [run(c, j) for c in sorted(keep.conditions, key=order)]
    if None in runs:
        return None
    lows = [r.low for r in runs if r.low is not None]
    highs = [r.high for r in runs if r.high is not None]
    if isinstance(keep, All):
        return Run(_extreme(True, lows), _extreme(False, highs))
    if lows and highs:
        return None
    return Run(_extreme(False, lows), _extreme(True, highs))  # of runs that end alike


def _extreme(greatest: bool, bounds: list[Bound]) -> Bound | None:
    if len(bounds) < 2:
        return bounds[0] if bounds else None
    return Extreme(greatest, tuple(bounds))


def _literal(a: Affine, j: Axis) -> Run | None:
    """c * j + rest <= 0, or c * (j // n) + rest <= 0, for c = 1 and -1."""
    ours = [(x, c) for x, c in a.terms if _depends(x, j)]
    if len(ours) != 1 or abs(ours[0][1]) != 1:
        return None
    ((x, c),) = ours
    rest = a.plus(Affine.variable(x).times(c), -1)
    shift, n = Affine.of(0), 1
    if isinstance(x, Quotient):
        shift, n = x.a.plus(Affine.variable(j), -1), x.n
        if any(_depends(y, j) for y, _ in shift.terms):
            return None
    elif x is not j:
        return None
    if c > 0:  # (j + shift) // n <= -rest
        return Run(None, Affine.of(1).plus(rest, -1).times(n).plus(shift, -1))
    return Run(rest.times(n).plus(shift, -1), None)


def _depends(x: object, j: Axis) -> bool:
    if isinstance(x, Quotient):
        return any(_depends(y, j) for y, _ in x.a.terms)
    if isinstance(x, Opaque):
        return any(_depends(y, j) for at in x.coordinates for y, _ in at.terms)
    return x is j


def attends_itself(keep: Condition, i: Axis | None, j: Axis) -> bool:
    """Whether each query keeps the key on its own place, of which there is one."""
    if i is None:
        return False
    surplus = sympy.expand(symbolic(j.size) - symbolic(i.size))
    place = Affine.variable(i).plus(Affine.of(surplus))
    return bool(surplus.is_nonnegative) and _at(keep, j, place) is True


def _at(c: Condition, j: Axis, place: Affine) -> Condition:
    """The condition where the key is `place`."""
    if isinstance(c, (All, Any)):
        join = all_of if isinstance(c, All) else any_of
        return join(*(_at(x, j, place) for x in c.conditions))
    return at_most(_put(c.a, j, place)) if isinstance(c, AtMost) else c


def _put(a: Affine, j: Axis, place: Affine) -> Affine:
    result = Affine.of(a.constant)
    for x, c in a.terms:
        if isinstance(x, Quotient):
            x = Affine.variable(Quotient(_put(x.a, j, place), x.n))
        else:
            x = place if x is j else Affine.variable(x)
        result = result.plus(x.times(c))
    return result


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
class Written:
    """Nodes of a run: (B or 1, Hq or 1, Sq or 1) each; None where there is no bound."""

    low: fx.Node | None
    high: fx.Node | None


class Writer:
    """Writes bounds as tensors: beside the call, or before the mask that they stand for if what
    they read is written to later.
    """

    def __init__(self, plan: Plan, view: View, emitter: Emitter, made: Run) -> None:
        self._plan, self._view, self._emitter = plan, view, emitter
        self._run, self._mask = made, made.leaf.value
        self._dims: Dims = (plan.batch, plan.heads, plan.queries)

    def write(self) -> Written:
        made = (self._run.low, self._run.high)
        reads = [x for b in made if b is not None for x in _reads(b)]
        late = all(self._view.intact(x, self._plan.core.out) for x in reads)
        place = contextlib.nullcontext() if late else self._emitter.before(self._mask.node)
        if not all(self._view.intact(x, self._mask) for x in reads):
            raise Refused("a bound of the mask is written to")
        with place:
            return Written(*(None if b is None else self._bound(b) for b in made))

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
        for axis in (*self._plan.queries, *self._plan.keys):
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
    plan: Plan, made: Run, view: View, emitter: Emitter, q: fx.Node, fill_dead: bool
) -> tuple[dict[str, fx.Node], fx.Node | None]:
    """(kv_lens or key_ranges, rows without keys); if `fill_dead`, such rows are given all keys."""
    written = Writer(plan, view, emitter, made).write()
    count, dead = emitter.size(plan.keys[0]), None
    low, high = (x and emitter.method("clamp", x, 0, count) for x in (written.low, written.high))
    if fill_dead:
        alive = emitter.function(operator.gt, high or count, low or 0)
        dead = emitter.function(torch.logical_not, alive)
        low = low and emitter.method("masked_fill", low, dead, 0)
        high = high and emitter.method("masked_fill", high, dead, count)
        dead = emitter.method("unsqueeze", dead, -1)
    if low is None and not plan.queries and is_one(example(high).shape[1]):
        lens = emitter.method("reshape", high, -1)
        lens = emitter.method("expand", lens, emitter.method("size", q, 0))
        return {"kv_lens": emitter.method("to", lens, torch.int32)}, dead
    low = low or emitter.function(torch.zeros_like, high)
    high = high or emitter.function(torch.full_like, low, count)
    both = emitter.function(torch.broadcast_tensors, low, high)
    ranges = emitter.function(torch.stack, both, -1)
    return {"key_ranges": emitter.method("to", ranges, torch.int32)}, dead
