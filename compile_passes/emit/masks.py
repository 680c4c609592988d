"""What masks and sinks become in the graph: key ranges, lengths, bool masks, `mask_blocks`, and the
log-sum-exp.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator

import sympy
import torch
from torch import Tensor, fx

from compile_passes.emit.emitter import (
    Emitter,
    aligned,
    bias,
    bool_mask,
    cast,
    fill_where,
    inverted,
    only_backward,
)
from compile_passes.ir.axes import Axis, Dims, is_one, sizes_equal
from compile_passes.ir.graph import (
    GraphView,
    Value,
    example,
    has_no_effect,
    is_random,
    is_tensor,
    requires_grad,
    written_nodes,
)
from compile_passes.ir.vocabulary import operation, raw_name
from compile_passes.masks.affine import (
    MAX_SIZE,
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
from compile_passes.masks.mask_terms import Bound, ClassifiedMasks, EmptyRows, Extreme, KeepMask
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.states import (
    MAX_ROW_MASK,
    BiasTerm,
    ClampTerm,
    FillTerm,
    Leaf,
    absorbing_number,
)
from compile_passes.report import Refusal
from fa_ops.call.options import MASK_BLOCK
from fa_ops.plans.dispatch import mask_blocks_pay

# Emission of key intervals as `key_ranges`, or as `kv_lens` where all queries attend the keys up to
# the same one, and of conditions on keys as bool masks.

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
            raise Refusal("a bound of the mask is not known")
        yield x.value


class IntervalEmitter:
    """Emits the bounds of an interval, or conditions, laid out as `dims`: beside the call, or
    before the mask that they replace if the tensors that they read are written to later.
    """

    def __init__(self, emitter: Emitter, view: GraphView, mask: Value, dims: Dims) -> None:
        self._site, self._view, self._emitter = emitter.site, view, emitter
        self._mask, self._dims = mask, dims

    def bounds(self, *bounds: Bound | None) -> list[fx.Node | None]:
        """Each (B or 1, Hq or 1, Sq or 1) or None. Raises Refusal if impossible."""
        with self._position([b for b in bounds if b is not None]):
            return [None if b is None else self._bound(b) for b in bounds]

    def conditions(self, conditions: tuple[Condition, ...]) -> list[fx.Node]:
        """Each as a bool tensor. Raises Refusal if impossible."""
        with self._position(conditions):
            return [self._condition(c) for c in conditions]

    def _position(self, expressions: Iterable) -> contextlib.AbstractContextManager:
        """The position in the graph at which the expressions are emitted."""
        reads = [x for e in expressions for x in _tensors_read(e)]
        late = all(self._view.is_unmodified(x, self._site.core.out) for x in reads)
        position = contextlib.nullcontext() if late else self._emitter.before(self._mask.node)
        if not all(self._view.is_unmodified(x, self._mask) for x in reads):
            raise Refusal("a bound of the mask is written to")
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
                raise Refusal(f"no tensor has the size {expr}, a bound of the mask")
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
        raise Refusal(f"no tensor has the size {symbol}, a bound of the mask")

    def _variable(self, x: object, factor: int) -> fx.Node:
        if isinstance(x, Quotient):
            divided = self._affine(x.a, -(-factor // x.n))
            return self._emitter.function(operator.floordiv, divided, x.n)
        if isinstance(x, Opaque):
            return self._read(x, MAX_BOUND // factor)
        if isinstance(x, Rank):
            return self._rank(x)
        if not isinstance(x, Axis):
            raise Refusal("a bound of the mask is not known")
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
            raise Refusal("a bound of the mask is on another device")
        for dim, (at, n) in enumerate(zip(x.coordinates, value.shape, strict=True)):
            first, group = at.constant, tuple(axis for axis, _ in at.terms)
            shifted = len(group) < 2 and all(isinstance(a, Axis) and c == 1 for a, c in at.terms)
            if not shifted or not isinstance(first, sympy.Integer) or first < 0:
                raise Refusal("a bound of the mask is not read from a slice of a tensor")
            if first != 0 or not sizes_equal(n, group[0].size if group else 1):
                length = self._emitter.size(group[0]) if group else 1
                node = self._emitter.method("narrow", node, dim, int(first), length)
            dims.append(group)
        return self._emitter.arrange(node, tuple(dims), self._dims)


def _check_magnitude(a: Affine, factor: int) -> None:
    """Raises Refusal where int64 may not hold the sum, or a clamped integer could matter."""
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
        raise Refusal("a bound of the mask may not fit into int64")


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


# `fa::mask_blocks` for the dense masks that are left: one call for all attentions of a mask.
#
# Attentions share it where their masks are the same node, or were made by the same operations from
# the same nodes, as each layer makes its own from the model's. Bool masks, ranges and lengths that
# are equal in this sense are made once. After any write to memory all are made again.

MASK_BLOCKS = torch.ops.fa.mask_blocks.default
_ATTENTION = (torch.ops.fa.attention.default, torch.ops.fa.attention_with_lse.default)
_MASK = 3  # the position of attn_mask among the operators' arguments
_POSITIONS = ("key_ranges", "kv_lens")


def add_mask_blocks(graph: fx.Graph) -> int:
    """Give attentions with a dense mask its blocks where that pays; returns how many were given."""
    made: dict[int, fx.Node] = {}
    first: dict[int, fx.Node] = {}
    numbers, given = _Numbers(), 0
    for node in list(graph.nodes):
        if node.target in _ATTENTION:
            for x in _shared_inputs(node):
                node.replace_input_with(x, first.setdefault(numbers.of(x), x))
            mask = _dense_mask(node)
            if mask is None or not _pays(node, mask):
                continue
            number = numbers.of(mask)
            if number not in made:
                with graph.inserting_before(node):
                    made[number] = _insert(graph, mask)
            node.kwargs = node.kwargs | {"mask_blocks": made[number]}
            given += 1
        elif _writes(node):
            made, first, numbers = {}, {}, _Numbers()
    return given


def _shared_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of an attention that have no gradients: a bool mask, ranges and lengths."""
    mask = _dense_mask(node)
    found = [x for x in map(node.kwargs.get, _POSITIONS) if isinstance(x, fx.Node)]
    return found + [mask] * (mask is not None and example(mask).dtype == torch.bool)


