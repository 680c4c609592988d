"""Rotary embedding as torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """x (B, H, S, D) with its first R features rotated by the angles of positions (B, S).

    cos and sin are (positions, R / 2). Features pair up as (0, 1), (2, 3), ... if `interleaved`,
    else as (0, R / 2), (1, R / 2 + 1), .... Computed in float32 (float64 for float64).
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (t[positions].to(wide).unsqueeze(1) for t in (cos, sin))
    R = 2 * cos.shape[-1]
    pairs, rest = x[..., :R].to(wide), x[..., R:]
    if interleaved:
        a, b = pairs.unflatten(-1, (R // 2, 2)).unbind(-1)
        pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = pairs.split(R // 2, -1) if R else (pairs, pairs)
        pairs = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((pairs.to(x.dtype), rest), -1)
