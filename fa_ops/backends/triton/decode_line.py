"""Which keys a decoding program reads: all tiles of all rows in one line, cut into stretches.

A row of the batch has a number of tiles of BLOCK_N keys, times its units (see `decode_kernels`),
row by row, unit by unit. All is found from lengths and ranges on the device.
"""

import triton
import triton.language as tl


@triton.jit
def run_of(ranges, ranges_stride, b, batch, length):
    """Keys [begin, end) of rows b of the batch, in `length` or fewer."""
    at = ranges + b * ranges_stride
    begin = tl.maximum(tl.load(at, mask=b < batch, other=0), 0)
    end = tl.minimum(tl.load(at + 1, mask=b < batch, other=0), length)
    return begin, tl.maximum(end, 0)


@triton.jit
def row_tiles(
    kv_lens, ranges, ranges_stride, b, batch, capacity, new, Sq, window_left,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(length, first tile, tiles) of rows b of the batch, a number or a vector; 0 beyond it."""
    length = capacity
    if kv_lens is not None:
        length = tl.minimum(tl.load(kv_lens + b, mask=b < batch, other=0), capacity) + new
        length = tl.minimum(tl.maximum(length, 0), capacity)
    length = tl.where(b < batch, length, 0)
    begin, end = length * 0, length
    if ranges is not None:
        begin, end = run_of(ranges, ranges_stride, b, batch, length)
    if window_left is not None:
        begin = tl.maximum(length - Sq - window_left, begin)
    first = begin // BLOCK_N
    return length, first, tl.maximum(tl.cdiv(end, BLOCK_N) - first, 0)


@triton.jit
def find_tile(
    kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, units, tile,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(row, tiles before it) of tile number `tile` of the line, and the line's length."""
    b, base, before = 0, 0, 0
    for chunk in range(0, batch, CHUNK):
        u = chunk + tl.arange(0, CHUNK)
        _, _, tiles = row_tiles(
            kv_lens, ranges, ranges_stride, u, batch, capacity, new, Sq, window_left, BLOCK_N
        )
        ends = before + tl.cumsum(tiles, 0) * units
        passed = (ends <= tile) & (u < batch)
        b += tl.sum(passed.to(tl.int32), 0)
        base = tl.maximum(base, tl.max(tl.where(passed, ends, 0), 0))
        before += tl.sum(tiles, 0) * units
    return b, base, before


@triton.jit
def tiles_before(
    kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, b,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tiles of one unit of the rows before b, and of all rows."""
    before, total = 0, 0
    for chunk in range(0, batch, CHUNK):
        u = chunk + tl.arange(0, CHUNK)
        _, _, tiles = row_tiles(
            kv_lens, ranges, ranges_stride, u, batch, capacity, new, Sq, window_left, BLOCK_N
        )
        before += tl.sum(tl.where(u < b, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    return before, total


@triton.jit
def stretch(pid, total, programs):
    """Tiles [first, last) of a program, as equal as can be; no more programs than tiles have any.

    `owner_of` is its inverse.
    """
    programs = tl.minimum(programs, tl.maximum(total, 1)).to(tl.int64)
    first = (pid * total.to(tl.int64)) // programs
    last = (pid + 1) * total.to(tl.int64) // programs
    idle = pid >= programs
    return tl.where(idle, total, first).to(tl.int32), tl.where(idle, 0, last).to(tl.int32)


@triton.jit
def owner_of(tile, total, programs):
    programs = tl.minimum(programs, tl.maximum(total, 1)).to(tl.int64)
    return (((tile.to(tl.int64) + 1) * programs - 1) // tl.maximum(total, 1)).to(tl.int32)
