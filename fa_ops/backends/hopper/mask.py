"""Bool masks as bits, packed once for each call, as many heads and blocks read them again.

A row has 2 bytes for 16 columns, in order, and is zero past its columns, with room for the last
block that a kernel reads. At its end stand 8 bytes, its run: int32s, the first column that it keeps
and the one after the last, so that kernels pass over blocks before and behind. What a mask shares
between batches, heads or rows its bits share.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper.launch import current_stream, kernel, on_device, pointers_to

_WIDEST_BLOCK = 128  # columns that a kernel reads at once; blocks start at multiples of their width
_QUERIES = 64  # queries of a block in the backward pass; one block serves all if they share a mask
_THREADS = 256
_MOST_HEADS = 65535  # limit of the grid's second dimension; a CTA loops over further heads


def bits_by_query(mask: Tensor, Sk: int) -> Tensor:
    """A mask (..., Sq|1, Sk|1) as uint8 (B|1, Hq|1, Sq|1, bytes): the keys of each query."""
    mask = without_repetition(mask)
    return _packed(mask.expand(*mask.shape[:3], Sk))


def layout_of_bits(mask: Tensor, Sk: int) -> Tensor:
    """A meta tensor with the layout of the result of `bits_by_query`."""
    shape = without_repetition(mask).shape[:3]
    return torch.empty((*shape, _row_bytes(Sk)), dtype=torch.uint8, device="meta")


def bits_by_key(mask: Tensor) -> Tensor:
    """A mask (..., Sq|1, Sk|1) as uint8 (B|1, Hq|1, Sk|1, bytes): the queries of each key.

    Where queries share the mask, its one block of 64 queries is every block.
    """
    mask = without_repetition(mask).mT
    return _packed(mask.expand(*mask.shape[:3], _QUERIES) if mask.shape[3] == 1 else mask)


def run_at(bits: Tensor) -> int:
    """Bytes from the start of a row to its run."""
    return bits.shape[-1] - 8


def queries_share(mask: Tensor) -> bool:
    """Whether `bits_by_key` has one block of queries."""
    return without_repetition(mask).shape[2] == 1


def _row_bytes(columns: int) -> int:
    return (columns + _WIDEST_BLOCK - 1 + 127) // 128 * 16 + 16


class Geometry(NamedTuple):
    """A launch of cuda/mask.cu: the kernel, its grid, and its arguments past the addresses.

    `sizes`: heads of a batch, heads of all batches, rows, columns, bytes of a row of bits.
    """

    kernel: str
    grid: tuple[int, int]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, mask: Tensor) -> Geometry:
        """The launch that packs a mask."""
        B, H, rows, columns = mask.shape
        strides, pitch = mask.stride(), _row_bytes(columns)
        used = (stride for size, stride in zip(mask.shape[:3], strides) if size > 1)
        if strides[3] == 1 and not any(x % 16 for x in (mask.data_ptr(), *used)):
            kernel, ctas = "pack_rows", -(-rows * (pitch // 2) // _THREADS)
        else:
            kernel, ctas = "pack_words", pitch // 8 * -(-rows // 128)
        sizes = H, B * H, rows, columns, pitch
        return cls(kernel, (ctas, min(B * H, _MOST_HEADS)), strides, sizes)


def without_repetition(mask: Tensor) -> Tensor:
    """The mask with four dimensions; expanded dimensions have one element."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim, stride in enumerate(mask.stride()):
        mask = mask if stride else mask.narrow(dim, 0, 1)
    return mask


def _packed(mask: Tensor) -> Tensor:
    name, grid, steps, sizes = Geometry.of(mask)
    *_, all_heads, rows, _, pitch = sizes
    bits = mask.new_empty((*mask.shape[:3], pitch), dtype=torch.uint8)
    where, to = (ctypes.c_uint64(t.data_ptr()) for t in (mask, bits))
    numbers = map(ctypes.c_int, sizes)
    _launch(mask.device, name, grid, where, to, (ctypes.c_int64 * 4)(*steps), *numbers)
    numbers = ctypes.c_int(rows * all_heads), ctypes.c_int(pitch)
    _launch(mask.device, "find_ranges", (-(-rows * all_heads // 8), 1), to, *numbers)
    return bits


def _launch(device: torch.device, name: str, grid: tuple[int, int], *params: ctypes._CData) -> None:
    with on_device(device.index):
        stream = current_stream(device.index)
        entry = kernel("mask", name, device.index, _THREADS)
        entry.launch(grid, stream, pointers_to(*params))
