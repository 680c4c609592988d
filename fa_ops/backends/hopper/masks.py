"""Masks as the Hopper kernels read them: bool masks as bits, float masks by TMA, lists of tiles.

A bool mask is packed once for each call, as many heads and blocks read it again. A row has 2 bytes
for 16 columns, in order, and is zero past its columns, with room for the last block that a kernel
reads. Its last 8 bytes are its key range: int32s, the first column that it keeps and the one after
the last, so that kernels skip the blocks before and after it. Batches, heads, queries or keys that
share a part of a mask read the same memory. A float mask is read in place where TMA can read it,
else copied; nothing is repeated except one block of the queries or keys that share it.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.backends.hopper.kernel_plan import Geometry
from fa_ops.backends.hopper.runtime.launch import (
    Params,
    PreparedLaunch,
    TensorMap,
    address,
    kernel,
)
from fa_ops.backends.hopper.runtime.structs import ParamsLayout, kernel_layout, struct_layout
from fa_ops.call.call import rows_are_aligned
from fa_ops.call.options import ALIGNMENT, Operands, mask_tiles

_WIDEST_BLOCK = 128  # columns that a kernel reads at once; blocks start at multiples of their width
_QUERIES = 64  # queries of a block in the backward pass; one block serves all if they share a mask
_THREADS = 512  # those of cuda/mask.cu, as are the columns of a warp's step and rows of a CTA
_STEP_COLUMNS = 1024
_CTA_ROWS = 32
_MAX_GRID_HEADS = 65535  # limit of the grid's second dimension; a CTA loops over further heads

_LAYOUT = struct_layout("mask.cu", "MaskParams")
_ADDRESSES, _SIZES = _LAYOUT.packer("mask", "bits"), _LAYOUT.packer("b")


class MaskLayout(NamedTuple):
    """Shape and strides of a mask (B, H, Sq, Sk); dimensions that are shared have 1 and 0."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, mask: Tensor) -> MaskLayout:
        """The layout of a mask of up to four dimensions."""
        pairs = [
            (size, stride) if size > 1 and stride else (1, 0)
            for size, stride in zip(mask.shape, mask.stride())
        ]
        return cls(*zip(*[(1, 0)] * (4 - len(pairs)), *pairs))

    @property
    def queries_share(self) -> bool:
        """Whether all queries have the same keys."""
        return self.shape[2] == 1


class MaskPacker(PreparedLaunch):
    """Packs masks of one layout to bits, uint8 in one dimension, by one launch of cuda/mask.cu.

    `bits_layout` is what kernels need to read them: byte strides of batches, heads and rows, 0
    where they are shared, and the offset of the key range in a row.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], device: int) -> None:
        B, H, rows, columns = shape
        pitch = _row_bytes(columns)
        warps = 1
        if 0 < strides[2] < strides[3]:
            name, cta_rows = "pack_columns", _CTA_ROWS
        else:
            steps = -(-(pitch - 8) * 8 // _STEP_COLUMNS)
            warps = min(1 << (steps - 1).bit_length(), _THREADS // 32)
            name, cta_rows = "pack_rows", _THREADS // 32 // warps
        sizes = _SIZES.pack(*strides, H, B * H, rows, columns, pitch, warps)
        super().__init__(
            kernel("mask", name, device, _THREADS),
            (-(-rows // cta_rows), min(B * H, _MAX_GRID_HEADS)),
            Params(_ADDRESSES, sizes),
            ((B * H * rows * pitch,), (1,), torch.uint8),
        )
        self.bits_layout = (
            H * rows * pitch * (B > 1), rows * pitch * (H > 1), pitch * (rows > 1), pitch - 8,
        )  # fmt: skip

    @classmethod
    def by_query(cls, layout: MaskLayout, Sk: int, device: int) -> MaskPacker:
        """Bits (B|1, H|1, Sq|1, Sk): the keys of each query."""
        return cls((*layout.shape[:3], Sk), layout.strides, device)

    @classmethod
    def by_key(cls, layout: MaskLayout, device: int) -> MaskPacker:
        """Bits (B|1, H|1, Sk|1, Sq): the queries of each key.

        Where queries share the mask, its one block of 64 queries is every block.
        """
        (B, H, Sq, Sk), (b, h, query, key) = layout
        return cls((B, H, Sk, _QUERIES if layout.queries_share else Sq), (b, h, key, query), device)


def _row_bytes(columns: int) -> int:
    return (columns + _WIDEST_BLOCK - 1 + 127) // 128 * 16 + 16


# Float masks, which are added to the scores: read in place where TMA can read them, else copied.
#
# Batches, heads, queries or keys that share a part of the mask read the same memory; nothing is
# repeated except one block of the queries or keys that share it.

ROWS, _COLUMNS = 64, 128  # of the widest tile that a kernel reads at once
_BIAS = struct_layout("masks.cuh", "Bias")
_FIELDS = _BIAS.packer("data")  # behind the tensor map


def bits_of(mask: Tensor | None) -> int:
    """Bits of an element of a float mask; 0 without a float mask."""
    return 0 if mask is None or mask.dtype == torch.bool else mask.element_size() * 8


class Bias(NamedTuple):
    """The layout of a float mask as kernels read it; its address is an argument of `packed`."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # 1 in batches and heads that share it; one block of queries or keys
    strides: tuple[int, ...]
    steps: tuple[int, int, int, int]  # 0 where a dimension is shared, else 1
    last_column: int  # where the last pair of a row begins
    blocks: BlockLists | None = None

    @classmethod
    def of(cls, mask: Tensor, blocks: Tensor | None = None) -> tuple[Bias, Tensor]:
        """The layout, and the tensor that has it."""
        layout = None if blocks is None else BlockLists.of(mask, blocks)
        mask = _without_repetition(mask)
        steps = tuple(int(size > 1) for size in mask.shape)
        B, H, rows, columns = mask.shape
        held = mask.expand(B, H, ROWS if rows == 1 else rows, _COLUMNS if columns == 1 else columns)
        if not rows_are_aligned(held):
            held = _copied(held)
        last = (held.shape[3] - 1) // 2 * 2
        return cls(held.dtype, tuple(held.shape), held.stride(), steps, last, layout), held

    def map(self) -> TensorMap:
        """The tensor map of the mask."""
        return TensorMap(self.dtype, self.shape, self.strides, ROWS)

    def packed(self, tensor_map: TensorMap, address: int, blocks: int = 0, *, unit: float) -> bytes:
        """struct Bias: of mask and blocks the addresses; `unit` is the accumulators', in scores."""
        size = self.dtype.itemsize
        at = (s * size * step for s, step in zip(self.strides[:3], self.steps))
        fields = _FIELDS.pack(
            address, *at, *self.steps, self.last_column, unit, blocks,
            *(self.blocks or (0, 0, 0, 0)),
        )  # fmt: skip
        return tensor_map[address] + fields


