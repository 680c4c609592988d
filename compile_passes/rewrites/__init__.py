"""What is changed before attention is matched: an ordered list, and a log that undoes edits which
led to no fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import sympy
import torch
from torch import SymInt, Tensor, fx

from compile_passes.ir.axes import Size
from compile_passes.ir.graph import example, has_no_effect
from compile_passes.ir.vocabulary import bind, raw_name
from compile_passes.rewrites.attention_calls import write_out_multi_head, write_out_sdpa
from compile_passes.rewrites.edit_log import Edit, EditLog
from compile_passes.rewrites.einsums import split_einsums
from compile_passes.rewrites.flex_attention import write_out_flex
from compile_passes.rewrites.weight_sums import (
    distribute_products,
    divide_products,
    split_joined_keys,
)
from compile_passes.rewrites.writes import rewrite_indexed_writes, rewrite_viewed_writes

# Readers of scores and weights that need no values: unused nodes, which are dropped, and operations
# that read the shape, dtype or device of a tensor, such as `mask.type_as(scores)` or
# `scores.new_zeros(n)`, which are written with what they read, so that they do not keep it alive.

_CREATIONS = {"zeros": torch.zeros, "ones": torch.ones, "full": torch.full}
_AS_SECOND = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}
_CREATION_KEYWORDS = {"dtype", "device", "size", "fill_value"}


def drop_unused_nodes(log: EditLog) -> None:
    """Erase unused nodes that have no effect, the last first, such as copies of the scores or
    averages of the weights that the caller ignores.
    """
    edit = log.edit(log.graph.output_node(), tidies=True)
    for node in reversed(list(log.graph.nodes)):
        if not node.users and has_no_effect(node):
            edit.erase(node)


def detach_metadata_readers(log: EditLog) -> None:
    """Rewrite the readers of metadata of computed tensors in place, where all is known."""
    edit = log.edit(log.graph.output_node(), tidies=True)
    sizes: dict[sympy.Expr, fx.Node] = {}  # nodes that hold a size without reading such a tensor
    for node in log.graph.nodes:
        if isinstance(example(node), SymInt):
            _rewrite_size(edit, node, sizes)
        elif node.op in ("call_function", "call_method") and isinstance(example(node), Tensor):
            _rewrite(edit, node, sizes)


def _rewrite_size(edit: Edit, node: fx.Node, sizes: dict[sympy.Expr, fx.Node]) -> None:
    """Let another node take the place of a size that is read from a computed tensor."""
    expr = example(node).node.expr
    if expr in sizes:
        edit.redirect(node, sizes[expr])
    elif all(x.op in ("placeholder", "get_attr") for x in node.all_input_nodes):
        sizes[expr] = node


def _is_computed(x: object) -> bool:
    """Whether x may be scores or weights."""
    if not isinstance(x, fx.Node) or x.op not in ("call_function", "call_method"):
        return False
    return isinstance(example(x), Tensor) and example(x).is_floating_point()


def _rewrite(edit: Edit, node: fx.Node, sizes: dict[sympy.Expr, fx.Node]) -> None:
    name = raw_name(node)
    if name.startswith("new_") or name.endswith("_like"):
        _rewrite_creation(edit, node, name, sizes)
    elif len(node.args) == 2 and not node.kwargs and _is_computed(node.args[1]):
        x, other = node.args
        if name == "type_as" or (name == "to" and isinstance(x, fx.Node)):
            _rewrite_conversion(edit, node, example(other))
        elif name in _AS_SECOND:
            shape = _known_sizes(example(other).shape, sizes)
            if shape is not None:
                edit.change(node, "call_method", _AS_SECOND[name], (x, *shape), {})


def _rewrite_conversion(edit: Edit, node: fx.Node, like: Tensor) -> None:
    """x.to(other) or x.type_as(other)"""
    x = node.args[0]
    same_device = isinstance(example(x), Tensor) and example(x).device == like.device
    args = (x, like.dtype) if same_device else (x, like.device, like.dtype)
    edit.change(node, "call_method", "to", args, {})


def _rewrite_creation(
    edit: Edit, node: fx.Node, name: str, sizes: dict[sympy.Expr, fx.Node]
) -> None:
    """x.new_zeros(...), torch.zeros_like(x) and the like, as a contiguous tensor of its own."""
    kind = name.removeprefix("new_").removesuffix("_like")
    if kind not in _CREATIONS or not node.args or not _is_computed(node.args[0]):
        return
    like, result = example(node.args[0]), example(node)
    if not set(node.kwargs) <= _CREATION_KEYWORDS or not result.is_contiguous():
        return
    # the sizes that new_zeros is given may be nodes, which stay
    reads_shape = name.endswith("_like")
    given = bind(node, _parameters(name))
    shape = _known_sizes(like.shape, sizes) if reads_shape else given.get("size")
    fill = (given.get("fill_value"),) if kind == "full" else ()
    if shape is None or not all(isinstance(x, (int, float)) for x in fill):
        return
    whole = isinstance(shape, (tuple, list)) and len(shape) == 1 and isinstance(shape[0], fx.Node)
    if whole and not isinstance(example(shape[0]), (int, SymInt)):
        shape = shape[0]  # a torch.Size
    options = {"dtype": result.dtype, "device": result.device}
    edit.change(node, "call_function", _CREATIONS[kind], (shape, *fill), options)


def _parameters(name: str) -> str:
    if name.startswith("new_"):
        return "input size fill_value" if name == "new_full" else "input size*"
    return "input fill_value"


def _known_sizes(shape: Sequence[Size], sizes: dict[sympy.Expr, fx.Node]) -> list | None:
    found = [_known_size(n, sizes) for n in shape]
    return None if None in found else found


def _known_size(n: Size, sizes: dict[sympy.Expr, fx.Node]) -> int | fx.Node | None:
    if isinstance(n, SymInt):
        expr = n.node.expr
        return int(expr) if expr.is_number else sizes.get(expr)
    return n


# The rewrites in their order.


class Rewrite(NamedTuple):
    """One rewrite of a graph; `reason` is why it has its place in the order."""

    name: str
    reason: str
    function: Callable[[EditLog], None]


REWRITES: tuple[Rewrite, ...] = (
    Rewrite(
        "readers of metadata",
        "first: what they no longer read may be unused then",
        detach_metadata_readers,
    ),
    Rewrite(
        "unused nodes",
        "before all that asks who else reads scores or weights",
        drop_unused_nodes,
    ),
    Rewrite(
        "multi-head attention",
        "calls come before the rewrites of operations; their order among themselves is free",
        write_out_multi_head,
    ),
    Rewrite(
        "scaled_dot_product_attention",
        "a call; those inside multi-head attention have been traced into operations",
        write_out_sdpa,
    ),
    Rewrite(
        "FlexAttention",
        "a call",
        write_out_flex,
    ),
    Rewrite(
        "writes into views",
        "before writes by index: a write into a view of a part becomes one",
        rewrite_viewed_writes,
    ),
    Rewrite(
        "writes by index",
        "before all that follows scores and weights from reader to reader, where a write ends",
        rewrite_indexed_writes,
    ),
    Rewrite(
        "einsums",
        "before what looks for products: these are einsums of two operands with an equation",
        split_einsums,
    ),
    Rewrite(
        "joined keys",
        "after einsums, by which the parts of the weights may be multiplied",
        split_joined_keys,
    ),
    Rewrite(
        "weights over their sum",
        "before sums of weights: once a division follows the product, that may be one of a sum",
        divide_products,
    ),
    Rewrite(
        "sums of weights",
        "last: it repeats itself on the products that it makes",
        distribute_products,
    ),
)
