"""A graph as values: what each node computes, from which contents of its inputs, and under which
gradient mode; and the insertion of nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable

import torch
from torch import SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from compile_passes.ir import vocabulary
from compile_passes.ir.axes import Axis, Dims, Size, is_one, regroup, resolve_dims, sizes_equal

SOURCE_METADATA = ("stack_trace", "nn_module_stack", "source_fn_stack")
EXAMPLES = ("example_value", "val")  # in Dynamo's graphs, in exported ones


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """The result of one node when it ran. `args` holds values in place of nodes."""

    node: fx.Node
    index: int
    op: str
    args: dict
    writes: bool
    grad: bool | None  # gradient mode that the graph has set; None: the caller's
    storage: int

    @property
    def tensor(self) -> Tensor | None:
        """The example on the node: a fake tensor, or a number if the value is no tensor."""
        return example(self.node)

    @property
    def shape(self) -> torch.Size:
        """The example's shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The example's dtype."""
        return self.tensor.dtype

    def __repr__(self) -> str:
        return f"{self.node.name}: {self.op}"


def run(op: str, target: Callable | str, args: tuple, kwargs: dict) -> object:
    """The result of a call_function or call_method node on other arguments."""
    if op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def example(node: fx.Node) -> object:
    """The fake tensor (or number) that tracing left on the node."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def is_tensor(x: object) -> bool:
    """Whether x is the value of a tensor."""
    return isinstance(x, Value) and isinstance(x.tensor, Tensor)


def requires_grad(x: object) -> bool:
    """Whether x is the value of a tensor that requires grad."""
    return is_tensor(x) and x.tensor.requires_grad


_RANDOM_OPS = ("rand", "bernoulli", "dropout", "multinomial", "normal", "exponential", "empty")


def same_contents(a: object, b: object, depth: int = 8) -> bool:
    """Whether two arguments are the same value or number, or the same operation on such."""
    if not (isinstance(a, Value) and isinstance(b, Value)):
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
            return all(same_contents(x, y, depth) for x, y in zip(a, b, strict=True))
        return not isinstance(a, (Value, Tensor)) and type(a) is type(b) and a == b
    if a is b:
        return True
    if depth == 0 or not a.op or a.writes or b.writes or is_random(a):
        return False
    same_op = a.op == b.op and a.node.target == b.node.target and a.args.keys() == b.args.keys()
    return same_op and all(same_contents(x, b.args[name], depth - 1) for name, x in a.args.items())


def is_random(value: Value) -> bool:
    """Whether the contents come from a random generator or are uninitialised."""
    return value.op.startswith(_RANDOM_OPS)


def meta_key(graph: fx.Graph) -> str:
    """The metadata key of examples: example_value in Dynamo's graphs, val in exported ones."""
    return "example_value" if any("example_value" in n.meta for n in graph.nodes) else "val"


