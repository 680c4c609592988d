"""Writes in place to scores, to a part of them or through a view, as operations without writes."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from compile_passes.ir.axes import sizes_equal
from compile_passes.ir.graph import NodeInserter, example, run
from compile_passes.ir.vocabulary import bind, operation, raw_name
from compile_passes.rewrites.edit_log import Edit, EditLog

# Writes to a part of the scores, as operations on all of them: `s[..., 9:] = -inf` and
# `s.diagonal(0, -2, -1).fill_(-inf)` are masks, `s[:, :, 1:, 1:] += bias` adds a bias that is
# padded with zeros.

# Operations whose result is a new tensor, not a view of another.
_NEW_TENSORS = frozenset("matmul einsum baddbmm mul div add sub neg tanh masked_fill where".split())


class IndexedWrite(NamedTuple):
    """`target[index] = value`. `entries` has an item for each dimension of the target: an int, a
    slice, or a bool mask, followed by None for its further dimensions.
    """

    node: fx.Node
    target: fx.Node
    entries: list[object]
    value: object

    @property
    def tensor(self) -> Tensor:
        """The example of the target."""
        return example(self.target)


def rewrite_indexed_writes(log: EditLog) -> None:
    """Write all that set a part of a tensor to a number, or add to a part, without an index."""
    writes = [node for node in log.graph.nodes if node.target in (operator.setitem, "fill_")]
    for node in writes:
        log.attempt(_without_index, node)


def _without_index(log: EditLog, node: fx.Node) -> None:
    if node.target == "fill_":
        _filled_diagonal(log, node)
        return
    write = _indexed_write(node)
    if write is not None:
        rewritten = _filled if _is_number(write.value) else _added
        rewritten(log.edit(node, writes=True), write)


def _is_number(x: object) -> bool:
    x = example(x) if isinstance(x, fx.Node) else x
    return isinstance(x, (int, float, torch.SymFloat)) or (isinstance(x, Tensor) and not x.dim())


def _indexed_write(node: fx.Node) -> IndexedWrite | None:
    target, index, value = node.args
    x = example(target) if isinstance(target, fx.Node) else None
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        return None
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    if not is_new(target, order):
        return None
    entries = _entries(index if isinstance(index, tuple) else (index,), x.dim())
    return None if entries is None else IndexedWrite(node, target, entries, value)


def is_new(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether only readers of this node, and no older name of its tensor, see a later write."""
    name, _, writes = operation(node)
    if name not in _NEW_TENSORS or node.kwargs.get("out") is not None:
        return False
    if not writes:
        return True
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or not is_new(first, order):
        return False
    return all(order[user] <= order[node] for user in first.users)


def _entries(index: tuple, rank: int) -> list[object] | None:
    """An item for each dimension; None if the index has others than ints, slices and one mask."""
    masks = [i for i in index if isinstance(i, fx.Node)]
    others = [i for i in index if i is not Ellipsis and not isinstance(i, fx.Node)]
    if len(masks) > 1 or not all(_is_mask(example(i)) for i in masks):
        return None
    if not all(type(i) is int or _is_range(i) for i in others):
        return None
    used = len(others) + sum(example(i).dim() for i in masks)
    if used > rank or sum(i is Ellipsis for i in index) > 1:
        return None
    entries: list[object] = []
    for i in index if any(i is Ellipsis for i in index) else (*index, Ellipsis):
        if i is Ellipsis:
            entries += [slice(None)] * (rank - used)
        else:
            entries += [i] + ([None] * (example(i).dim() - 1) if isinstance(i, fx.Node) else [])
    return entries


