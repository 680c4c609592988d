"""A graph as values: what each node computes, from which contents of its inputs, under which
gradient mode.
"""

from __future__ import annotations

import dataclasses
import inspect

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from compile_passes.graph import vocabulary

PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack")  # metadata: where a node comes from


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One node's result at the moment it ran. `args` holds values in place of nodes."""

    node: fx.Node
    index: int
    op: str
    args: dict
    writes: bool
    grad: bool | None  # gradient mode set inside the graph; None: as the caller had it
    storage: int

    @property
    def tensor(self) -> Tensor | None:
        return example(self.node)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def __repr__(self) -> str:
        return f"{self.node.name}: {self.op}"


def example(node: fx.Node) -> object:
    """The fake tensor (or number) that tracing left on the node."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def requires_grad(x: object) -> bool:
    """Whether it is a tensor with a gradient."""
    return isinstance(x, Value) and isinstance(x.tensor, Tensor) and x.tensor.requires_grad


_DRAWN = ("rand", "bernoulli", "dropout", "multinomial", "normal", "exponential", "empty")


def alike(a: object, b: object, depth: int = 8) -> bool:
    """Whether two arguments have the same contents: one value, or one operation on such values."""
    if not (isinstance(a, Value) and isinstance(b, Value)):
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
            return all(alike(x, y, depth) for x, y in zip(a, b, strict=True))
        return not isinstance(a, (Value, Tensor)) and type(a) is type(b) and a == b
    if a is b:
        return True
    if depth == 0 or not a.op or a.writes or b.writes or is_drawn(a):
        return False
    same = a.op == b.op and a.node.target == b.node.target and a.args.keys() == b.args.keys()
    return same and all(alike(x, b.args[name], depth - 1) for name, x in a.args.items())


def is_drawn(value: Value) -> bool:
    """Whether its contents come from a random generator, or from nowhere."""
    return value.op.startswith(_DRAWN)


def meta_key(graph: fx.Graph) -> str:
    """Where nodes keep their example: Dynamo's graphs in example_value, exported ones in val."""
    return "example_value" if any("example_value" in n.meta for n in graph.nodes) else "val"


class View:
    """The values of a graph in order, and every write to a tensor's memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Value] = {}
        self._latest: dict[fx.Node, Value] = {}  # by the first node that named the tensor object
        self._object: dict[fx.Node, fx.Node] = {}
        self._writes: dict[int, list[int]] = {}
        self._members: dict[int, list[fx.Node]] = {}
        self._parents: dict[int, int] = {}
        self._grad: bool | None = None
        self._outside: list[bool | None] = []  # the modes around regions of inference mode
        for index, node in enumerate(graph.nodes):
            self._add(node, index)

    def intact(self, value: Value, until: Value) -> bool:
        """Whether reading the value's node just before `until` still gives its contents."""
        writes = self._writes.get(self._root(value.storage), ())
        return not any(value.index < at < until.index for at in writes)

    def writes_between(self, first: Value, last: Value) -> bool:
        """Whether any tensor is written to after the one and before the other."""
        return any(first.index < at < last.index for ats in self._writes.values() for at in ats)

    def _add(self, node: fx.Node, index: int) -> None:
        name, parameters, writes = vocabulary.call(node)
        op = "" if _is_more(node, name) else name
        args = self._resolve(vocabulary.bind(node, parameters)) if op else {}
        value = Value(node, index, op, args, writes, self._grad, self._storage(node, index))
        returned = writes and node.args and isinstance(example(node), Tensor)
        first = node.args[0] if returned else None  # `x[i] = y` returns nothing
        self._object[node] = self._object[first] if isinstance(first, fx.Node) else node
        self.values[node] = value
        self._alias(value, name)
        if node.op == "call_function":
            self._track_modes(node)
        for target in _written(node, writes):
            self._forget(self.values[target], value)
        self._latest[self._object[node]] = value
        self._members.setdefault(self._root(value.storage), []).append(self._object[node])

    def _resolve(self, args: dict) -> dict:
        return {k: map_arg(v, lambda n: self._latest[self._object[n]]) for k, v in args.items()}

    def _storage(self, node: fx.Node, index: int) -> int:
        tensor = example(node)
        if not isinstance(tensor, Tensor):
            return -1 - index
        try:
            return tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse and the like have none
            return -1 - index

    def _alias(self, value: Value, name: str) -> None:
        """Record that a view shares its input's memory where fake tensors do not show it."""
        node = value.node
        told = value.storage >= 0 and "example_value" in node.meta
        view = name in vocabulary.MAYBE_VIEWS or getattr(node.target, "is_view", False)
        if not told and view and node.all_input_nodes:
            self._join(self.values[node.all_input_nodes[0]].storage, value.storage)

    def _root(self, storage: int) -> int:
        while storage in self._parents:
            storage = self._parents[storage]
        return storage

    def _join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parents[b] = a
            self._members.setdefault(a, []).extend(self._members.pop(b, ()))
            self._writes.setdefault(a, []).extend(self._writes.pop(b, ()))

    def _forget(self, target: Value, writer: Value) -> None:
        """`writer` wrote over the target's memory: whatever reads an alias later sees something
        unknown.
        """
        root = self._root(target.storage)
        self._writes.setdefault(root, []).append(writer.index)
        for node in self._members.get(root, ()):
            known = self._latest[node]
            self._latest[node] = dataclasses.replace(known, index=writer.index, op="", args={})

    def _track_modes(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            self._grad = bool(node.args[0])
        elif name == "_enter_inference_mode":
            self._outside.append(self._grad)
            self._grad = not node.args[0]
        elif name == "_exit_inference_mode":
            self._grad = self._outside.pop() if self._outside else None


def _is_more(node: fx.Node, name: str) -> bool:
    """Whether a node does more than its name implies: it writes its result to another
    tensor, or reads its input's bits as numbers of another dtype.
    """
    if node.kwargs.get("out") is not None:
        return True
    if name != "reshape" or not node.all_input_nodes:
        return False
    before, after = example(node.all_input_nodes[0]), example(node)
    return isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype != after.dtype


def _written(node: fx.Node, writes: bool) -> list[fx.Node]:
    """The nodes whose memory this one may write."""
    target = node.target
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return [n for n in node.all_input_nodes if isinstance(example(n), Tensor)]
    given = [node.kwargs.get("out")]
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        for i, argument in enumerate(target._schema.arguments):
            if argument.is_write:
                given.append(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name))
    elif writes:
        given += node.args[:1] or node.kwargs.values()
    elif getattr(target, "__module__", None) == "torch.nn.functional":
        given += _functional(node)
    written: list[fx.Node] = []
    map_arg(given, written.append)
    return written


def _functional(node: fx.Node) -> list[object]:
    """The arguments that a function of torch.nn.functional writes to."""
    known = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    written = [known.get("running_mean"), known.get("running_var")]
    if known.get("inplace"):
        written.append(known.get("input"))
    if known.get("max_norm") is not None:
        written.append(known.get("weight"))
    return written
