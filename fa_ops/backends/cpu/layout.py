"""Memory layouts and dtypes of the CPU engines."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, sums and lse: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype` with contiguous rows that do not overlap, except for broadcast rows.

    torch gives the result of an operation on overlapping rows another order of dimensions.
    """
    x = x.to(dtype)
    *sizes, width = x.shape
    *strides, last = x.stride()
    apart = all(stride >= width or stride == 0 or size == 1 for size, stride in zip(sizes, strides))
    return x if apart and (last == 1 or width == 1) else x.contiguous()


def longest_row(x: Tensor) -> Tensor:
    """The largest Euclidean norm of a row; not finite if x is not."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=accumulator(x.dtype)).amax()


def bshd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B, H, S, D) in `dtype`, laid out (B, S, H, D) in memory; x itself if it is already."""
    if x.dtype == dtype and x.transpose(1, 2).is_contiguous():
        return x
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=dtype).copy_(x)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised (B, Hq, Sq, Dv), laid out (B, Sq, Hq, Dv) in memory."""
    B, Hq, Sq, _ = q.shape
    return torch.empty_permuted((B, Hq, Sq, v.shape[3]), (0, 2, 1, 3), dtype=q.dtype)


def four_dims(mask: Tensor) -> Tensor:
    """View a mask that broadcasts to (B, Hq, Sq, Sk) with four dimensions."""
    return mask[(None,) * (4 - mask.dim())]
