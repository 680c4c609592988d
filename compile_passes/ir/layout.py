"""Layout operations: which dimension of the input becomes which dimension of the result."""

from __future__ import annotations

import torch
from torch import SymInt

from compile_passes.ir.axes import Axis, Dims, is_one, regroup, resolve_dims, sizes_equal
from compile_passes.ir.graph import Value, is_tensor, requires_grad
from compile_passes.ir.vocabulary import raw_name

EXPANDED = "expanded"  # the name of axes along which an element is repeated


def source(value: Value) -> Value | None:
    """The tensor that a layout operation rearranges."""
    x = value.args.get("input")
    return x if isinstance(x, Value) else None


def result_dims(value: Value, dims: Dims) -> Dims | None:
    """Dims of a layout operation's result, from the dims of its input."""
    shape = value.shape
    if value.writes:
        return None
    if value.op in ("copy", "cast"):
        return dims if _same_device(value) else None
    if value.op == "permute":
        order = permutation(value)
        return tuple(dims[i] for i in order) if order else None
    if value.op == "reshape" or (value.op == "getitem" and only_inserts_dims(value)):
        return regroup(dims, shape)
    if value.op == "expand":
        new = len(shape) - len(dims)
        old = source(value).shape
        kept = zip(dims, old, shape[new:], strict=True)
        grown = tuple(g if sizes_equal(n, m) else (Axis(m, EXPANDED),) for g, n, m in kept)
        return tuple(() if is_one(m) else (Axis(m, EXPANDED),) for m in shape[:new]) + grown
    return None


def _same_device(value: Value) -> bool:
    """Whether the value is on the device of its source."""
    return value.tensor.device == source(value).tensor.device


def input_dims(value: Value, dims: Dims) -> tuple[Dims, bool] | None:
    """(dims of a layout operation's input, whether it repeats elements), from its result's dims."""
    x = source(value)
    if not is_tensor(x) or value.writes:
        return None
    shape = x.shape
    if value.op == "copy" or (
        value.op == "cast" and x.dtype == value.dtype and _same_device(value)
    ):
        return dims, False
    if value.op == "permute":
        order = permutation(value)
        return (tuple(dims[order.index(i)] for i in range(len(order))), False) if order else None
    if value.op == "reshape" or (value.op == "getitem" and only_inserts_dims(value)):
        before = regroup(dims, shape)
        return None if before is None else (before, False)
    if value.op == "expand":
        kept = dims[len(dims) - len(shape) :]
        before = tuple(() if is_one(n) else g for n, g in zip(shape, kept, strict=True))
        return before, any(dims[: len(dims) - len(shape)]) or before != kept
    if value.op == "repeat_interleave":
        return _undo_interleave(value, dims)
    return None


def _undo_interleave(value: Value, dims: Dims) -> tuple[Dims, bool] | None:
    """`input_dims` of repeat_interleave: the repetition is the inner part of the axis."""
    times, dim = value.args.get("repeats"), value.args.get("dim")
    times = times.tensor if isinstance(times, Value) else times
    if not isinstance(times, (int, SymInt)) or not isinstance(dim, int) or not dims[dim]:
        return None
    shape = source(value).shape
    dim %= len(dims)
    inner = regroup((dims[dim],), (shape[dim], times))
    if inner is None:
        return None
    return (*dims[:dim], inner[0], *dims[dim + 1 :]), True


def permutation(value: Value) -> tuple[int, ...] | None:
    """The input dimension of each result dimension of a transpose-like operation."""
    rank = len(value.shape)
    name = raw_name(value.node).rstrip("_")
    order = list(range(rank))
    if name in ("mT", "adjoint", "mH", "T", "t", "H"):
        if rank < 2 or (rank > 2 and name in ("T", "t", "H")):
            return None
        order[-2:] = order[-1], order[-2]
        return None if value.tensor.is_complex() else tuple(order)
    dims = value.args.get("dims", ())
    dims = value.node.kwargs.get("dims", dims) if name == "permute" else dims
    if name == "permute":
        ints = all(isinstance(i, int) for i in dims)
        return tuple(i % rank for i in dims) if ints and len(dims) == rank else None
    first, second = _swapped_dims(value, dims)
    if not (isinstance(first, int) and isinstance(second, int)):
        return None
    first, second = first % rank, second % rank
    if name in ("movedim", "moveaxis"):
        order.insert(second, order.pop(first))
    else:
        order[first], order[second] = order[second], order[first]
    return tuple(order)


def _swapped_dims(value: Value, dims: tuple) -> tuple[object, object]:
    kwargs = value.node.kwargs
    names = [("dim0", "dim1"), ("axis0", "axis1"), ("source", "destination")]
    named = [kwargs[n] for pair in names for n in pair if n in kwargs]
    pair = (*dims, *named)
    return pair if len(pair) == 2 else (None, None)


def only_inserts_dims(value: Value) -> bool:
    """Whether an index consists of None, Ellipsis and full slices, which only insert dimensions."""
    index = value.args.get("index")
    index = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or i == slice(None) for i in index)


def undo_layout(value: Value, dims: Dims, dtype: torch.dtype, reader: Value) -> tuple[Value, Dims]:
    """Walk from an operand of `reader` back to the tensor before its heads were repeated or it was
    cast up from `dtype`.

    Permutations are undone too, views and copies only if one of these precedes them. Operations
    under another gradient mode are kept, since no gradient flows through them.
    """
    best = value, resolve_dims(dims)
    while True:
        dims = resolve_dims(dims)
        cast_up = value.op == "cast" and value.dtype != dtype and source(value).dtype == dtype
        step = (dims, True) if cast_up and _same_device(value) else input_dims(value, dims)
        if step is None or (value.grad != reader.grad and requires_grad(source(value))):
            return best
        before, gained = step
        free = value.op == "permute" or _nontrivial(before) == _nontrivial(dims)
        gained = gained or (free and value is best[0] and value.op != "copy")
        gained = gained or _count_merged(before) < _count_merged(dims)
        value, dims = source(value), before
        if gained:
            best = value, dims


def _count_merged(dims: Dims) -> int:
    return sum(len(group) > 1 for group in resolve_dims(dims))


def _nontrivial(dims: Dims) -> list:
    """The dimensions that are not of size 1."""
    return [group for group in resolve_dims(dims) if group]
