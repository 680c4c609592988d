"""Packed sequences: the dense kernels over one long sequence, with a key range for each token.

A tile visits the keys from the first to the last one of its rows' ranges, so that the time depends
on the lengths of the sequences. A tile with rows of two sequences visits the keys of both and masks
them. A launch before the dense kernels writes the ranges: every head reads them, and a search of
cu_seqlens for each row would take longer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.hopper import dense_forward
from fa_ops.backends.hopper.kernel_params import kernel_layout
from fa_ops.backends.hopper.launch import (
    Params,
    PreparedLaunch,
    current_device,
    current_stream,
    kernel,
)
from fa_ops.backends.hopper.problem import MISALIGNED, one_batch, tma_aligned, window_sides
from fa_ops.call import PACKED, Call, PackedTensors, Run, general
from fa_ops.geometry import rows_are_aligned
from fa_ops.types import DenseTensors, Packing, Spec

_THREADS = 256
_PARAMS = kernel_layout("packed_ranges.cu", "packed_ranges")


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (Tq, Hq, Dv) and lse (Hq, Tq) of packed sequences."""
    call = Call(PACKED, *map(tma_aligned, (q, k, v)), spec, packing)
    return _prepare_forward(call)(call.query, call.key, call.value, call.tensors)


def prepare(call: Call) -> Run:
    """A function that runs packed calls with the geometry of this one."""
    if rows_are_aligned(call.query, call.key, call.value):
        return _prepare_forward(call)
    return general("forward", forward).prepare(call)


def _prepare_forward(call: Call) -> Run:
    """The same for tensors that TMA can read."""
    q, k, v = call.query, call.key, call.value
    ranges, options = SequenceRanges(call), call.without_tensors()
    device, has_sinks = q.device.index, call.spec.sinks is not None
    plan = dense_forward.plan_of(
        *map(one_batch, (q, k, v)), ranges.spec, sequences=ranges.sequences
    )

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: PackedTensors, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            return forward(q, k, v, *options.arguments_with(tensors))
        if current_device() != device:
            with torch.cuda.device(device):
                return run(q, k, v, tensors, with_lse)
        dense, ends = ranges.write(tensors, current_stream(device))
        if has_sinks:
            dense = dense_forward.as_kernel_inputs(dense)
        out, lse = plan.run(q, k, v, with_lse, dense, None, None, ends)
        if has_sinks and with_lse:  # tokens outside every sequence have no sink
            lse.masked_fill_(outside_sequences(len(q), tensors.cu_seqlens_q), float("-inf"))
        return out, lse

    return run


class SequenceRanges(PreparedLaunch):
    """Writes the sequences' bounds, causality and window as key ranges (1, 1, Tq, 2).

    With ALiBi positions follow, those of queries and, for a backward pass, of keys. `spec` are the
    options of the dense call with such ranges.
    """

    def __init__(self, call: Call) -> None:
        q, spec = call.query, call.spec
        tokens, keys, device = len(q), len(call.key), q.device.index
        self.sequences = len(call.packing.cu_seqlens_q) - 1
        slopes = spec.alibi_slopes if self.sequences else None
        positions = 0 if slopes is None else tokens + (keys if call.saved else 0)
        left, right, _ = window_sides(spec.is_causal, spec.window_left, spec.window_right)
        sizes = self.sequences, tokens, keys, left, right, positions
        super().__init__(
            kernel("packed", "packed_ranges", device, _THREADS),
            (-(-max(tokens, positions) // _THREADS), 1),
            Params.of(_PARAMS, "sequences", sizes),
            ((1, 1, tokens + positions, 2), (0, 0, 2, 1), torch.int32),
        )
        self.spec = spec._replace(
            is_causal=False, window_left=-1, window_right=-1, kv_lens=None, alibi_slopes=slopes,
            key_ranges=torch.empty(1, 1, tokens, 2, dtype=torch.int32, device="meta"),
        )  # fmt: skip

    def write(self, tensors: PackedTensors, stream: int) -> tuple[DenseTensors, tuple[int, int]]:
        """Launch: the optional tensors of the dense call, and the addresses of both cu_seqlens."""
        ends_q, ends_k, slopes, sinks, lens, seed = tensors
        ends = ends_q.data_ptr(), ends_k.data_ptr()
        ranges = self.run(stream, *ends, 0 if lens is None else lens.data_ptr())
        return DenseTensors(None, slopes, sinks, None, ranges, seed), ends


def outside_sequences(tokens: int, ends: Tensor) -> Tensor:
    """bool (tokens,): before the first sequence or after the last."""
    at = torch.arange(tokens, device=ends.device)
    return (at < ends[0]) | (at >= ends.max())
