"""Work ranges of decoding programs: the tiles of all sequences, divided equally (as in Stream-K).

A sequence has a number of tiles of BLOCK_N keys, times its units (see `decode_kernels`). All of it
is computed from lengths and key ranges on the device.
"""

import triton
import triton.language as tl


@triton.jit
def key_range(ranges, ranges_stride, b, batch, length):
    """Key range [begin, end) of sequences b, within their `length`."""
    at = ranges + b * ranges_stride
    begin = tl.maximum(tl.load(at, mask=b < batch, other=0), 0)
    end = tl.minimum(tl.load(at + 1, mask=b < batch, other=0), length)
    return begin, tl.maximum(end, 0)


@triton.jit
def row_tiles(
    kv_lens, ranges, ranges_stride, b, batch, capacity, new, Sq, window_left,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(length, first tile, tiles) of sequences b, a scalar or a vector; 0 beyond the batch."""
    length = capacity
    if kv_lens is not None:
        length = tl.minimum(tl.load(kv_lens + b, mask=b < batch, other=0), capacity) + new
        length = tl.minimum(tl.maximum(length, 0), capacity)
    length = tl.where(b < batch, length, 0)
    begin, end = length * 0, length
    if ranges is not None:
        begin, end = key_range(ranges, ranges_stride, b, batch, length)
    if window_left is not None:
        begin = tl.maximum(length - Sq - window_left, begin)
    first = begin // BLOCK_N
    return length, first, tl.maximum(tl.cdiv(end, BLOCK_N) - first, 0)


@triton.jit
def find_tile(
    kv_lens, ranges, ranges_stride, batch, capacity, new, Sq, window_left, units, tile,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(sequence, tiles before it) of tile number `tile`, and the number of all tiles."""
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
    """Tiles per unit of the sequences before b, and of all sequences."""
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
def work_range(pid, total, programs):
    """Tiles [first, last) of a program, divided equally over at most as many programs as tiles.

    `program_of_tile` is its inverse.
    """
    programs = tl.minimum(programs, tl.maximum(total, 1)).to(tl.int64)
    first = (pid * total.to(tl.int64)) // programs
    last = (pid + 1) * total.to(tl.int64) // programs
    idle = pid >= programs
    return tl.where(idle, total, first).to(tl.int32), tl.where(idle, 0, last).to(tl.int32)


@triton.jit
def program_of_tile(tile, total, programs):
    """The program whose `work_range` has the tile."""
    programs = tl.minimum(programs, tl.maximum(total, 1)).to(tl.int64)
    return (((tile.to(tl.int64) + 1) * programs - 1) // tl.maximum(total, 1)).to(tl.int32)
