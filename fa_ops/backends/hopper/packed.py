"""Packed sequences: the dense kernels over one long sequence, with a key range for each token.

A tile visits the keys from the first to the last one of its rows' ranges, so that the time depends
on the lengths of the sequences. A tile with rows of two sequences visits the keys of both and masks
them. A launch before the dense kernels writes the ranges: every head reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.hopper import backward as dense_backward
from fa_ops.backends.hopper import forward as dense_forward
from fa_ops.backends.hopper.kernel_plan import MISALIGNED, one_batch, tma_aligned, window_sides
from fa_ops.backends.hopper.runtime.launch import (
    Params,
    PreparedLaunch,
    current_device,
    current_stream,
    kernel,
)
from fa_ops.backends.hopper.runtime.structs import kernel_layout
from fa_ops.call.call import Call, Run, Saved
from fa_ops.call.call import general_of_groups as general
from fa_ops.call.options import Gradients, Operands, Packing, Spec, rows_are_aligned

_THREADS = 256
_PARAMS = kernel_layout("packed_ranges.cu", "packed_ranges")


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: Spec) -> tuple[Tensor, Tensor]:
    """out (Tq, Hq, Dv) and lse (Hq, Tq) of packed sequences."""
    call = Call.of(*map(tma_aligned, (q, k, v)), spec, packing)
    return _prepare_forward(call)(call.query, call.key, call.value, call.operands)


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
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            return forward(q, k, v, *options._replace(operands=tensors).arguments)
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

    def write(self, tensors: Operands, stream: int) -> tuple[Operands, tuple[int, int]]:
        """Launch: the optional tensors of the dense call, and the addresses of both cu_seqlens."""
        t, lens = tensors, tensors.kv_lens
        ends = t.cu_seqlens_q.data_ptr(), t.cu_seqlens_k.data_ptr()
        ranges = self.run(stream, *ends, 0 if lens is None else lens.data_ptr())
        return Operands(None, t.alibi_slopes, t.sinks, None, ranges, t.dropout_seed), ends


def outside_sequences(tokens: int, ends: Tensor) -> Tensor:
    """bool (tokens,): before the first sequence or after the last."""
    at = torch.arange(tokens, device=ends.device)
    return (at < ends[0]) | (at >= ends.max())


# The backward pass of packed sequences, by the dense kernels as in `packed`.


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, packing: Packing, spec: Spec,
) -> Gradients:  # fmt: skip
    """All gradients of a packed call."""
    like = q, k, v
    q, k, v, grad_out, out = map(tma_aligned, (q, k, v, grad_out, out))
    call = Call.of(q, k, v, spec, packing, saved=Saved(grad_out, grad_lse, out, lse))
    run = _prepare_aligned(call, tuple(map(dense_backward.written_strides, like)))
    grads = run(grad_out, grad_lse, q, k, v, out, lse, call.operands)
    return Gradients(*dense_backward.laid_out_like(like, grads[:3]), *grads[3:])


def prepare_backward(call: Call) -> Run:
    """A function that runs packed backward passes with the geometry of this one."""
    if dense_backward.needs_copies(call):
        return general("backward", backward).prepare(call)
    return _prepare_aligned(call, (call.query.stride(), call.key.stride(), call.value.stride()))


def _prepare_aligned(call: Call, grad_strides: tuple[tuple[int, ...], ...]) -> Run:
    """The same for tensors that TMA can read, with these strides of the gradients."""
    q, k, v, saved = call.query, call.key, call.value, call.saved
    ranges, options = SequenceRanges(call), call.without_tensors()
    device, has_sinks = q.device.index, call.spec.sinks is not None
    plan = dense_backward.plan_of(
        tuple(map(one_batch, (q, k, v, saved.grad_out, saved.out))),
        tuple(
            (len(t[0]) * heads, heads, tokens, last)
            for t, (tokens, heads, last) in zip((q, k, v), grad_strides)
        ),
        ranges.spec,
        sequences=ranges.sequences,
    )

    def run(grad_out, grad_lse, q, k, v, out, lse, tensors: Operands) -> Gradients | tuple:
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | grad_out.data_ptr()
        if (addresses | out.data_ptr()) & MISALIGNED:
            call = options._replace(operands=tensors)
            return backward(grad_out, grad_lse, q, k, v, out, lse, *call.arguments)
        if current_device() != device:
            with torch.cuda.device(device):
                return run(grad_out, grad_lse, q, k, v, out, lse, tensors)
        dense, ends = ranges.write(tensors, current_stream(device))
        dq, dk, dv, _, workspace = plan.run(
            grad_out, q, k, v, out, lse, grad_lse, dense, None, False, ends
        )
        if not has_sinks:
            return dq, dk, dv
        outside = outside_sequences(len(q), tensors.cu_seqlens_q)
        dsinks = dense_backward.sink_gradient(tensors.sinks, lse, plan, workspace, outside)
        return Gradients(dq, dk, dv, None, dsinks)

    return run
