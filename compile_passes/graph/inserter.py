"""Insertion of nodes into a graph, each with the example and the source that later passes read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from compile_passes.graph.ir import SOURCE_METADATA, example, meta_key, run


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
