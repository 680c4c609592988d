"""One dropout rule for every backend, bit for bit: a hash of (seed, batch, head, query, key).

A weight at (b, h, i, j) is dropped when `hash32(seed, b * Hq + h, i, j) < floor(p * 2**32)`. The
hash is three rounds of a 32-bit avalanche finaliser (xor-shift, multiply);
`backends/triton/primitives.py` states the same three rounds in uint32.

Two of the rounds need no key. Their result, a word for each row, may take the place of the seed:
rows and keys may then be any part of a larger call.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_COLUMN_STEP = 0xC2B2AE35


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser, on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _row_hashes(seed: Tensor, batch_head: Tensor, rows: Tensor) -> Tensor:
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


def row_words(seed: Tensor, batch_head: Tensor, rows: Tensor) -> Tensor:
    """The words of rows, int32: what a call may be given in place of a seed."""
    return _signed(_row_hashes(seed, batch_head, rows))


def from_key(words: Tensor, first: int | Tensor) -> Tensor:
    """The words with which key `j` of a call is key `first + j` of the words' own."""
    return words + _signed(torch.as_tensor(first, device=words.device).long() * _COLUMN_STEP)


def words_of(seed: Tensor, B: int, Hq: int, Sq: int, first_batch: int = 0) -> Tensor:
    """The words (B, Hq, Sq) of a call, from its seed or as they were given.

    `first_batch` is the batch index of the first element.
    """
    if is_words(seed):
        return seed
    index = torch.arange(B * Hq, device=seed.device).view(B, Hq, 1) + first_batch * Hq
    return row_words(seed, index, torch.arange(Sq, device=seed.device))


def is_words(seed: Tensor | None) -> bool:
    """Whether a call's `dropout_seed` has a word for each row."""
    return seed is not None and seed.dtype == torch.int32


def keep_mask(seed: Tensor, batch_head: Tensor, rows: Tensor, cols: Tensor, p: float) -> Tensor:
    """Bool tensor, True where the weight survives. Index tensors broadcast against each other."""
    return kept(row_words(seed, batch_head, rows), cols, p)


def kept(words: Tensor, cols: Tensor, p: float) -> Tensor:
    """The same as `keep_mask`, from the words of rows.

    `_mix` of (word + column key) in wrapping int32, in place: five times faster than in int64.
    """
    x = words + _signed(cols.long() * _COLUMN_STEP)
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
