"""Insertion of nodes into a graph, and the strides of results, which are kept wherever a later
operation or the caller could see them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from compile_passes.ir import vocabulary
from compile_passes.ir.axes import Size, is_one, sizes_equal
from compile_passes.ir.graph import SOURCE_METADATA, example, meta_key, run


class NodeInserter:
    """Inserts nodes before `anchor`, with their example and the source that later passes read."""

    def __init__(self, graph: fx.Graph, anchor: fx.Node) -> None:
        self.graph, self.anchor = graph, anchor
        self.nodes: list[fx.Node] = []
        self._key = meta_key(graph)

    def method(self, name: str, *args, **kwargs) -> fx.Node:
        """Insert a call of a method."""
        return self._make("call_method", name, args, kwargs)

    def function(self, target: Callable, *args, **kwargs) -> fx.Node:
        """Insert a call of a function."""
        return self._make("call_function", target, args, kwargs)

    def undo(self) -> None:
        """Erase all inserted nodes."""
        for node in reversed(self.nodes):
            self.graph.erase_node(node)
        self.nodes.clear()

    def _make(self, kind: str, target, args: tuple, kwargs: dict) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.create_node(kind, target, args, kwargs)
        self.nodes.append(node)
        for key in SOURCE_METADATA:
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        node.meta[self._key] = self._evaluate(kind, target, args, kwargs)
        return node

    def _evaluate(self, kind: str, target, args: tuple, kwargs: dict) -> object:
        args, kwargs = map_arg((args, kwargs), example)
        mode = self._fake_mode() or contextlib.nullcontext()
        # torch 2.11 keeps sizes symbolic in composite operators only with Python's dispatcher
        with mode, enable_python_dispatcher(), torch.no_grad():
            return run(kind, target, args, kwargs)

    def _fake_mode(self) -> FakeTensorMode | None:
        """The mode of the anchor's example, or of an input's if the anchor has several results."""
        examples = map(example, (self.anchor, *self.anchor.all_input_nodes))
        modes = (getattr(x, "fake_mode", None) for x in examples)
        return next((mode for mode in modes if mode is not None), None)


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
