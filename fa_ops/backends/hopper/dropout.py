"""Dropout: a word for each query of each head, written before the kernels that drop.

A word is the part of the rule's hash (`backends/dropout.py`) that keys have no part in, so that a
weight costs two rounds of three; sequences of a packed batch need nothing else, as their places are
in it too.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fa_ops.backends import dropout
from fa_ops.backends.hopper.kernel_params import struct_layout
from fa_ops.backends.hopper.launch import (
    address,
    current_stream,
    kernel,
    on_device,
    pointers_to,
)
from fa_ops.types import Packing, Spec

_PARAMS = struct_layout("dropout.cuh", "Dropout").packer()
NO_PARAMETERS = bytes(_PARAMS.size)  # of calls without dropout
_COLUMN_STEP = 0xC2B2AE35
_THREADS = 256
_ROWS = 64  # the rows of a head are padded to a multiple


def row_seeds(q: Tensor, spec: Spec, packing: Packing | None = None) -> Tensor | None:
    """int32 (B * Hq, rows) of queries (B, Hq, Sq, D), rows from Sq on undefined; None without
    dropout. With a packing q is (1, Hq, Tq, D)."""
    if spec.dropout_p == 0.0:
        return None
    B, Hq, Sq, _ = q.shape
    seeds = torch.empty((B * Hq, padded_rows(Sq)), dtype=torch.int32, device=q.device)
    ends = (None, None) if packing is None else packing[:2]
    ends_q, ends_k = (None if t is None else t.contiguous() for t in ends)
    _launch(
        q.device,
        -(-seeds.numel() // _THREADS),
        *(ctypes.c_uint64(address(t)) for t in (spec.dropout_seed, ends_q, ends_k, seeds)),
        ctypes.c_int(0 if ends_q is None else len(ends_q) - 1),
        ctypes.c_int(Hq),
        *map(ctypes.c_uint32, (seeds.shape[1], seeds.numel())),
    )
    return seeds


def padded_rows(Sq: int) -> int:
    """The number of row seeds of a head."""
    return -(-Sq // _ROWS) * _ROWS


def scale(p: float) -> float:
    """The factor of weights that are kept."""
    return 1.0 / max(1.0 - p, 2.0**-32)


def parameters(seeds: Tensor, p: float) -> bytes:
    """The kernels' dropout parameters."""
    factor = scale(p)
    return _PARAMS.pack(
        seeds.data_ptr(), seeds.shape[1], dropout.threshold(p), factor, 1.0 / factor, _COLUMN_STEP
    )


def _launch(device: torch.device, ctas: int, *params: ctypes._CData) -> None:
    with on_device(device.index):
        stream = current_stream(device.index)
        entry = kernel("dropout", "row_seeds", device.index, _THREADS)
        entry.launch((ctas, 1), stream, pointers_to(*params))
