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
from fa_ops.call.options import Operands, Spec, default_scale
from fa_ops.ops import autograd, dense, library

OPERATOR = torch.ops.fa.attention_averaging_rows.default
TEMPERATURE = 2.0**-50  # a power of two; the weights' relative error is T times the scores


def _check(call: Call, rows: Tensor, filled: Tensor | None, share: float) -> None:
    """Raise ValueError or TypeError unless the arguments make a legal call."""
    q, k = call.query, call.key
    checks.dense(q, k, call.value, call.spec)
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


def _forward(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    q, spec = _averaged(q, rows, spec)
    return dense.OPERATORS.forward.run(Call.of(q, k, v, spec))


def _averaged(q: Tensor, rows: Tensor, spec: Spec) -> tuple[Tensor, Spec]:
    """The query with 0 in averaging rows, and the options with a bool mask that keeps them."""
    rows, mask = rows.unsqueeze(-1), spec.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        spec = spec._replace(attn_mask=mask | rows, mask_blocks=None)  # those of another mask
    return q.masked_fill(rows, 0.0), spec


def _second_pass(spec: Spec, rows: Tensor, filled: Tensor | None, q: Tensor, k: Tensor) -> Spec:
    """The options of the pass over averaging rows alone, at a low temperature."""
    ranges, mask = rows.unsqueeze(-1).to(torch.int32), spec.attn_mask
    if spec.key_ranges is None:
        ends = (torch.zeros_like(ranges), ranges * k.shape[2])
        ranges = torch.cat(ends, -1)
    else:
        ranges = ranges * spec.key_ranges
    if mask is not None and mask.dtype == torch.bool:
        mask = None
    if filled is not None:
        mask = q.new_zeros((), dtype=torch.float32) if mask is None else mask
        mask = torch.where(filled, -math.inf, mask)
    scale = default_scale(spec, q.shape[-1]) * TEMPERATURE
    softcap = spec.softcap * TEMPERATURE
    return spec._replace(
        attn_mask=mask, key_ranges=ranges, scale=scale, softcap=softcap, mask_blocks=None
    )


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """float16, which cannot hold gradients times T, as float32."""
    return [x.float() if x is not None and x.dtype == torch.float16 else x for x in tensors]


def _gradients(saved: Sequence[Tensor | None], spec: Spec, **mask_grad: bool) -> tuple:
    args, options = dense.OPERATORS.backward.arguments(Call.of(*saved[2:5], spec))
    return dense.BACKWARD(*saved, *args, **options, **mask_grad)


class _AveragingRows(library.SingleLevelFunction):
    """forward(spec, grad_share, q, k, v, rows, filled, *tensors) -> (out, lse)"""

    @staticmethod
    def forward(ctx, spec, grad_share, q, k, v, rows, filled, *tensors):
        with library.recording():
            out, lse = _forward(q, k, v, rows, spec.with_operands(Operands(*tensors)))
        ctx.save_for_backward(q, k, v, out, lse, rows, filled, *tensors)
        ctx.spec, ctx.grad_share = spec, grad_share
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, rows, filled, *tensors = ctx.saved_tensors
        spec = ctx.spec.with_operands(Operands(*tensors))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        _, _, of_q, of_k, of_v, _, _, of_mask, _, of_sinks, *_ = ctx.needs_input_grad
        query, options = _averaged(q, rows, spec)
        saved = grad_out, grad_lse, query, k, v, out, lse
        dq, dk, dv, dmask, dsinks = _gradients(saved, options, mask_grad=of_mask)
        if of_q or of_k:
            spec = _second_pass(spec, rows, filled, q, k)
            mask, sinks = _wide(spec.attn_mask, spec.sinks)
            spec = spec._replace(attn_mask=mask, sinks=sinks)
            more = _gradients(_wide(grad_out, grad_lse, q, k, v, out, lse), spec)
            factor = ctx.grad_share / TEMPERATURE
            dq = dq.masked_fill(rows.unsqueeze(-1), 0.0) + (more[0] * factor).to(q.dtype)
            dk = dk + (more[1] * factor).to(k.dtype)
        needed = (dq if of_q else None, dk if of_k else None, dv if of_v else None)
        optional = [dmask if of_mask else None, None, dsinks if of_sinks else None]
        return None, None, *needed, None, None, *optional, *(None for _ in tensors[3:])


def _attention(q, k, v, *args, averaging_rows, filled_keys=None, grad_share=1.0, **options):
    call = dense.OPERATORS.forward.call(q, k, v, args, options)
    spec = call.spec
    _check(call, averaging_rows, filled_keys, grad_share)
    if not autograd.needs_grad(q, k, v, call.operands):
        return _forward(q, k, v, averaging_rows, spec)
    library.reject_forward_ad(OPERATOR, q, k, v, spec.attn_mask, spec.alibi_slopes, spec.sinks)
    plain, tensors = spec.with_operands(Operands()), Operands(*spec.operands)
    given = (q, k, v, averaging_rows, filled_keys, *tensors)
    return library.apply(_AveragingRows, plain, grad_share, *given)


def _autograd(keyset, *args, **options):
    return _attention(*args, **options)


library.register("attention_averaging_rows", _attention, _attention, _autograd)
