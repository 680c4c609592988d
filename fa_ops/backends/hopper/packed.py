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
from fa_ops.call.call import Call, Run, general, rows_are_aligned
from fa_ops.call.options import Gradients, Operands

_THREADS = 256
_PARAMS = kernel_layout("packed_ranges.cu", "packed_ranges")


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out (Tq, Hq, Dv) and lse (Hq, Tq) of packed sequences."""
    q, k, v = map(tma_aligned, call[:3])
    return _prepare_forward(call._replace(query=q, key=k, value=v))(q, k, v, call.operands)


def prepare(call: Call) -> Run:
    """A function that runs packed calls with the geometry of this one."""
    if rows_are_aligned(call.query, call.key, call.value):
        return _prepare_forward(call)
    return general("forward", forward).prepare(call)


def _prepare_forward(call: Call) -> Run:
    """The same for tensors that TMA can read."""
    ranges, options = SequenceRanges(call), call.without_tensors()
    device, has_sinks = call.query.device.index, call.operands.sinks is not None
    plan = dense_forward.plan_of(dense_call(call), sequences=ranges.sequences)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: Operands, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            return forward(options._replace(query=q, key=k, value=v, operands=tensors))
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

    With ALiBi positions follow, those of queries and, for a backward pass, of keys.
    """

    def __init__(self, call: Call) -> None:
        q, t, o = call.query, call.operands, call.options
        tokens, keys, device = len(q), len(call.key), q.device.index
        self.sequences = len(t.cu_seqlens_q) - 1
        has_slopes = t.alibi_slopes is not None and self.sequences
        positions = tokens + (keys if call.saved else 0) if has_slopes else 0
        left, right, _ = window_sides(o.is_causal, o.window_left, o.window_right)
        sizes = self.sequences, tokens, keys, left, right, positions
        super().__init__(
            kernel("packed", "packed_ranges", device, _THREADS),
            (-(-max(tokens, positions) // _THREADS), 1),
            Params.of(_PARAMS, "sequences", sizes),
            ((1, 1, tokens + positions, 2), (0, 0, 2, 1), torch.int32),
        )

    def write(self, tensors: Operands, stream: int) -> tuple[Operands, tuple[int, int]]:
        """Launch: the optional tensors of the dense call, and the addresses of both cu_seqlens."""
        t, lens = tensors, tensors.kv_lens
        ends = t.cu_seqlens_q.data_ptr(), t.cu_seqlens_k.data_ptr()
        ranges = self.run(stream, *ends, 0 if lens is None else lens.data_ptr())
        return Operands(None, t.alibi_slopes, t.sinks, None, ranges, t.dropout_seed), ends


def dense_call(call: Call) -> Call:
    """The call over one sequence of all tokens with a key range for each, which has no memory."""
    t, tokens = call.operands, len(call.query)
    ranges = torch.empty(1, 1, tokens, 2, dtype=torch.int32, device="meta")
    slopes = t.alibi_slopes if len(t.cu_seqlens_q) > 1 else None
    operands = Operands(None, slopes, t.sinks, None, ranges, t.dropout_seed)
    options = call.options._replace(is_causal=False, window_left=-1, window_right=-1)
    saved = call.saved
    if saved is not None:
        grad_out, out = one_batch(saved.grad_out), one_batch(saved.out)
        saved = saved._replace(grad_out=grad_out, out=out)
    return Call(*map(one_batch, call[:3]), operands, options, saved)


def outside_sequences(tokens: int, ends: Tensor) -> Tensor:
    """bool (tokens,): before the first sequence or after the last."""
    at = torch.arange(tokens, device=ends.device)
    return (at < ends[0]) | (at >= ends.max())


# The backward pass of packed sequences, by the dense kernels as in `packed`.


def backward(call: Call) -> Gradients:
    """All gradients of a packed call."""
    like, (grad_out, grad_lse, out, lse, _) = call[:3], call.saved
    q, k, v, grad_out, out = map(tma_aligned, (*like, grad_out, out))
    saved = call.saved._replace(grad_out=grad_out, out=out)
    call = call._replace(query=q, key=k, value=v, saved=saved)
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
    ranges, in_general = SequenceRanges(call), general("backward", backward).prepare(call)
    device, has_sinks = call.query.device.index, call.operands.sinks is not None
    strides = [
        (t.shape[1] * heads, heads, tokens, last)
        for t, (tokens, heads, last) in zip(call[:3], grad_strides)
    ]
    plan = dense_backward.plan_of(dense_call(call), tuple(strides), sequences=ranges.sequences)

    def run(grad_out, grad_lse, q, k, v, out, lse, tensors: Operands) -> Gradients | tuple:
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | grad_out.data_ptr()
        if (addresses | out.data_ptr()) & MISALIGNED:
            return in_general(grad_out, grad_lse, q, k, v, out, lse, tensors)
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