class GraphView:
    """The values of a graph in order, and the writes to their memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Value] = {}
        self._first_name: dict[fx.Node, fx.Node] = {}  # the first node of the same tensor object
        self._latest: dict[fx.Node, Value] = {}  # by first name
        self._writes: dict[int, list[int]] = {}  # indices of writing nodes by storage
        self._members: dict[int, list[fx.Node]] = {}  # first names by storage
        self._parents: dict[int, int] = {}  # storages joined by aliasing, a union-find
        self._grad: bool | None = None
        self._outer_modes: list[bool | None] = []  # gradient modes around inference mode
        for index, node in enumerate(graph.nodes):
            self._add(node, index)

    def is_unmodified(self, value: Value, until: Value) -> bool:
        """Whether nothing has written to the value's memory between it and `until`."""
        writes = self._writes.get(self._root(value.storage), ())
        return not any(value.index < at < until.index for at in writes)

    def writes_between(self, first: Value, last: Value) -> bool:
        """Whether any tensor is written to between the two values."""
        return any(first.index < at < last.index for ats in self._writes.values() for at in ats)

    def at(self, index: int) -> fx.Node:
        """The node with this index."""
        return next(node for node, value in self.values.items() if value.index == index)

    def _add(self, node: fx.Node, index: int) -> None:
        name, parameters, writes = vocabulary.operation(node)
        op = "" if _has_other_effect(node, name) else name
        args = self._resolve(vocabulary.bind(node, parameters)) if op else {}
        value = Value(node, index, op, args, writes, self._grad, self._storage(node, index))
        returned = writes and node.args and isinstance(example(node), Tensor)
        first = node.args[0] if returned else None  # `x[i] = y` returns nothing
        self._first_name[node] = self._first_name[first] if isinstance(first, fx.Node) else node
        self.values[node] = value
        self._alias(value, name)
        if node.op == "call_function":
            self._track_modes(node)
        for target in written_nodes(node, writes):
            self._invalidate(self.values[target], value)
        self._latest[self._first_name[node]] = value
        self._members.setdefault(self._root(value.storage), []).append(self._first_name[node])

    def _resolve(self, args: dict) -> dict:
        return {k: map_arg(v, lambda n: self._latest[self._first_name[n]]) for k, v in args.items()}

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
        shown = value.storage >= 0 and "example_value" in node.meta
        view = name in vocabulary.MAYBE_VIEWS or getattr(node.target, "is_view", False)
        if not shown and view and node.all_input_nodes:
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

    def _invalidate(self, target: Value, writer: Value) -> None:
        """Make the contents of all aliases of `target` unknown to nodes after `writer`."""
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
            self._outer_modes.append(self._grad)
            self._grad = not node.args[0]
        elif name == "_exit_inference_mode":
            self._grad = self._outer_modes.pop() if self._outer_modes else None


def _has_other_effect(node: fx.Node, name: str) -> bool:
    """Whether a node does more than its name implies: it writes its result to another tensor, or
    reinterprets the bits of its input in another dtype.
    """
    if node.kwargs.get("out") is not None:
        return True
    if name != "reshape" or not node.all_input_nodes:
        return False
    before, after = example(node.all_input_nodes[0]), example(node)
    return isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype != after.dtype


_READING = ("flex_attention", "fa_ops_flex_attention")  # operators with functions that only read


def written_nodes(node: fx.Node, writes: bool) -> list[fx.Node]:
    """The nodes whose memory this node may write to."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _READING:
        return []
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
        given += _functional_writes(node)
    written: list[fx.Node] = []
    map_arg(given, written.append)
    return written


def _functional_writes(node: fx.Node) -> list[object]:
    """The arguments that a torch.nn.functional function writes to."""
    known = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    written = [known.get("running_mean"), known.get("running_var")]
    if known.get("inplace"):
        written.append(known.get("input"))
    if known.get("max_norm") is not None:
        written.append(known.get("weight"))
    return written


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


def has_no_effect(node: fx.Node) -> bool:
    """Whether a node does nothing but compute its result, the same from the same arguments."""
    name, _, writes = vocabulary.operation(node)
    if node.op not in ("call_function", "call_method") or writes or written_nodes(node, writes):
        return False
    known = name in _WITHOUT_EFFECT or vocabulary.raw_name(node) in ("size", "dim", "shape")
    result = example(node)
    return known and isinstance(result, (Tensor, int, float, tuple, list, torch.SymInt))


# Insertion of nodes, and the strides of results, which are kept wherever a later operation or the
# caller could see them.


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
        mode = self.fake_mode() or contextlib.nullcontext()
        # torch 2.11 keeps sizes symbolic in composite operators only with Python's dispatcher
        with mode, enable_python_dispatcher(), torch.no_grad():
            return run(kind, target, args, kwargs)

    def fake_mode(self) -> FakeTensorMode | None:
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


# Layout operations: which dimension of the input becomes which dimension of the result.

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
    name = vocabulary.raw_name(value.node).rstrip("_")
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
