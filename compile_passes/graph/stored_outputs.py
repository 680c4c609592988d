"""Outputs of a graph that a model only stores in attributes of its modules, as in
`self.attention_map = weights`.

Which outputs these are is known to Dynamo while it compiles the graph, and not in the graph itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import VariableTracker

from compile_passes.report import log


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