def _is_mask(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool and x.dim() > 0


def _is_range(i: object) -> bool:
    if not isinstance(i, slice) or i.step not in (None, 1):
        return False
    return all(x is None or type(x) is int for x in (i.start, i.stop))


def _filled(inserter: Edit, write: IndexedWrite) -> None:
    """A number in the place of some elements."""
    selected = [(d, x) for d, x in enumerate(write.entries) if x not in (None, slice(None))]
    sizes = write.tensor.shape
    if not selected or any(not _is_static(x, sizes[d]) for d, x in selected):
        return
    mask = None
    for dim, x in selected:
        condition = x if isinstance(x, fx.Node) else _in_range(inserter, write.tensor, dim, x)
        for _ in range(len(sizes) - dim - example(condition).dim()):
            condition = inserter.method("unsqueeze", condition, -1)
        mask = inserter.function(operator.and_, mask, condition) if mask else condition
    out = inserter.method("masked_fill", write.target, mask, write.value)
    _replace(write, inserter, out, [write.node])


def _filled_diagonal(log: EditLog, node: fx.Node) -> None:
    """A number on a diagonal of the last two dimensions."""
    part, *numbers = node.args
    is_diagonal = part.op.startswith("call") and raw_name(part) == "diagonal"
    if not is_diagonal or node.users or len(part.users) != 1 or len(numbers) != 1:
        return
    given = bind(part, "input offset dim1 dim2")
    target, offset = given["input"], given.get("offset", 0)
    x, order = example(target), {n: i for i, n in enumerate(node.graph.nodes)}
    dims = [given.get(name, default) % x.dim() for name, default in (("dim1", 0), ("dim2", 1))]
    last_two = dims == [x.dim() - 2, x.dim() - 1] and _are_static((*x.shape[-2:], offset))
    if not last_two or not x.dtype.is_floating_point or not is_new(target, order):
        return
    inserter = log.edit(node, writes=True)
    mask = inserter.function(torch.ones, *x.shape[-2:], dtype=torch.bool, device=x.device)
    mask = inserter.method("tril", inserter.method("triu", mask, offset), offset)
    out = inserter.method("masked_fill", target, mask, *numbers)
    _replace(IndexedWrite(node, target, [], *numbers), inserter, out, [part, node])


def _is_static(x: object, size: object) -> bool:
    """Whether the elements that x selects are known: masks say it themselves."""
    return isinstance(x, fx.Node) or type(size) is int


def _in_range(inserter: NodeInserter, x: Tensor, dim: int, entry: int | slice) -> fx.Node:
    """Whether each position of a dimension is the int, or in the slice."""
    n = x.shape[dim]
    positions = inserter.function(torch.arange, n, device=x.device)
    if type(entry) is int:
        return inserter.function(operator.eq, positions, entry % n)
    start, stop, _ = entry.indices(n)
    above = inserter.function(operator.ge, positions, start)
    return inserter.function(operator.and_, above, inserter.function(operator.lt, positions, stop))


def _added(inserter: Edit, write: IndexedWrite) -> None:
    """The elements that were there plus other tensors: these are padded with zeros."""
    padding = _padding(write)
    steps = _steps(write.value, write) if padding is not None else None
    if not steps:
        return
    total = None
    for before, step in zip(steps, steps[1:], strict=False):
        name, parameters, _ = operation(step)
        if name == "add":
            given = bind(step, parameters)
            x = given["other"] if given["input"] is before else given["input"]
            total = x if total is None else inserter.function(operator.add, total, x)
        elif total is not None:
            total = _expanded(inserter, total, example(before).shape)
            shape = tuple(example(step).shape)
            total = total and _are_static(shape) and inserter.method("reshape", total, shape)
            if not total:
                inserter.undo()
                return
    total = total and _expanded(inserter, total, example(steps[-1]).shape, len(padding) // 2)
    if not total:
        inserter.undo()
        return
    if padding:
        total = inserter.function(F.pad, total, padding)
    out = inserter.function(operator.add, write.target, total)
    _replace(write, inserter, out, [*steps, write.node])


def _expanded(
    inserter: NodeInserter, x: fx.Node, shape: torch.Size, last: int | None = None
) -> fx.Node | None:
    """A tensor with the sizes of a shape, or its `last` ones; None if they are not fixed."""
    wanted = shape if last is None else shape[len(shape) - last :]
    sizes = example(x).shape[-len(wanted) :] if wanted else ()
    if len(sizes) == len(wanted) and all(map(sizes_equal, sizes, wanted)):
        return x
    return inserter.method("expand", x, tuple(shape)) if _are_static(shape) else None


def _are_static(shape: tuple) -> bool:
    return all(type(n) is int for n in shape)


def _padding(write: IndexedWrite) -> list[int] | None:
    """The elements before and after the slices, the last dimension first, as F.pad takes them."""
    padding: list[int] = []
    for n, x in zip(reversed(write.tensor.shape), reversed(write.entries), strict=True):
        if not isinstance(x, slice):
            return None
        if type(n) is int:
            start, stop, _ = x.indices(n)
            padding += [start, n - max(start, stop)]
        else:
            start, stop = x.start or 0, x.stop or 0
            if start < 0 or stop > 0 or (x.stop == 0):
                return None  # relative to the size
            padding += [start, -stop]
    while padding and padding[-2:] == [0, 0]:
        del padding[-2:]
    return padding


def _steps(node: object, write: IndexedWrite) -> list[fx.Node] | None:
    """The nodes from reading the elements to the value that is written; None if anything but
    views and sums with tensors of their dtype is between.
    """
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    x, out = example(node), write.tensor
    if not isinstance(x, Tensor) or x.dtype != out.dtype:
        return None
    name, parameters, writes = operation(node)
    given = bind(node, parameters)
    if name == "getitem":
        same = given["input"] is write.target and node.args[1] == write.node.args[1]
        return [node] if same else None
    if name == "reshape" and not writes:
        before = _steps(given.get("input"), write)
        return before and [*before, node]
    if name != "add" or given.keys() - {"input", "other"}:
        return None
    operands = [given["input"], given["other"]]
    before = _steps(operands[0], write) or _steps(operands[1], write)
    if not before:
        return None
    other = operands[1] if before[-1] is operands[0] else operands[0]
    known = isinstance(other, fx.Node) and getattr(example(other), "dtype", None) == x.dtype
    grown = not all(map(sizes_equal, x.shape, example(before[-1]).shape))
    return [*before, node] if known and not grown else None


def _replace(write: IndexedWrite, edit: Edit, out: fx.Node, nodes: list[fx.Node]) -> None:
    """Replace the write by `out`, which later readers of the target read."""
    order = {n: i for i, n in enumerate(write.node.graph.nodes)}
    others = [user for user in write.target.users if user not in (*nodes, *edit.nodes)]
    earlier = [user for user in others if order[user] < order[write.node]]
    if any(isinstance(example(user), Tensor) for user in earlier):
        edit.undo()  # a view that is read later would see the write
        return
    out.meta.update(write.target.meta)
    edit.redirect(write.target, out, [user for user in others if user not in earlier])
    for node in reversed(nodes):
        edit.erase(node)


# Operations in place on a view of a new tensor, as operations on the tensor: after `scores.view(B *
# H, S, S).add_(bias)` the scores are that sum viewed as before, and `scores[..., n:].fill_(-inf)`
# is `scores[..., n:] = -inf`.

# Operations in place, and the functions of the same arguments.
_METHODS = {f"{name}_": name for name in "add sub mul div masked_fill clamp tanh".split()}
_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_SHAPES = ("view", "unsqueeze", "squeeze", "unflatten")  # never copies, as those of `reshape`


def rewrite_viewed_writes(log: EditLog) -> None:
    """Rewrite all operations in place on views of new tensors."""
    for node in list(log.graph.nodes):
        view = node.args[0] if node.op.startswith("call") and node.args else None
        if not isinstance(view, fx.Node) or not _is_in_place(node):
            continue
        if view.target is operator.getitem:
            log.attempt(_write_part, node)
        elif _is_whole_view(view):
            log.attempt(_write_whole, node)


def _is_in_place(node: fx.Node) -> bool:
    return node.target in (*_METHODS, *_OPERATORS, "fill_", "zero_")


def _is_whole_view(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    name, _, writes = operation(node)
    shaped = node.op == "call_method" and node.target in _SHAPES
    return shaped or (name == "permute" and not writes)


def _write_part(log: EditLog, node: fx.Node) -> None:
    """`x[i].fill_(a)` and `x[i].add_(y)`, which nothing else reads, as writes by index."""
    part = node.args[0]
    x, index = part.args
    basic = all(_is_basic(i) for i in (index if isinstance(index, tuple) else (index,)))
    if not basic or node.users or len(part.users) != 1 or not isinstance(example(x), Tensor):
        return
    inserter = log.edit(node, writes=True)
    value = 0.0 if node.target == "zero_" else None
    if node.target == "fill_" and len(node.args) == 2:
        value = node.args[1]
    elif node.target == "add_":  # others keep their input for the backward pass, which is written
        value = _computed(inserter, node)
    if value is None:
        inserter.undo()
        return
    inserter.function(operator.setitem, x, index, value)
    inserter.erase(node)
    if not part.users:
        inserter.erase(part)


def _is_basic(i: object) -> bool:
    """Whether indexing by i gives a view; by tensors and lists it copies."""
    return isinstance(i, (int, slice)) or i is Ellipsis or i is None


def _write_whole(log: EditLog, node: fx.Node) -> None:
    """An operation on a view of all elements, as one on the tensor; views are made again."""
    view = node.args[0]
    views = [view]
    while _is_whole_view(views[-1].args[0]):
        views.append(views[-1].args[0])
    base = views[-1].args[0]
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    if not isinstance(example(base), Tensor):
        return
    names = _names(base, node, order) if is_new(base, order) else None
    if names is None:
        return
    inserter = log.edit(node, writes=True)
    out = _computed(inserter, node)
    for x in views:
        out = out and _undone(inserter, out, x)
    if out is None:
        inserter.undo()
        return
    again = {base: out}
    for x in names[1:]:
        make = inserter.method if x.op == "call_method" else inserter.function
        again[x] = make(x.target, again[x.args[0]], *x.args[1:], **x.kwargs)
    for name in names:
        later = [user for user in name.users if order.get(user, -1) > order[node]]
        inserter.redirect(name, again[name], later)
    inserter.redirect(node, again[view])
    inserter.erase(node)
    for x in reversed(names):
        if not again[x].users:
            inserter.erase(again[x])


def _names(base: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """A tensor and the views of all its elements that are made before the write, in order; None if
    another result made before may share its memory.
    """
    names = [base]
    for name in names:
        for user in name.users:
            if order[user] >= order[node] or not isinstance(example(user), Tensor):
                continue
            if _is_whole_view(user):
                names.append(user)
            elif not is_new(user, order) or operation(user)[2]:
                return None
    return names


def _computed(inserter: NodeInserter, node: fx.Node) -> fx.Node | None:
    """What the operation computes, not in place; None if its shape or dtype are not the view's."""
    if node.op == "call_method" and node.target in _METHODS:
        out = inserter.method(_METHODS[node.target], *node.args, **node.kwargs)
    elif node.target in _OPERATORS:
        out = inserter.function(_OPERATORS[node.target], *node.args)
    else:
        return None
    x, view = example(out), example(node.args[0])
    return out if (x.dtype, x.shape) == (view.dtype, view.shape) else None


def _undone(inserter: NodeInserter, x: fx.Node, view: fx.Node) -> fx.Node | None:
    """The tensor of which x is this view."""
    before = example(view.args[0])
    if operation(view)[0] != "permute":
        static = all(type(n) is int for n in before.shape)
        return inserter.method("view", x, *before.shape) if static else None
    labels = torch.empty(tuple(range(before.dim())), device="meta")
    order = list(run(view.op, view.target, (labels, *view.args[1:]), view.kwargs).shape)
    return inserter.method("permute", x, *(order.index(d) for d in range(before.dim())))
