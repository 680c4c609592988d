"""Leaves as nodes: what joins the attention from outside, laid out for the call."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from compile_passes.graph.axes import Dims
from compile_passes.graph.ir import Value, example
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import BiasTerm, Leaf
from compile_passes.report import Refused
from compile_passes.rewrite.emitter import Emitter, rows_are_contiguous


def operand(emitter: Emitter, leaf: Leaf, dims: Dims, dtype: torch.dtype) -> fx.Node:
    node = emitter.arrange(leaf.value.node, leaf.dims, dims, full=True)
    return cast(emitter, node, dtype)


def cast(emitter: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if example(node).dtype == dtype else emitter.method("to", node, dtype)


def with_rows(emitter: Emitter, node: fx.Node) -> fx.Node:
    return node if rows_are_contiguous(node) else emitter.method("contiguous", node)


def aligned(emitter: Emitter, leaf: Leaf, dims: Dims) -> fx.Node | float:
    """A leaf as a tensor that broadcasts against `dims`."""
    if not isinstance(leaf.value, Value):
        return leaf.value
    if not isinstance(leaf.value.tensor, Tensor):
        return leaf.value.node
    if not leaf.axes():
        return emitter.method("reshape", leaf.value.node, ()) if leaf.dims else leaf.value.node
    return emitter.arrange(leaf.value.node, leaf.dims, dims)


def bias(site: AttentionSite, emitter: Emitter, term: BiasTerm) -> fx.Node:
    """A bias times its coefficient, floating point, (B or 1, Hq or 1, Sq or 1, Sk or 1)."""
    if not isinstance(term.leaf.value.tensor, Tensor):
        raise Refused("a symbolic number is added to the scores")
    node = emitter.arrange(term.leaf.value.node, term.leaf.dims, site.mask_dims)
    if not example(node).dtype.is_floating_point:
        node = emitter.method("to", node, torch.float32)
    if term.coefficient != 1.0:
        node = emitter.function(operator.mul, node, term.coefficient)
    return node


def filled(
    emitter: Emitter, kept: fx.Node, before: fx.Node | None, fill: float, dtype: torch.dtype
) -> fx.Node:
    """`before`, or zeros of that dtype, where kept; whatever the default dtype."""
    if before is None:
        before = emitter.function(torch.zeros, (), dtype=dtype, device=example(kept).device)
    return emitter.function(torch.where, kept, before, fill)


def inverted(emitter: Emitter, mask: fx.Node) -> fx.Node:
    return emitter.function(torch.logical_not, mask)
