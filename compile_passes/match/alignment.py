"""Aligning operands and reductions with the dimensions of scores and weights."""

from __future__ import annotations

import torch

from compile_passes.graph import layout
from compile_passes.graph.axes import Axis, Dims, Group, broadcast_dims, is_one, resolve_dims
from compile_passes.graph.constants import constant_value, round_to
from compile_passes.graph.einsums import parsed
from compile_passes.graph.ir import Value, is_tensor
from compile_passes.match.match_state import Leaf, Tracked
from compile_passes.report import Refused


def other_operand(value: Value, name: str) -> object:
    """The operand of a binary operation that is not called `name`."""
    return value.args.get("other" if name == "input" else "input")


def align(value: Value, state: Tracked, x: object) -> tuple[Leaf, Dims]:
    """(x aligned with the dims of a state, these dims after broadcasting against x)"""
    constant = constant_value(x)
    if constant is not None:
        in_16_bits = is_tensor(x) and x.dtype in (torch.float16, torch.bfloat16)
        return Leaf(round_to(constant, x.dtype) if in_16_bits else float(constant)), state.dims
    if not is_tensor(x):
        scalar = isinstance(x, Value) and isinstance(x.tensor, (torch.SymFloat, torch.SymInt))
        if not scalar:
            raise Refused("they are combined with something unknown")
        return Leaf(x), state.dims
    if x in state.path:
        raise Refused("they are combined with themselves")
    dims = _broadcast_dims(value.shape, x.shape, state.dims)
    # a mask that was expanded to the scores' shape is used in its original size
    leaf = Leaf(*layout.undo_layout(x, broadcast_dims(x.shape, dims), x.dtype, value))
    return leaf, dims


def reduced(value: Value, dims: Dims, reason: str) -> tuple[Group, Dims]:
    """(axes that a reduction runs over, dims of its result). Raises Refused if there are no axes or
    several dimensions.
    """
    dim = value.args.get("dim", value.args.get("other"))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or not dims[dim]:
        raise Refused(reason)
    result = list(resolve_dims(dims))
    axes, result[dim] = result[dim], ()
    if not value.args.get("keepdim"):
        del result[dim]
    return axes, tuple(result)


def summed_by_einsum(value: Value, dims: Dims) -> tuple[Group, Dims]:
    """`reduced` of an einsum of one operand."""
    given = value.args.get("equation"), value.args.get("operands", ())
    e = parsed(*given, lambda x: len(x.shape) if is_tensor(x) else None)
    reason = "their exponentials are not summed over one dimension"
    if e is None or len(e.operands) != 1:
        raise Refused(reason)
    (names,), kept = e.terms, e.out
    groups = dict(zip(names, resolve_dims(dims), strict=True))
    summed = groups.keys() - set(kept)
    if len(groups) < len(dims) or len(summed) != 1 or not groups.keys() >= set(kept):
        raise Refused(reason)
    (name,) = summed
    return groups[name], tuple(groups[x] for x in kept)


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