def _without_repetition(mask: Tensor) -> Tensor:
    """The mask with four dimensions; expanded dimensions have one element."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim, stride in enumerate(mask.stride()):
        mask = mask if stride else mask.narrow(dim, 0, 1)
    return mask


def _copied(t: Tensor) -> Tensor:
    """A copy with aligned rows."""
    *outer, columns = t.shape
    unit = ALIGNMENT // t.element_size()
    return t.new_empty((*outer, -(-columns // unit) * unit))[..., :columns].copy_(t)


# `mask_blocks` as kernels read them: struct MaskBlocks of cuda/masks.cuh.


class BlockLists(NamedTuple):
    """The layout of a mask's lists, without their address."""

    b: int  # byte strides of batches and heads, 0 where they share the lists
    h: int
    tile_rows: int  # of the mask, along queries
    tile_columns: int

    @classmethod
    def of(cls, mask: Tensor, blocks: Tensor) -> BlockLists:
        """The layout of `mask_blocks` of a mask."""
        (B, H, _), (b, h, _) = blocks.shape, blocks.stride()
        return cls(4 * b * (B > 1), 4 * h * (H > 1), *mask_tiles(mask)[2:])


def skipped_lists(tensors: Operands) -> BlockLists | None:
    """The lists by which the kernels of a call skip tiles, or None without `mask_blocks`."""
    if tensors.mask_blocks is None:
        return None
    return BlockLists.of(tensors.attn_mask, tensors.mask_blocks)


def program_inputs(tensors: Operands) -> Operands:
    """The tensors of a program as kernels read them: contiguous, so that pairs are aligned."""
    changed = {}
    for name in ("term_values", "term_indices", "tile_runs"):
        t = getattr(tensors, name)
        if t is not None and (t.data_ptr() & 7 or not t.is_contiguous()):
            changed[name] = t.clone(memory_format=torch.contiguous_format)
    return tensors._replace(**changed) if changed else tensors


# Dropout: a word for each query of each head, written or copied before the kernels that drop.
#
# A word is the part of the rule's hash (`backends/dropout.py`) that does not depend on the key, so
# that kernels compute two of the three rounds for each weight. It depends on the row's batch, head
# and position, so that kernels need nothing else for packed sequences.

_PARAMS = struct_layout("dropout.cuh", "Dropout").packer()
_ROW_SEEDS = kernel_layout("dropout.cu", "row_seeds")
_COLUMN_STEP = 0xC2B2AE35
_WORD_THREADS = 256
_ROWS = 64  # the rows of a head are padded to a multiple


