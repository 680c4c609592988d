"""Tile tables of the backward kernels."""

from __future__ import annotations

import torch

from fa_ops.backends.triton.arguments import Class, padded
from fa_ops.backends.triton.configs import Tile


def query_tile(arch: int, dtype: torch.dtype, head_dim: int, kind: Class) -> Tile:
    """Tile of `query_grad_kernel` for the larger of D and Dv."""
    width = padded(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if width > 64 else Tile(64, 32, 4, 2)
    if width <= 64:
        return Tile(128, 64, 8, 3)
    if width == 128:
        return Tile(128, 64, 8, 3)
    return Tile(64, 64, 4, 2)


def key_value_tile(arch: int, dtype: torch.dtype, head_dim: int, kind: Class) -> Tile:
    """Tile of `key_value_grad_kernel` for the larger of D and Dv."""
    width = padded(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if width > 64 else Tile(32, 64, 4, 2)
    if width <= 64:
        return Tile(128, 64, 4, 2)
    if width == 128:
        return Tile(64, 64, 4, 2)
    return Tile(64, 32, 4, 2)


def mask_tile(arch: int, dtype: torch.dtype, head_dim: int) -> Tile:
    """Tile of `mask_grad_kernel`."""
    width = padded(head_dim) * dtype.itemsize
    side = 64 if width <= 256 else 32 if width <= 512 else 16
    return Tile(side, side, 4, 1)
