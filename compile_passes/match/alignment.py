"""Aligning operands and reductions with the dimensions of scores and weights."""

from __future__ import annotations

import torch

from compile_passes.graph import layout
from compile_passes.graph.axes import Axis, Dims, Group, broadcast_dims, is_one, resolve_dims
from compile_passes.graph.constants import constant_value
from compile_passes.graph.ir import Value, is_tensor
from compile_passes.match.match_state import Leaf, Tracked


def other_operand(value: Value, name: str) -> object:
    """The operand of a binary operation that is not called `name`."""
    return value.args.get("other" if name == "input" else "input")


def align(value: Value, state: Tracked, x: object) -> tuple[Leaf, Dims] | str:
    """(x aligned with the scores, the dims of the scores broadcast against it), or why x cannot be
    aligned.
    """
    constant = constant_value(x)
    if constant is not None:
        return Leaf(float(constant)), state.dims
    if not is_tensor(x):
        scalar = isinstance(x, Value) and isinstance(x.tensor, (torch.SymFloat, torch.SymInt))
        return (Leaf(x), state.dims) if scalar else "they are combined with something unknown"
    if x in state.path:
        return "they are combined with themselves"
    dims = _broadcast_dims(value.shape, x.shape, state.dims)
    # a mask that was expanded to the scores' shape is used in its original size
    leaf = Leaf(*layout.undo_layout(x, broadcast_dims(x.shape, dims), x.dtype, value))
    return leaf, dims


def reduced(value: Value, dims: Dims) -> tuple[Group, Dims] | None:
    """(axes that a reduction runs over, dims of its result); None unless it is over one dimension
    of a size other than 1.
    """
    dim = value.args.get("dim", value.args.get("other"))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or not dims[dim]:
        return None
    result = list(resolve_dims(dims))
    axes, result[dim] = result[dim], ()
    if not value.args.get("keepdim"):
        del result[dim]
    return axes, tuple(result)


def without_inversion(mask: object, when: bool = True) -> tuple[object, bool]:
    """(the mask before any logical nots, the value that it has where the given one is `when`)"""
    while isinstance(mask, Value) and mask.op == "not":
        inner = mask.args.get("input")
        if not isinstance(inner, Value) or inner.dtype != torch.bool:
            break
        mask, when = inner, not when
    return mask, when


def _broadcast_dims(shape: torch.Size, other: torch.Size, dims: Dims) -> Dims:
    """Dims of scores after broadcasting against a tensor of shape `other`."""
    dims = ((),) * (len(shape) - len(dims)) + dims
    sizes = (1,) * (len(shape) - len(other)) + tuple(other)
    pairs = zip(dims, sizes, strict=True)
    return tuple((Axis(n, "bias"),) if not g and not is_one(n) else g for g, n in pairs)
