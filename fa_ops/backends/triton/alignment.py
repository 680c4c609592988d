"""Alignment of rows of 16-bit numbers to 16 bytes, by copies where needed.

Aligned rows are prefetched to shared memory in 16-byte copies. Others would take a load per number;
worse, K and V then share one buffer, and ptxas 12.8 may form the wgmma descriptor of one of them
from a register that it never wrote (fp16, D = 37, Dv = 16 on sm_90: wrong outputs or an
illegal address); `tests/compile_only` looks for registers that are read before they are written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_ops.backends.triton.arguments import Layout
from fa_ops.types import ALIGNMENT, Spec

UNITS = ALIGNMENT // 2  # numbers of 2 bytes


def needs_copies(layout: Layout, dtype: torch.dtype, D: int, Dv: int) -> bool:
    """Whether the kernels need copies of q, k and v."""
    return dtype.itemsize == 2 and (not layout.aligned or (D | Dv) % UNITS != 0)


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Pad rows with zeros to multiples of 16 bytes, by copies where needed."""
    return [_aligned(x) for x in tensors]


def _aligned(x: Tensor) -> Tensor:
    extra = -x.shape[-1] % UNITS
    if extra:
        return F.pad(x, (0, extra))
    if x.data_ptr() % ALIGNMENT == 0 and all(s % UNITS == 0 for s in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def scaled(spec: Spec, D: int) -> Spec:
    """The spec with an explicit scale: the default one of head dimension D if it has none."""
    return spec if spec.scale is not None else spec._replace(scale=D**-0.5)


def narrowed(x: Tensor, width: int) -> Tensor:
    """The first `width` columns of x, dense and in its order of dimensions."""
    return x if x.shape[-1] == width else x[..., :width].clone()


def restored(x: Tensor, like: Tensor) -> Tensor:
    """The first columns of x, with the shape and strides of torch.empty_like(like)."""
    return torch.empty_like(like).copy_(x[..., : like.shape[-1]])