def _dense_mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention."""
    mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _pays(node: fx.Node, mask: fx.Node) -> bool:
    """Whether an attention is faster with the blocks of its mask, and has none."""
    queries, mask_rows = example(node.args[0]).shape[2], (1, 1, *example(mask).shape)[-2]
    if node.kwargs.get("mask_blocks") is not None or sizes_equal(mask_rows, 1):
        return False
    # a length that may vary is that of prompts: graphs of single tokens are made for 1
    count = queries if type(queries) is int else MASK_BLOCK
    return mask_blocks_pay(count, example(mask))


def _insert(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    node = graph.call_function(MASK_BLOCKS, (mask,))
    name = "example_value" if "example_value" in mask.meta else "val"
    value: Tensor = example(mask)
    node.meta = {**mask.meta, name: MASK_BLOCKS(value.detach())}
    return node


def _writes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    writes = operation(node)[2]
    return bool(writes or written_nodes(node, writes))


class _Numbers:
    """Numbers of values: equal where nodes compute the same from the same nodes."""

    def __init__(self) -> None:
        self._of_node: dict[fx.Node, int] = {}
        self._of_operation: dict[tuple, int] = {}
        self._next = itertools.count()

    def of(self, node: fx.Node) -> int:
        """The number of a node's value."""
        if node not in self._of_node:
            key = self._key(node)
            self._of_node[node] = self._of_operation.setdefault(key, next(self._next))
        return self._of_node[node]

    def _key(self, node: fx.Node) -> tuple:
        if node.op == "get_attr":
            return "get_attr", node.target
        if not has_no_effect(node):
            return (node,)
        numbered = fx.map_arg((node.args, node.kwargs), lambda x: ("value", self.of(x)))
        return node.op, node.target, repr(numbered)


# Emission of masks and sinks: sums of biases, conjunctions of bool masks, and the rows that they
# leave empty, without keys to attend.


