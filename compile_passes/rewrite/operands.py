"""Emission of the operands of an attention: tensors laid out for the call."""

from __future__ import annotations

import operator

import torch
from torch import fx

from compile_passes.graph.axes import Dims
from compile_passes.graph.ir import Value, example, is_tensor
from compile_passes.match.match_state import BiasTerm, Leaf
from compile_passes.report import Refused
from compile_passes.rewrite.emitter import Emitter, has_contiguous_rows


def operand(emitter: Emitter, leaf: Leaf, dims: Dims, dtype: torch.dtype) -> fx.Node:
    """Query, key or value, laid out as `dims`."""
    node = emitter.arrange(leaf.value.node, leaf.dims, dims, full=True)
    return cast(emitter, node, dtype)


def cast(emitter: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The tensor in another dtype."""
    return node if example(node).dtype == dtype else emitter.method("to", node, dtype)


def contiguous_rows(emitter: Emitter, node: fx.Node) -> fx.Node:
    """The tensor, copied unless its last dimension is contiguous."""
    return node if has_contiguous_rows(node) else emitter.method("contiguous", node)


def aligned(emitter: Emitter, leaf: Leaf, dims: Dims) -> fx.Node | float:
    """A leaf as a number or a tensor that broadcasts against `dims`."""
    if not isinstance(leaf.value, Value):
        return leaf.value
    node = leaf.value.node
    if not is_tensor(leaf.value):
        return node
    if not leaf.axes():
        return emitter.method("reshape", node, ()) if leaf.dims else node
    return emitter.arrange(node, leaf.dims, dims)


def bias(emitter: Emitter, term: BiasTerm) -> fx.Node:
    """A bias times its coefficient, floating point, (B or 1, Hq or 1, Sq or 1, Sk or 1)."""
    if not is_tensor(term.leaf.value):
        raise Refused("a symbolic number is added to the scores")
    node = emitter.arrange(term.leaf.value.node, term.leaf.dims, emitter.site.mask_dims)
    if not example(node).dtype.is_floating_point:
        node = emitter.method("to", node, torch.float32)
    if term.coefficient != 1.0:
        node = emitter.function(operator.mul, node, term.coefficient)
    return node


def bool_mask(emitter: Emitter, leaf: Leaf, dims: Dims) -> fx.Node:
    """A mask of bools, or of 0 and 1, as bools that broadcast against `dims`."""
    return cast(emitter, emitter.arrange(leaf.value.node, leaf.dims, dims), torch.bool)


def fill_where(
    emitter: Emitter, kept: fx.Node, before: fx.Node | None, fill: float, dtype: torch.dtype
) -> fx.Node:
    """`before` where kept, or zeros of the dtype if it is None, and `fill` elsewhere."""
    if before is None:
        before = emitter.function(torch.zeros, (), dtype=dtype, device=example(kept).device)
    return emitter.function(torch.where, kept, before, fill)


def inverted(emitter: Emitter, mask: fx.Node) -> fx.Node:
    """not mask"""
    return emitter.function(torch.logical_not, mask)


def only_backward(emitter: Emitter, x: fx.Node) -> fx.Node:
    """0 with the gradient of x."""
    return emitter.function(operator.sub, x, emitter.method("detach", x))
