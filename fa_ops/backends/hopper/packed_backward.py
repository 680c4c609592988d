"""The backward pass of packed sequences, by the dense kernels as in `packed`."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.hopper import dense_backward
from fa_ops.backends.hopper.launch import current_device, current_stream
from fa_ops.backends.hopper.packed import SequenceRanges, outside_sequences
from fa_ops.backends.hopper.problem import MISALIGNED, one_batch, tma_aligned
from fa_ops.call import PACKED, Call, PackedTensors, Run, Saved, general
from fa_ops.types import Gradients, Packing, Spec


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, packing: Packing, spec: Spec,
) -> Gradients:  # fmt: skip
    """All gradients of a packed call."""
    like = q, k, v
    q, k, v, grad_out, out = map(tma_aligned, (q, k, v, grad_out, out))
    call = Call(PACKED, q, k, v, spec, packing, saved=Saved(grad_out, grad_lse, out, lse))
    run = _prepare_aligned(call, tuple(map(dense_backward.written_strides, like)))
    grads = run(grad_out, grad_lse, q, k, v, out, lse, call.tensors)
    return Gradients(*dense_backward.laid_out_like(like, grads[:3]), *grads[3:])


def prepare(call: Call) -> Run:
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
        ranges.spec.key_ranges,
        sequences=ranges.sequences,
    )

    def run(grad_out, grad_lse, q, k, v, out, lse, tensors: PackedTensors) -> Gradients | tuple:
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | grad_out.data_ptr()
        if (addresses | out.data_ptr()) & MISALIGNED:
            return backward(grad_out, grad_lse, q, k, v, out, lse, *options.arguments_with(tensors))
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
