"""Edits of a graph: inserted nodes, unused nodes, and outputs that a model only stores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from compile_passes.ir import vocabulary
from compile_passes.ir.graph import SOURCE_METADATA, example, meta_key, run, written_nodes
from compile_passes.report import log

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


# Outputs of a graph that a model only stores in attributes of its modules, as in
# `self.attention_map = weights`.
#
# Which outputs these are is known to Dynamo while it compiles the graph, and not in the graph
# itself.


class StoredOutputs:
    """The outputs of a graph that are stored in attributes of modules and used nowhere else.

    They are removed from the graph's results; `restore` puts back those that are still computed.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._output = graph.output_node()
        stored = _stored(graph)
        results = self._output.args[0]
        results = results if stored and isinstance(results, (tuple, list)) else ()
        self._names = {
            (i, x): stored[x.name]
            for i, x in enumerate(results)
            if isinstance(x, fx.Node) and x.name in stored
        }
        self._replace({i: None for i, _ in self._names})

    def take_erased(self) -> tuple[str, ...]:
        """The attributes whose values have been erased since the last call."""
        left = set(self._output.graph.nodes)
        erased = [key for key in self._names if key[1] not in left]
        return tuple(self._names.pop(key) for key in erased)

    def restore(self) -> None:
        """Return the values that are still computed."""
        self._replace(dict(self._names.keys()))

    def _replace(self, results: dict[int, fx.Node | None]) -> None:
        if results:
            given = self._output.args[0]
            self._output.args = (tuple(results.get(i, x) for i, x in enumerate(given)),)


def _stored(graph: fx.Graph) -> dict[str, str]:
    """The attribute that stores each such output, by the names of nodes."""
    try:
        tx = InstructionTranslator.current_tx()
        if _signature(tx.output.graph) != _signature(graph):
            return {}  # the body of a higher-order operator
        return _stored_in(tx)
    except Exception:  # Dynamo's internals differ between versions of torch
        log.warning("which outputs a model stores is not known, none is dropped")
        return {}


def _signature(graph: fx.Graph) -> list[str]:
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    return names + [node.name for node in graph.output_node().all_input_nodes]


def _stored_in(tx: InstructionTranslator) -> dict[str, str]:
    effects = tx.output.side_effects
    found: dict[str, str] = {}
    kept: list[object] = []
    for owner, attributes in effects.store_attr_mutations.items():
        module = getattr(owner, "value", None)
        for name, value in attributes.items():
            is_attribute = isinstance(module, torch.nn.Module) and not _is_state(module, name)
            if is_attribute and isinstance(value, TensorVariable):
                found[value.as_proxy().node.name] = f"{type(module).__name__}.{name}"
            else:
                kept.append(value)
    kept += [x for x in effects.id_to_variable.values() if not isinstance(x, TensorVariable)]
    while tx is not None:
        kept += [*tx.stack, *tx.symbolic_locals.values()]
        tx = getattr(tx, "parent", None)
    for name in _tensor_names(kept):
        found.pop(name, None)
    return found


def _is_state(module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is a part of the module's state."""
    return name in module._buffers or name in module._parameters


def _tensor_names(values: list[object]) -> Iterator[str]:
    """The names of the nodes of all tensors in some variables of Dynamo."""
    found: list[TensorVariable] = []

    def visit(x: VariableTracker) -> None:
        if isinstance(x, TensorVariable):
            found.append(x)

    VariableTracker.visit(visit, values)
    return (x.as_proxy().node.name for x in found)
