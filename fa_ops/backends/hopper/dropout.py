"""Dropout: a word for each query of each head, written or copied before the kernels that drop.

A word is the part of the rule's hash (`backends/dropout.py`) that does not depend on the key, so
that kernels compute two of the three rounds for each weight. It depends on the row's batch, head
and position, so that kernels need nothing else for packed sequences.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.backends.hopper.kernel_params import kernel_layout, struct_layout
from fa_ops.backends.hopper.launch import Params, PreparedLaunch, kernel

_PARAMS = struct_layout("dropout.cuh", "Dropout").packer()
_ROW_SEEDS = kernel_layout("dropout.cu", "row_seeds")
_COLUMN_STEP = 0xC2B2AE35
_THREADS = 256
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
            kernel("dropout", "row_seeds", device, _THREADS),
            (-(-count // _THREADS), 1),
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
