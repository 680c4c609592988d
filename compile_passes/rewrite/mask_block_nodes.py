"""`fa::mask_blocks` for the dense masks that are left: one call for all attentions of a mask.

Attentions share it where their masks are the same node, or were made by the same operations from
the same nodes, as each layer makes its own from the model's. Bool masks, ranges and lengths that
are equal in this sense are made once. After any write to memory all are made again.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, fx

from compile_passes.graph.axes import sizes_equal
from compile_passes.graph.dead_nodes import has_no_effect
from compile_passes.graph.ir import example, written_nodes
from compile_passes.graph.vocabulary import operation
from fa_ops.dispatch import mask_blocks_pay
from fa_ops.types import MASK_BLOCK

MASK_BLOCKS = torch.ops.fa.mask_blocks.default
_ATTENTION = (torch.ops.fa.attention.default, torch.ops.fa.attention_with_lse.default)
_MASK = 3  # the position of attn_mask among the operators' arguments
_POSITIONS = ("key_ranges", "kv_lens")


def add_mask_blocks(graph: fx.Graph) -> int:
    """Give attentions with a dense mask its blocks where that pays; returns how many were given."""
    made: dict[int, fx.Node] = {}
    first: dict[int, fx.Node] = {}
    numbers, given = _Numbers(), 0
    for node in list(graph.nodes):
        if node.target in _ATTENTION:
            for x in _shared_inputs(node):
                node.replace_input_with(x, first.setdefault(numbers.of(x), x))
            mask = _dense_mask(node)
            if mask is None or not _pays(node, mask):
                continue
            number = numbers.of(mask)
            if number not in made:
                with graph.inserting_before(node):
                    made[number] = _insert(graph, mask)
            node.kwargs = node.kwargs | {"mask_blocks": made[number]}
            given += 1
        elif _writes(node):
            made, first, numbers = {}, {}, _Numbers()
    return given


def _shared_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of an attention that have no gradients: a bool mask, ranges and lengths."""
    mask = _dense_mask(node)
    found = [x for x in map(node.kwargs.get, _POSITIONS) if isinstance(x, fx.Node)]
    return found + [mask] * (mask is not None and example(mask).dtype == torch.bool)


def _dense_mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention."""
    mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _pays(node: fx.Node, mask: fx.Node) -> bool:
    """Whether an attention is faster with the blocks of its mask, and has none."""
    queries, mask_rows = example(node.args[0]).shape[2], (1, 1, *example(mask).shape)[-2]
    if node.kwargs.get("mask_blocks") is not None or sizes_equal(mask_rows, 1):
        return False
    # a length that may vary is that of prompts: graphs of single tokens are made for 1
    count = queries if type(queries) is int else MASK_BLOCK
    return mask_blocks_pay(count, example(mask))


def _insert(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    node = graph.call_function(MASK_BLOCKS, (mask,))
    name = "example_value" if "example_value" in mask.meta else "val"
    value: Tensor = example(mask)
    node.meta = {**mask.meta, name: MASK_BLOCKS(value.detach())}
    return node


def _writes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    writes = operation(node)[2]
    return bool(writes or written_nodes(node, writes))


class _Numbers:
    """Numbers of values: equal where nodes compute the same from the same nodes."""

    def __init__(self) -> None:
        self._of_node: dict[fx.Node, int] = {}
        self._of_operation: dict[tuple, int] = {}
        self._next = itertools.count()

    def of(self, node: fx.Node) -> int:
        """The number of a node's value."""
        if node not in self._of_node:
            key = self._key(node)
            self._of_node[node] = self._of_operation.setdefault(key, next(self._next))
        return self._of_node[node]

    def _key(self, node: fx.Node) -> tuple:
        if node.op == "get_attr":
            return "get_attr", node.target
        if not has_no_effect(node):
            return (node,)
        numbered = fx.map_arg((node.args, node.kwargs), lambda x: ("value", self.of(x)))
        return node.op, node.target, repr(numbered)