@dataclasses.dataclass(frozen=True)
class MaskNodes:
    """`attn_mask` and the query for the call, and `empty_rows` (B or 1, Hq or 1, Sq or 1, 1), which
    average their keys: with a query of 0, or because the call is told so.

    A float mask also has `averaged`, the keys that an empty row averages; `filled`, the keys whose
    scores a fill replaced; `total`, the sum of all masks; `row_max`, its maximum in each row; and
    `shift`, what was subtracted from each row.
    """

    mask: fx.Node | None
    query: fx.Node
    empty_rows: fx.Node | None
    averaged: fx.Node | None = None
    filled: fx.Node | None = None
    total: fx.Node | None = None
    row_max: fx.Node | None = None
    shift: fx.Node | None = None


def emit_masks(
    emitter: Emitter,
    masks: ClassifiedMasks,
    q: fx.Node,
    empty_rows: fx.Node | None,
    conditions: list[fx.Node],
    averaging: bool,
) -> MaskNodes:
    """The masks as nodes. `empty_rows` are known already where a key interval was emitted, and
    `conditions` are bool masks. With `averaging`, the call is told which rows are empty, and its
    query remains as it is.
    """
    if masks.float_terms:
        return _emit_float_mask(emitter, masks, q, averaging)
    keeps = [_keep(emitter, mask) for mask in masks.keeps]
    keep = emitter.reduce(operator.and_, [*keeps, *conditions])
    if masks.empty_rows is not EmptyRows.ZERO and empty_rows is None:
        empty_rows = inverted(emitter, emitter.method("any", keep, dim=-1, keepdim=True))
        keep = keep if averaging else emitter.function(operator.or_, keep, empty_rows)
    if masks.empty_rows not in (EmptyRows.ZERO, EmptyRows.ADDED) and not averaging:
        q = emitter.method("masked_fill", q, empty_rows, 0.0)
    biases = [bias(emitter, term) for term in masks.biases]
    biases += [_added_fill(emitter, masks.added_fill)] if masks.added_fill else []
    total = emitter.reduce(operator.add, biases)
    if total is None and keep is not None and masks.interval:  # key_ranges permit no bool mask
        total = fill_where(emitter, keep, None, -math.inf, torch.float32)
        return MaskNodes(total, q, empty_rows)
    if total is None:
        return MaskNodes(keep, q, empty_rows)
    total = _supported_mask(emitter, total)
    if empty_rows is not None:
        total = emitter.method("masked_fill", total, empty_rows, 0.0)
    if keep is not None:
        total = emitter.method("masked_fill", total, inverted(emitter, keep), -math.inf)
    return MaskNodes(total, q, empty_rows)


def _emit_float_mask(
    emitter: Emitter, masks: ClassifiedMasks, q: fx.Node, averaging: bool
) -> MaskNodes:
    """All masks as the float that eager mode adds to each score, or replaces it by.

    A row is empty if the scores of the keys that have its maximum are lost; it averages these keys.
    In other rows a large maximum is subtracted, because the backward pass reads the weights from a
    float32 log-sum-exp.
    """
    total, filled, lost = None, None, None
    limits_differ = len({absorbing_number(t.dtype, t.rescaled) for t in masks.float_terms}) > 1
    for term in masks.float_terms:
        if isinstance(term, BiasTerm):
            one = bias(emitter, term)
            total = one if total is None else emitter.function(operator.add, total, one)
            total = cast(emitter, total, term.dtype)
            if limits_differ:
                lost = _either(emitter, lost, _absorbing(emitter, total, term))
            continue
        mask = bool_mask(emitter, term.mask, emitter.site.mask_dims)
        kept = inverted(emitter, mask) if term.where else mask
        hidden = mask if term.where else inverted(emitter, mask)
        total = fill_where(emitter, kept, total, term.value, _mask_dtype(emitter))
        if math.isfinite(term.value):
            filled = _either(emitter, filled, hidden)
    dtype = example(total).dtype
    row_max = emitter.method("amax", emitter.method("detach", total), dim=-1, keepdim=True)
    size = emitter.method("abs", row_max)
    finite = emitter.function(operator.le, size, torch.finfo(dtype).max)
    is_max = emitter.function(operator.eq, total, row_max)
    if limits_differ:
        lost = emitter.function(operator.and_, is_max, _either(emitter, lost, filled))
        empty = emitter.method("any", lost, dim=-1, keepdim=True)
    else:
        empty = _absorbing(emitter, row_max, masks.float_terms[0])
    empty = emitter.function(operator.and_, empty, finite)
    averaged = emitter.function(operator.and_, is_max, empty)
    large = emitter.function(operator.gt, size, MAX_ROW_MASK)
    large = emitter.function(operator.and_, large, finite)
    shift = fill_where(emitter, inverted(emitter, large), None, row_max, dtype)
    mask = _supported_mask(emitter, emitter.function(operator.sub, total, shift))
    mask = emitter.method("masked_fill", mask, empty, -math.inf)
    mask = _with_averages(emitter, masks, mask, averaged, total)
    q = q if averaging else emitter.method("masked_fill", q, empty, 0.0)
    return MaskNodes(mask, q, empty, averaged, filled, total, row_max, shift)


