"""Device functions that walk the lists of `fa::mask_blocks`, in steps of a kernel's own blocks.

A walk is (at, listed, last, begin, end): the address of a list, how many tiles the mask has in the
list's dimension, the index of the last tile of the scores there, and the steps to take. Where the
mask has a single tile, all tiles of the scores share it. What lists hold is clamped, so that no
address is ever outside the tensors.
"""

import triton
import triton.language as tl

from fa_ops.types import MASK_BLOCK

TILE = tl.constexpr(MASK_BLOCK)


@triton.jit
def walk_keys(blocks, rows, columns, m0, Sk, low, high, BOUNDED: tl.constexpr, BLOCK: tl.constexpr):
    """A walk over the keys that queries from m0 on may attend, in blocks of BLOCK keys.

    blocks: the lists of a batch and head; rows, columns: tiles of the mask along queries, keys.
    BOUNDED: whether only keys [low, high) are attended.
    """
    line = tl.minimum(m0 // TILE, rows - 1)
    at = blocks + tl.cast(line, tl.int64) * (columns + 1)
    return _walk(at, columns, Sk, low, high, BOUNDED, BLOCK)


@triton.jit
def walk_queries(
    blocks, rows, columns, n0, Sq, low, high, BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):
    """A walk over the queries that may attend keys from n0 on, in blocks of BLOCK queries."""
    line = tl.minimum(n0 // TILE, columns - 1)
    at = blocks + tl.cast(rows, tl.int64) * (columns + 1) + tl.cast(line, tl.int64) * (rows + 1)
    return _walk(at, rows, Sq, low, high, BOUNDED, BLOCK)


@triton.jit
def _walk(at, listed, length, low, high, BOUNDED: tl.constexpr, BLOCK: tl.constexpr):
    SPLIT: tl.constexpr = TILE // BLOCK
    total = tl.cdiv(length, TILE)
    begin, end = 0, tl.minimum(tl.maximum(tl.load(at), 0), listed)
    at += 1
    end = tl.where((listed == 1) & (end > 0), total, end)
    if BOUNDED:
        begin, end = _part(at, listed, end, low, high)
    return at, listed, total - 1, begin * SPLIT, end * SPLIT


@triton.jit
def _part(at, listed, count, low, high):
    """(begin, end): the tiles of a list that overlap the positions [low, high)."""
    CHUNK: tl.constexpr = 128
    begin, end = 0, 0
    for start in range(0, count, CHUNK):
        t = start + tl.arange(0, CHUNK)
        entry = tl.load(at + tl.minimum(t, listed - 1))
        index = tl.where(listed == 1, t, entry >> 1)
        begin += tl.sum(((t < count) & (index < low // TILE)).to(tl.int32), 0)
        end += tl.sum(((t < count) & (index < tl.cdiv(high, TILE))).to(tl.int32), 0)
    return begin, end


@triton.jit
def block_of_step(at, listed, last, step, BLOCK: tl.constexpr):
    """(first position, whether the mask must be read there) of the block that a step visits."""
    SPLIT: tl.constexpr = TILE // BLOCK
    t = step // SPLIT
    entry = tl.load(at + tl.minimum(t, listed - 1))
    index = tl.minimum(tl.maximum(tl.where(listed == 1, t, entry >> 1), 0), last)
    return index * TILE + (step - t * SPLIT) * BLOCK, (entry & 1) > 0
