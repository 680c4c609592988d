"""Operations in place on a view of a new tensor, as operations on the tensor: after
`scores.view(B * H, S, S).add_(bias)` the scores are that sum viewed as before, and
`scores[..., n:].fill_(-inf)` is `scores[..., n:] = -inf`.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from compile_passes.graph.indexed_writes import is_new
from compile_passes.graph.inserter import NodeInserter
from compile_passes.graph.ir import example, run
from compile_passes.graph.vocabulary import operation
from compile_passes.report import log

# Operations in place, and the functions of the same arguments.
_METHODS = {f"{name}_": name for name in "add sub mul div masked_fill clamp tanh".split()}
_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_SHAPES = ("view", "unsqueeze", "squeeze", "unflatten")  # never copies, as those of `reshape`


def rewrite_viewed_writes(graph: fx.Graph) -> None:
    """Rewrite all operations in place on views of new tensors."""
    for node in list(graph.nodes):
        view = node.args[0] if node.op.startswith("call") and node.args else None
        if not isinstance(view, fx.Node) or not _is_in_place(node):
            continue
        try:
            if view.target is operator.getitem:
                _write_part(node, view)
            elif _is_whole_view(view):
                _write_whole(node, view)
        except Exception:  # a bug of the pass must not break the user's compilation
            log.warning("could not rewrite %s", node, exc_info=True)


def _is_in_place(node: fx.Node) -> bool:
    return node.target in (*_METHODS, *_OPERATORS, "fill_", "zero_")


def _is_whole_view(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    name, _, writes = operation(node)
    shaped = node.op == "call_method" and node.target in _SHAPES
    return shaped or (name == "permute" and not writes)


def _write_part(node: fx.Node, part: fx.Node) -> None:
    """`x[i].fill_(a)` and `x[i].add_(y)`, which nothing else reads, as writes by index."""
    x, index = part.args
    basic = all(_is_basic(i) for i in (index if isinstance(index, tuple) else (index,)))
    if not basic or node.users or len(part.users) != 1 or not isinstance(example(x), Tensor):
        return
    inserter = NodeInserter(node.graph, node)
    value = 0.0 if node.target == "zero_" else None
    if node.target == "fill_" and len(node.args) == 2:
        value = node.args[1]
    elif node.target == "add_":  # others keep their input for the backward pass, which is written
        value = _computed(inserter, node)
    if value is None:
        inserter.undo()
        return
    inserter.function(operator.setitem, x, index, value)
    node.graph.erase_node(node)
    if not part.users:
        node.graph.erase_node(part)


def _is_basic(i: object) -> bool:
    """Whether indexing by i gives a view; by tensors and lists it copies."""
    return isinstance(i, (int, slice)) or i is Ellipsis or i is None


def _write_whole(node: fx.Node, view: fx.Node) -> None:
    """An operation on a view of all elements, as one on the tensor; views are made again."""
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
    inserter = NodeInserter(node.graph, node)
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
        for user in [user for user in name.users if order.get(user, -1) > order[node]]:
            user.replace_input_with(name, again[name])
    node.replace_all_uses_with(again[view])
    node.graph.erase_node(node)
    for x in reversed(names):
        if not again[x].users:
            node.graph.erase_node(again[x])


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
