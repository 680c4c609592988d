"""Strides of a result, kept wherever a later operation or the caller could see them."""

from __future__ import annotations

from torch import SymInt, Tensor, fx
from torch.fx.node import map_arg

from compile_passes.ir import vocabulary
from compile_passes.ir.axes import Size, is_one, sizes_equal
from compile_passes.ir.edits import NodeInserter
from compile_passes.ir.graph import example


def restride(inserter: NodeInserter, node: fx.Node, original: fx.Node) -> fx.Node:
    """The node in the memory layout of the original, copied if that is necessary."""
    tensor, wanted = example(node), example(original)
    if _same_strides(tensor, wanted) or _strides_unseen(original, tensor):
        return node
    if _is_contiguous(wanted):
        return inserter.method("contiguous", node)
    order, inverse = memory_order(wanted)
    node = inserter.method("permute", node, *order)
    node = inserter.method("contiguous", node)
    return inserter.method("permute", node, *inverse)


def memory_order(tensor: Tensor) -> tuple[list[int], list[int]]:
    """(dimensions by descending stride, the inverse permutation)"""
    order = sorted(range(tensor.dim()), key=lambda i: -hint(tensor.stride(i)))
    return order, [order.index(i) for i in range(len(order))]


def hint(n: Size) -> int:
    """The current value of a size or stride."""
    return n.node.hint if isinstance(n, SymInt) else int(n)


def _is_contiguous(t: Tensor) -> bool:
    """The same as `Tensor.is_contiguous`, which would add guards."""
    step: Size = 1
    for n, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if not sizes_equal(stride, step) and not is_one(n):
            return False
        step = step * n
    return True


def _strides_unseen(node: fx.Node, replacement: Tensor) -> bool:
    """Whether the result is only read by a chain of permutations and views that gives the same for
    other strides, or ends in an operation that does.
    """
    while len(node.users) == 1:
        (user,) = node.users
        name, _, writes = vocabulary.operation(user)
        raw = vocabulary.raw_name(user)
        if writes or user.op not in ("call_method", "call_function"):
            return False
        if raw in ("contiguous", "linear", "matmul", "bmm"):
            return True
        if name not in ("permute", "reshape") or user.args[:1] != (node,):
            return False
        try:
            args, kwargs = map_arg((user.args[1:], user.kwargs), example)
            replacement = getattr(replacement, raw)(*args, **kwargs)
        except (RuntimeError, ValueError, AttributeError, TypeError):  # a view that needs strides
            return False
        if name == "reshape":
            return _same_strides(replacement, example(user))
        node = user
    return False


def _same_strides(a: Tensor, b: Tensor) -> bool:
    return all(sizes_equal(m, n) for m, n in zip(a.stride(), b.stride(), strict=True))
