"""Rows of 16-bit numbers that start at multiples of 16 bytes, by copies where they do not.

Such rows go to shared memory in 16-byte copies that run ahead of the products. Others would take a
load per number. Worse, K and V then share one buffer, and ptxas 12.8 may form the wgmma descriptor
of one of them from a register it never wrote (fp16, D = 37, Dv = 16 on sm_90: wrong outputs or an
illegal address); `tests/compile_only` looks for registers that are read before they are written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_ops.backends.triton.arguments import Layout
from fa_ops.types import Spec

UNITS = 8  # numbers in 16 bytes


def needs_copies(layout: Layout, dtype: torch.dtype, D: int, Dv: int) -> bool:
    """Whether the kernels do not take q, k and v as they are."""
    return dtype.itemsize == 2 and (not layout.aligned or (D | Dv) % UNITS != 0)


def aligned(*tensors: Tensor) -> list[Tensor]:
    """The tensors, with rows padded by zeros to multiples of 16 bytes; copies where needed."""
    return [_aligned(x) for x in tensors]


def _aligned(x: Tensor) -> Tensor:
    extra = -x.shape[-1] % UNITS
    if extra:
        return F.pad(x, (0, extra))
    if x.data_ptr() % 16 == 0 and all(s % UNITS == 0 for s in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def scaled(spec: Spec, D: int) -> Spec:
    """The spec with the scale that heads of width D have unless told."""
    return spec if spec.scale is not None else spec._replace(scale=D**-0.5)


def narrowed(x: Tensor, width: int) -> Tensor:
    """The first columns of x, dense and in its order of dimensions."""
    return x if x.shape[-1] == width else x[..., :width].clone()


def restored(x: Tensor, like: Tensor) -> Tensor:
    """The first columns of x, with the shape and strides of torch.empty_like(like)."""
    return torch.empty_like(like).copy_(x[..., : like.shape[-1]])