class RowSeeds(PreparedLaunch):
    """Writes a word for each row of queries (B, Hq, Sq, D), by one launch of cuda/dropout.cu.

    The result is int32 (B * Hq, rows), rows from Sq on undefined. Inputs are the seed, and of a
    packed batch of `sequences`, whose B is 1, cu_seqlens_q and cu_seqlens_k, else two nulls.
    """

    def __init__(self, B: int, Hq: int, Sq: int, device: int, sequences: int | None = None) -> None:
        rows = -(-Sq // _ROWS) * _ROWS
        count = B * Hq * rows
        super().__init__(
            kernel("dropout", "row_seeds", device, _WORD_THREADS),
            (-(-count // _WORD_THREADS), 1),
            Params.of(_ROW_SEEDS, "sequences", (sequences or 0, Hq, rows, count)),
            ((B * Hq, rows), (rows, 1), torch.int32),
        )


def words_of_rows(
    kernel: RowSeeds, seed: Tensor, cu_seqlens: tuple[int, int], stream: int
) -> Tensor:
    """The words that a kernel writes from a seed, or the given words (B, Hq, Sq) with rows added.

    The result is that of `RowSeeds`; the backward kernels copy it by bulk loads, 64 rows at a time.
    """
    if seed.dtype != torch.int32:
        return kernel.run(stream, seed.data_ptr(), *cu_seqlens)
    B, Hq, Sq = seed.shape
    words = seed.new_empty(B, Hq, -(-Sq // _ROWS) * _ROWS)
    words[..., :Sq] = seed
    return words.view(B * Hq, -1)


def scale(p: float) -> float:
    """The factor of weights that are kept."""
    return 1.0 / max(1.0 - p, 2.0**-32)


def write_parameters(params: ctypes.Array, at: int, seeds: Tensor, p: float) -> None:
    """Write struct Dropout of cuda/dropout.cuh at an offset."""
    factor = scale(p)
    _PARAMS.pack_into(
        params, at, seeds.data_ptr(), seeds.shape[1], dropout.threshold(p), factor, 1.0 / factor,
        _COLUMN_STEP,
    )  # fmt: skip


# Options that few calls have, in the parameters of the dense kernels.

_LISTS = struct_layout("masks.cuh", "MaskBlocks").packer()
_ADDRESS = struct_layout("backward_tiles.cuh", "BackwardParams").packer("positions", "positions")


class RareOptions:
    """Writes the parameters of dropout, a float mask, lists of tiles, and packed ALiBi."""

    def __init__(self, g: Geometry, layout: ParamsLayout) -> None:
        (B, Hq, Sq, _), fields = g.shapes[0], layout.fields
        self._p, self._lists = g.dropout_p, None if g.bias else g.lists
        self._seeds = RowSeeds(B, Hq, Sq, g.device, g.sequences) if g.dropout_p > 0 else None
        self._positions = 8 * Sq if g.alibi == 2 else None  # behind the ranges, in bytes
        self._bias, self._map, self._unit = g.bias, g.bias and g.bias.map(), g.units.accumulator
        self._dropout_at, self._positions_at, self._bias_at = (
            fields[name].offset for name in ("dropout", "positions", "bias")
        )
        in_bias = self._bias_at + _BIAS.fields["blocks"].offset
        self._lists_at = fields["blocks"].offset if "blocks" in fields else in_bias

    @classmethod
    def of(cls, g: Geometry, layout: ParamsLayout) -> RareOptions | None:
        """Those of a call, by the layout of its kernels' parameters, or None."""
        has_slopes = g.slopes is not None and g.alibi == 2
        is_given = g.dropout_p > 0 or g.bias or g.lists or has_slopes
        return cls(g, layout) if is_given else None

    def write(
        self, params: ctypes.Array, tensors: Operands, bias: Tensor | None,
        cu_seqlens: tuple[int, int], stream: int,
    ) -> Tensor | None:  # fmt: skip
        """Write into the parameters of a call; returns what those of dropout point to.

        `cu_seqlens`: addresses, of a packed batch.
        """
        seeds = None
        if self._seeds is not None:
            seeds = words_of_rows(self._seeds, tensors.dropout_seed, cu_seqlens, stream)
            write_parameters(params, self._dropout_at, seeds, self._p)
        if self._positions is not None:
            at = tensors.key_ranges.data_ptr() + self._positions
            _ADDRESS.pack_into(params, self._positions_at, at)
        if bias is not None:
            packed = self._bias.packed(
                self._map, bias.data_ptr(), address(tensors.mask_blocks), unit=self._unit
            )
            params[self._bias_at : self._bias_at + len(packed)] = packed
        if self._lists is not None:
            _LISTS.pack_into(params, self._lists_at, address(tensors.mask_blocks), *self._lists)
        return seeds
