"""fa::attention_averaging_rows: attention with rows whose keys are all hidden by finite numbers.

Beside a mask of -1e9 or finfo.min scores vanish: such a row averages its keys, and yet its gradient
reaches every score. The forward pass is one call with a query of 0 in these rows. So is the
backward pass, but for the gradients that query and key get through their product: these come from a
second pass over these rows alone, with key ranges that are empty elsewhere. It multiplies the
scores by so small a T that the weights are those of the average, and divides the gradients by T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.call import Call
from fa_ops.call.options import Operands
from fa_ops.ops import autograd, dense, library

OPERATOR = torch.ops.fa.attention_averaging_rows.default
TEMPERATURE = 2.0**-50  # a power of two; the weights' relative error is T times the scores


def _check(call: Call, rows: Tensor, filled: Tensor | None, share: float) -> None:
    """Raise ValueError or TypeError unless the arguments make a legal call."""
    q, k = call.query, call.key
    checks.dense(call)
    checks.need(math.isfinite(share), "grad_share must be finite, got {}", share)
    B, Hq, Sq, _ = q.shape
    checks.integers(q, "averaging_rows", rows, torch.bool)
    _broadcasts("averaging_rows", rows, "(B, Hq, Sq)", (B, Hq, Sq))
    if filled is not None:
        checks.integers(q, "filled_keys", filled, torch.bool)
        _broadcasts("filled_keys", filled, "(B, Hq, Sq, Sk)", (B, Hq, Sq, k.shape[2]))


def _broadcasts(name: str, x: Tensor, layout: str, full: tuple) -> None:
    message = "{} must have the dimensions {} = {}, or 1 in place of any, got shape {}"
    checks.need(x.dim() == len(full), message, name, layout, full, x.shape)
    for size, whole in zip(x.shape, full, strict=True):
        checks.need((size - 1) * (size - whole) == 0, message, name, layout, full, x.shape)


def _forward(call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    return dense.OPERATORS.forward.run(_averaged(call, rows))


def _averaged(call: Call, rows: Tensor) -> Call:
    """The call with a query of 0 in averaging rows, which its bool mask keeps."""
    rows, mask = rows.unsqueeze(-1), call.operands.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        call = call.changed(attn_mask=mask | rows, mask_blocks=None)  # those of another mask
    return call._replace(query=call.query.masked_fill(rows, 0.0))


def _second_pass(call: Call, rows: Tensor, filled: Tensor | None) -> Call:
    """The pass over averaging rows alone, at a low temperature."""
    ranges, mask = rows.unsqueeze(-1).to(torch.int32), call.operands.attn_mask
    if call.operands.key_ranges is None:
        ends = (torch.zeros_like(ranges), ranges * call.key.shape[2])
        ranges = torch.cat(ends, -1)
    else:
        ranges = ranges * call.operands.key_ranges
    if mask is not None and mask.dtype == torch.bool:
        mask = None
    if filled is not None:
        mask = call.query.new_zeros((), dtype=torch.float32) if mask is None else mask
        mask = torch.where(filled, -math.inf, mask)
    mask, sinks = _wide(mask, call.operands.sinks)
    return call.changed(
        attn_mask=mask, sinks=sinks, key_ranges=ranges, mask_blocks=None,
        scale=call.scale * TEMPERATURE, softcap=call.options.softcap * TEMPERATURE,
    )  # fmt: skip


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """float16, which cannot hold gradients times T, as float32."""
    return [x.float() if x is not None and x.dtype == torch.float16 else x for x in tensors]


def _gradients(saved: Sequence[Tensor | None], call: Call, **mask_grad: bool) -> tuple:
    args, options = dense.OPERATORS.backward.arguments(call)
    return dense.BACKWARD(*saved, *args, **options, **mask_grad)


class _AveragingRows(library.SingleLevelFunction):
    """forward(call, grad_share, q, k, v, rows, filled, *tensors) -> (out, lse)

    `call` has no tensors.
    """

    @staticmethod
    def forward(ctx, call, grad_share, q, k, v, rows, filled, *tensors):
        with library.recording():
            given = call._replace(query=q, key=k, value=v, operands=Operands(*tensors))
            out, lse = _forward(given, rows)
        ctx.save_for_backward(q, k, v, out, lse, rows, filled, *tensors)
        ctx.call, ctx.grad_share = call, grad_share
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @autograd.differentiable_once("attention with averaging rows")
    def backward(ctx, saved, grad_out, grad_lse):
        q, k, v, out, lse, rows, filled, *tensors = saved
        call = ctx.call._replace(query=q, key=k, value=v, operands=Operands(*tensors))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        _, _, of_q, of_k, of_v, _, _, of_mask, _, of_sinks, *_ = ctx.needs_input_grad
        averaged = _averaged(call, rows)
        saved = grad_out, grad_lse, averaged.query, k, v, out, lse
        dq, dk, dv, dmask, dsinks = _gradients(saved, averaged, mask_grad=of_mask)
        if of_q or of_k:
            saved = _wide(grad_out, grad_lse, q, k, v, out, lse)
            more = _gradients(saved, _second_pass(call, rows, filled))
            factor = ctx.grad_share / TEMPERATURE
            dq = dq.masked_fill(rows.unsqueeze(-1), 0.0) + (more[0] * factor).to(q.dtype)
            dk = dk + (more[1] * factor).to(k.dtype)
        needed = (dq if of_q else None, dk if of_k else None, dv if of_v else None)
        optional = [dmask if of_mask else None, None, dsinks if of_sinks else None]
        return None, None, *needed, None, None, *optional, *(None for _ in tensors[3:])


def _attention(q, k, v, *args, averaging_rows, filled_keys=None, grad_share=1.0, **options):
    call = dense.OPERATORS.forward.call(q, k, v, args, options)
    tensors = call.operands
    _check(call, averaging_rows, filled_keys, grad_share)
    floats = tensors.attn_mask, tensors.alibi_slopes, tensors.sinks
    library.reject_forward_ad(OPERATOR, q, k, v, *floats)
    if not autograd.needs_grad(q, k, v, tensors):
        return _forward(call, averaging_rows)
    given = (q, k, v, averaging_rows, filled_keys, *tensors)
    return library.apply(_AveragingRows, call.without_tensors(), grad_share, *given)


def _autograd(keyset, *args, **options):
    return _attention(*args, **options)


library.register("attention_averaging_rows", _attention, _attention, _autograd)
