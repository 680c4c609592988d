"""Edits of a graph: inserted and unused nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from compile_passes.ir import vocabulary
from compile_passes.ir.graph import SOURCE_METADATA, example, meta_key, run, written_nodes

# Insertion of nodes into a graph, each with the example and the source that later passes read.


class NodeInserter:
    """Inserts nodes before `anchor`."""

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
        """That of the anchor, or of an input if it has several results."""
        examples = map(example, (self.anchor, *self.anchor.all_input_nodes))
        modes = (getattr(x, "fake_mode", None) for x in examples)
        return next((mode for mode in modes if mode is not None), None)


# Removal of unused nodes, such as copies of the scores or averages of the weights that the caller
# ignores.

# Operations that do nothing but compute their result. Others may draw random numbers, check
# something or write to a tensor.
_WITHOUT_EFFECT = vocabulary.LAYOUT | set(
    """
    abs add all amax amin and any arange argmax argmin baddbmm broadcast_tensors cat chunk clamp
    clamp_min cos cumsum detach diff div einsum eq exp exp2 expm1 flip floordiv full full_like
    gather ge gt index_select le log log_softmax logsumexp lt masked_fill matmul max maximum
    mean min minimum mul narrow ne neg new_empty new_full new_ones new_zeros norm not numel ones
    ones_like or outer pad permute pow prod relu repeat repeat_interleave reshape rsqrt
    scalar_tensor searchsorted select sigmoid sin size softmax split sqrt stack std sub sum
    tanh tensor topk tril triu unbind var where zeros zeros_like
    """.split()
)


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Erase unused nodes that have no effect, the last first."""
    for node in reversed(list(graph.nodes)):
        if not node.users and has_no_effect(node):
            graph.erase_node(node)


def has_no_effect(node: fx.Node) -> bool:
    """Whether a node does nothing but compute its result, the same from the same arguments."""
    name, _, writes = vocabulary.operation(node)
    if node.op not in ("call_function", "call_method") or writes or written_nodes(node, writes):
        return False
    known = name in _WITHOUT_EFFECT or vocabulary.raw_name(node) in ("size", "dim", "shape")
    result = example(node)
    return known and isinstance(result, (Tensor, int, float, tuple, list, torch.SymInt))
