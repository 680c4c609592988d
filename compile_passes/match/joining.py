"""Aligning what joins scores or weights from outside with their dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_passes.graph import layout
from compile_passes.graph.axes import Axis, Dims, broadcast_dims, is_one
from compile_passes.graph.constants import number
from compile_passes.graph.ir import Value
from compile_passes.match.match_state import Followed, Leaf


def other(value: Value, name: str) -> object:
    """The operand of a binary operation beside the one called `name`."""
    return value.args.get("other" if name == "input" else "input")


def join(value: Value, state: Followed, x: object) -> tuple[Leaf, Dims] | str:
    """x aligned with the scores, and their dims after broadcasting against it; or why not."""
    constant = number(x)
    if constant is not None:
        return Leaf(float(constant)), state.dims
    if not isinstance(x, Value):
        return "something unknown joins them"
    if not isinstance(x.tensor, Tensor):
        scalar = isinstance(x.tensor, (torch.SymFloat, torch.SymInt))
        return (Leaf(x), state.dims) if scalar else "something unknown joins them"
    if x in state.path:
        return "they are combined with themselves"
    dims = _grown(value.shape, x.shape, state.dims)
    # a mask that was expanded to the scores' shape joins as small as it was
    leaf = Leaf(*layout.peel(x, broadcast_dims(x.shape, dims), x.dtype, value))
    return leaf, dims


def uninverted(mask: object, when: bool = True) -> tuple[object, bool]:
    """A bool mask behind any inversions of it, and what it is where the mask is `when`."""
    while isinstance(mask, Value) and mask.op == "not":
        inner = mask.args.get("input")
        if not isinstance(inner, Value) or inner.dtype != torch.bool:
            break
        mask, when = inner, not when
    return mask, when


def _grown(shape: torch.Size, other: torch.Size, dims: Dims) -> Dims:
    """Dims of scores that broadcast against a tensor larger than they are."""
    dims = ((),) * (len(shape) - len(dims)) + dims
    big = (1,) * (len(shape) - len(other)) + tuple(other)
    return tuple(
        (Axis(n, "bias"),) if not g and not is_one(n) else g for g, n in zip(dims, big, strict=True)
    )