def _with_averages(
    emitter: Emitter, masks: ClassifiedMasks, mask: fx.Node, averaged: fx.Node, total: fx.Node
) -> fx.Node:
    """The mask with 0 at the keys that empty rows average, and there with the gradient of the sum
    of masks that it stands for.
    """
    if not biases_require_grad(masks):
        return emitter.method("masked_fill", mask, averaged, 0.0)
    zero = cast(emitter, only_backward(emitter, total), example(mask).dtype)
    return emitter.function(torch.where, averaged, zero, mask)


def biases_require_grad(masks: ClassifiedMasks) -> bool:
    """Whether a part of the sum of masks requires grad."""
    return any(requires_grad(t.leaf.value) for t in masks.float_terms if isinstance(t, BiasTerm))


def _absorbing(emitter: Emitter, number: fx.Node, term: BiasTerm | FillTerm) -> fx.Node:
    """Where the scores to which a term was added are lost beside this sum of masks."""
    limit = absorbing_number(term.dtype, term.rescaled)
    return emitter.function(operator.ge, emitter.method("abs", number), limit)


def _either(emitter: Emitter, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
    return emitter.reduce(operator.or_, [x for x in (a, b) if x is not None])


def _mask_dtype(emitter: Emitter) -> torch.dtype:
    return torch.float64 if emitter.site.dtype == torch.float64 else torch.float32


def _supported_mask(emitter: Emitter, mask: fx.Node) -> fx.Node:
    """The mask in a dtype that the operator supports."""
    supported = example(mask).dtype in (emitter.site.dtype, torch.float32)
    return mask if supported else emitter.method("to", mask, torch.float32)


def _added_fill(emitter: Emitter, fill: FillTerm) -> fx.Node:
    """A fill as a bias."""
    mask = bool_mask(emitter, fill.mask, emitter.site.mask_dims)
    kept = inverted(emitter, mask) if fill.where else mask
    return fill_where(emitter, kept, None, fill.value, _mask_dtype(emitter))


def zeroed_keys(emitter: Emitter, fill: FillTerm, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(key, attn_mask) where a small fill replaces the scores of some keys: these are zeroed, and
    the fill is added.
    """
    mask = bool_mask(emitter, fill.mask, (*emitter.site.key_dims, ()))
    if not fill.where:
        mask = inverted(emitter, mask)
    k = emitter.method("masked_fill", k, mask, 0.0)
    full = bool_mask(emitter, fill.mask, emitter.site.mask_dims)
    added = emitter.method("to", full, torch.float32)
    if not fill.where:
        added = emitter.function(operator.sub, 1.0, added)
    return k, emitter.function(operator.mul, added, fill.value)


def _keep(emitter: Emitter, keep: KeepMask) -> fx.Node:
    if isinstance(keep.kept_value, bool):
        mask = bool_mask(emitter, keep.leaf, emitter.site.mask_dims)
        return mask if keep.kept_value else inverted(emitter, mask)
    mask = emitter.arrange(keep.leaf.value.node, keep.leaf.dims, emitter.site.mask_dims)
    return emitter.function(operator.eq, mask, keep.kept_value)


def needs_separate_sink(site: AttentionSite, masks: ClassifiedMasks) -> bool:
    """Whether the operator cannot apply the sink: it differs by query, or rows are shifted."""
    sink = site.scores.sink
    per_query = sink is not None and not sink.axes() <= set(site.heads)
    return site.has_sink and (bool(masks.float_terms) or per_query)


def emit_sink(emitter: Emitter, q: fx.Node, separate: bool) -> fx.Node | float:
    """The sink: one logit for each query head, or broadcastable to (B, Hq, Sq) if `separate`."""
    sink = emitter.site.scores.sink or Leaf(0.0)
    if separate:
        return aligned(emitter, sink, emitter.site.row_dims)
    if isinstance(sink.value, float):
        heads = emitter.method("size", q, 1)
        return emitter.method("new_full", q, (heads,), sink.value, dtype=torch.float32)
    sinks = emitter.arrange(sink.value.node, sink.dims, (emitter.site.heads,), full=True)
    allowed = (emitter.site.dtype, torch.float32)
    return sinks if example(sinks).dtype in allowed else cast(emitter, sinks, torch.float32)


# The log-sum-exp, where the model reads it beside the attention or a sink differs between queries:
# both use the operator's own.


def check_lse(site: AttentionSite, masks: ClassifiedMasks) -> None:
    """Raises Refusal where the operator's log-sum-exp is not the model's."""
    terms = site.scores.terms
    shifted = any(isinstance(t, BiasTerm) and isinstance(t.leaf.value, float) for t in terms)
    shifted |= any(isinstance(t, ClampTerm) for t in terms)
    shifted |= bool(masks.added_fill or masks.zeroed_keys)
    if shifted or site.has_sink or masks.empty_rows is EmptyRows.ADDED:
        raise Refusal("the scores are also read by logsumexp, which is not the operator's")


def eager_lse(
    emitter: Emitter, masks: ClassifiedMasks, emitted: MaskNodes, lse: fx.Node
) -> fx.Node:
    """The log-sum-exp of eager mode. That of an empty row is its fill, which absorbs the logarithm
    of the number of keys; to other rows what their masks were reduced by is added.
    """
    if masks.empty_rows is EmptyRows.ZERO:
        return lse
    if emitter.site.lses and emitted.filled is not None:
        raise Refusal("the scores are also read by logsumexp, and several masks fill them")
    empty = emitter.method("squeeze", emitted.empty_rows, -1)
    if emitted.row_max is None:
        return emitter.method("masked_fill", lse, empty, masks.fill)
    row_max, shift = (emitter.method("squeeze", x, -1) for x in (emitted.row_max, emitted.shift))
    lse = emitter.function(operator.add, lse, cast(emitter, shift, example(lse).dtype))
    return emitter.function(torch.where, empty, cast(emitter, row_max, example(lse).dtype), lse)


def replaced_lses(emitter: Emitter, lse: fx.Node) -> dict[fx.Node, fx.Node]:
    """The replacement of each log-sum-exp that the model computes."""
    found = {}
    for row in emitter.site.lses:
        value = row.path[-1]
        node = cast(emitter, lse, value.dtype)
        found[value.node] = emitter.arrange(node, emitter.site.row_dims, row.dims)
    return found


def scale_by_sink(emitter: Emitter, result: fx.Node, lse: fx.Node, sink: fx.Node) -> fx.Node:
    """The result with the sink in its denominator: sigmoid(lse - sink) times the result."""
    share = emitter.method("sigmoid", emitter.function(operator.sub, lse, sink))
    share = emitter.method("unsqueeze", share, -1)
    return cast(emitter, emitter.function(operator.mul, result, share), emitter.site.dtype)


def lse_readers(emitter: Emitter, view: GraphView, erased: set[fx.Node]) -> list[fx.Node]:
    """The nodes that depend on a log-sum-exp and have to move behind the value product."""
    out = emitter.site.core.out
    late = {row.path[-1].node for row in emitter.site.lses}
    if not late:
        return []
    first = min((view.values[node] for node in late), key=lambda value: value.index)
    found: list[fx.Node] = []
    for node, value in view.values.items():
        between = first.index < value.index < out.index and node not in erased
        if not between or late.isdisjoint(node.all_input_nodes):
            continue
        if value.writes or is_random(value) or node.op not in ("call_function", "call_method"):
            raise Refusal(f"{raw_name(node)} reads their log-sum-exp before the value product")
        found.append(node)
        late.add(node)
    if late & emitter.inputs():
        raise Refusal("an input of the attention depends on their log-sum-exp")
    if found and view.writes_between(first, out):
        raise Refusal("a tensor is written to between their log-sum-exp and the value product")
    return found
