"""`fa::mask_blocks`: the state of each tile of a mask, in one reading, then the lists of tiles.

The form of the lists is in `fa_ops.backends.mask_blocks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ops.backends.triton.launch import Launch, bind
from fa_ops.call.options import ALIGNMENT, MASK_BLOCK, mask_blocks_shape, mask_tiles

_BLOCK = tl.constexpr(MASK_BLOCK)
_EMPTY, _FULL, _MIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_STRIP = 32  # rows that a program reads at once
_CHUNK = 128  # tiles of a list that a program sees at once
_launches: dict[tuple, Launch] = {}


@triton.jit(do_not_specialize=["H", "rows", "columns"])
def tile_state_kernel(
    mask, states, stride_b: tl.int64, stride_h: tl.int64, stride_q: tl.int64, stride_k: tl.int64,
    H: tl.int32, rows: tl.int32, columns: tl.int32, STRIP: tl.constexpr,
):  # fmt: skip
    """The state of one tile: mask (B, H, rows, columns) by strides, states uint8 (B * H, m, n)."""
    pid = tl.program_id(0)
    m, n = tl.cdiv(rows, _BLOCK), tl.cdiv(columns, _BLOCK)
    column, row, head = pid % n, pid // n % m, (pid // n // m).to(tl.int64)
    mask += head // H * stride_b + head % H * stride_h
    j = column * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    some, every = tl.zeros([STRIP, _BLOCK], tl.int32), tl.full([STRIP, _BLOCK], 1, tl.int32)
    for begin in range(row * _BLOCK, tl.minimum((row + 1) * _BLOCK, rows), STRIP):
        i = begin + tl.arange(0, STRIP)[:, None]
        inside = (i < rows) & (j < columns)
        x = tl.load(mask + i.to(tl.int64) * stride_q + j.to(tl.int64) * stride_k, mask=inside)
        if mask.dtype.element_ty == tl.int1:
            kept, whole = x != 0, x != 0
        else:
            kept, whole = x != float("-inf"), x == 0.0
        some |= (kept & inside).to(tl.int32)
        every &= (whole | (inside == 0)).to(tl.int32)
    state = tl.where(tl.min(tl.min(every, 1), 0) > 0, _FULL, _MIXED)
    state = tl.where(tl.max(tl.max(some, 1), 0) > 0, state, _EMPTY)
    tl.store(states + pid, state.to(tl.uint8))


@triton.jit(do_not_specialize=["m", "n"])
def tile_list_kernel(states, blocks, m: tl.int32, n: tl.int32, CHUNK: tl.constexpr):
    """One list: of a row of tiles in the first m programs, then of a column; and of a head.

    states uint8 (B * H, m, n); blocks int32 (B * H, m * (n + 1) + n * (m + 1)), zeros.
    """
    line = tl.program_id(0) % (m + n)
    head = (tl.program_id(0) // (m + n)).to(tl.int64)
    states += head * m * n
    blocks += head * (m * (n + 1) + n * (m + 1))
    if line < m:
        states += line * n
        blocks += line * (n + 1)
        tiles, stride = n, 1
    else:
        states += line - m
        blocks += m * (n + 1) + (line - m) * (m + 1)
        tiles, stride = m, n
    count = 0
    for begin in range(0, tiles, CHUNK):
        tile = begin + tl.arange(0, CHUNK)
        state = tl.load(states + tile * stride, mask=tile < tiles, other=0)
        kept = (state != _EMPTY).to(tl.int32)
        place = count + tl.cumsum(kept, 0)  # the length is in place 0
        entry = 2 * tile + (state == _MIXED).to(tl.int32)
        tl.store(blocks + place, entry, mask=kept > 0)
        count += tl.sum(kept, 0)
    tl.store(blocks, count)


def mask_blocks(mask: Tensor) -> Tensor:
    """The lists (B, H, L) of a mask (B, H, rows, columns)."""
    B, H, m, n = mask_tiles(mask)
    states = torch.empty((B * H, m, n), dtype=torch.uint8, device=mask.device)
    blocks = torch.zeros(mask_blocks_shape(mask), dtype=torch.int32, device=mask.device)
    _read(mask, states)
    args = states, blocks, m, n
    key = (mask.device,)
    if key not in _launches:
        constants, options = {"CHUNK": _CHUNK}, {"num_warps": 4}
        _launches[key] = bind(tile_list_kernel, args, constants, options, device=mask.device)
    _launches[key]((B * H * (m + n), 1, 1), args)
    return blocks


def _read(mask: Tensor, states: Tensor) -> None:
    """Launch `tile_state_kernel`, compiled on first use for the mask's dtype and alignment."""
    *outer, step = mask.stride()
    unit = ALIGNMENT // mask.element_size()
    is_aligned = mask.data_ptr() % ALIGNMENT == 0 and not any(stride % unit for stride in outer)
    key = mask.device, mask.dtype, is_aligned, step == 1
    args = (mask, states, *outer, step, *mask.shape[1:])
    if key not in _launches:
        divisors = {"mask": ALIGNMENT, **{f"stride_{d}": unit for d in "bhq"}}
        _launches[key] = bind(
            tile_state_kernel, args, {"STRIP": _STRIP}, {"num_warps": 4}, device=mask.device,
            divisors=divisors if is_aligned else None, fixed=("stride_k",) if step == 1 else (),
        )  # fmt: skip
    _launches[key]((states.numel(), 1, 1), args)


# Device functions that walk the lists of `fa::mask_blocks`, in steps of a kernel's own blocks.
#
# A walk is (at, listed, last, begin, end): the address of a list, how many tiles the mask has in
# the list's dimension, the index of the last tile of the scores there, and the steps to take. Where
# the mask has a single tile, all tiles of the scores share it. What lists hold is clamped, so that
# no address is ever outside the tensors.

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
