"""fa::attention and fa::attention_with_lse, and the operators of their derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call.call import DENSE, Saved
from fa_ops.ops import autograd, derivatives, library
from fa_ops.ops.schemas import Schema
from fa_ops.plans import planning
from fa_ops.plans.outputs import dense_outputs

ATTENTION = torch.ops.fa.attention.default
WITH_LSE = torch.ops.fa.attention_with_lse.default
BACKWARD = torch.ops.fa.attention_backward.default
JVP = torch.ops.fa.attention_jvp.default
BACKWARD_JVP = torch.ops.fa.attention_backward_jvp.default
OPERATORS = autograd.Operators(
    Schema(WITH_LSE, DENSE), Schema(BACKWARD, DENSE, 7), Schema(JVP, DENSE, 11),
    Schema(BACKWARD_JVP, DENSE, 17),
)  # fmt: skip
_FORWARD, _GRADIENT = OPERATORS[:2]


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    return planning.run(DENSE, q, k, v, *_FORWARD.bind(args, options))


def _attention(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> Tensor:
    return planning.run(DENSE, q, k, v, *_FORWARD.bind(args, options), with_lse=False)[0]


def _fake(q, k, v, *args, **options):
    planning.check(_FORWARD.call(q, k, v, args, options), real=False)
    return dense_outputs(q, v)


def _attention_fake(q, k, v, *args, **options):
    return _fake(q, k, v, *args, **options)[0]


def _autograd(keyset, q, k, v, *args, **options):
    return autograd.forward(OPERATORS, WITH_LSE, keyset, q, k, v, args, options)


def _attention_autograd(keyset, q, k, v, *args, **options):
    return autograd.forward(OPERATORS, ATTENTION, keyset, q, k, v, args, options, with_lse=False)


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
    grads = autograd.run_backward(_GRADIENT.call(q, k, v, args, options), saved)
    return tuple(q.new_empty(0) if g is None else g for g in grads[:5])


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
    call = _GRADIENT.call(q, k, v, args, options)._replace(saved=saved)
    planning.check(call, real=False)
    mask, sinks = call.operands.attn_mask, call.operands.sinks
    dmask = torch.empty_like(mask) if mask_grad else q.new_empty(0)
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dmask, dsinks


library.register("attention", _attention, _attention_fake, _attention_autograd)
library.register("attention_with_lse", _forward, _fake, _autograd)
derivatives.register(OPERATORS, _backward, _backward_fake)
