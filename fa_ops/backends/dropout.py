"""One dropout rule for every backend, bit for bit: a hash of (seed, batch, head, query, key).

A weight at (b, h, i, j) is dropped when `hash32(seed, b * Hq + h, i, j) < floor(p * 2**32)`. The
hash is three rounds of a 32-bit avalanche finaliser (xor-shift, multiply);
`backends/triton/primitives.py` states the same three rounds in uint32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser, on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def row_keys(seed: Tensor, batch_head: Tensor, rows: Tensor) -> Tensor:
    """Hash of everything but the key index, 32 bits in int64.

    Shapes broadcast; `batch_head` is b * Hq + h.
    """
    seed = seed.reshape(()).to(torch.int64)
    low, high = seed & _MASK, (seed >> 32) & _MASK
    stream = _mix(((batch_head.long() * 0x9E3779B9) + high) & _MASK) ^ low
    return _mix((stream + rows.long() * 0x85EBCA6B) & _MASK)


def seed_of_heads(seed: Tensor, first: int) -> Tensor:
    """The seed with which index `b * Hq + h` of a call is index `first + b * Hq + h` of `seed`'s.

    The index and the high half of the seed enter the hash as one sum.
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return (((high + first * 0x9E3779B9) & _MASK) << 32) | low


def keep_mask(seed: Tensor, batch_head: Tensor, rows: Tensor, cols: Tensor, p: float) -> Tensor:
    """Bool tensor, True where the weight survives. Index tensors broadcast against each other.

    `_mix` of (row key + column key) in wrapping int32, in place: five times faster than in int64.
    """
    x = _signed(row_keys(seed, batch_head, rows)) + _signed(cols.long() * 0xC2B2AE35)
    scratch = torch.empty_like(x)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=scratch)  # copies the sign, which the mask removes
        x.bitwise_xor_(scratch.bitwise_and_(_MASK >> shift)).mul_(factor)
    x.bitwise_xor_(-(2**31))  # unsigned order as signed order
    return x >= threshold(p) - 2**31


def _signed(x: Tensor) -> Tensor:
    """The low 32 bits as int32."""
    return (((x + 2**31) & _MASK) - 2**31).to(torch.int32)


def threshold(p: float) -> int:
    """The random 32-bit number below which a weight is dropped."""
    return min(int(p * 2**32), _MASK)
