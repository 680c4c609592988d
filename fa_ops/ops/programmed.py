"""fa::attention_programmed and its backward: scores changed, and keys masked out, by a program."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call.call import PROGRAMMED, Saved
from fa_ops.ops import autograd, library
from fa_ops.ops.schemas import Schema
from fa_ops.plans import planning
from fa_ops.plans.outputs import dense_outputs

PROGRAMMED_ATTENTION = torch.ops.fa.attention_programmed.default
BACKWARD = torch.ops.fa.attention_programmed_backward.default
OPERATORS = autograd.Operators(
    Schema(PROGRAMMED_ATTENTION, PROGRAMMED), Schema(BACKWARD, PROGRAMMED, 7)
)
_FORWARD, _GRADIENT = OPERATORS[:2]


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    return planning.run(PROGRAMMED, q, k, v, *_FORWARD.bind(args, options))


def _fake(q, k, v, *args, **options):
    planning.check(_FORWARD.call(q, k, v, args, options), real=False, signature=PROGRAMMED)
    return dense_outputs(q, v)


def _autograd(keyset, q, k, v, *args, **options):
    return autograd.forward(OPERATORS, PROGRAMMED_ATTENTION, keyset, q, k, v, args, options)


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
    grads = autograd.run_backward(_GRADIENT.call(q, k, v, args, options), saved)
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
    call = _GRADIENT.call(q, k, v, args, options)._replace(saved=saved)
    planning.check(call, real=False, signature=PROGRAMMED)
    t = call.operands
    given = t.attn_mask if mask_grad else None, t.sinks, t.term_values
    optional = (q.new_empty(0) if x is None else torch.empty_like(x) for x in given)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *optional


library.register("attention_programmed", _forward, _fake, _autograd)
library.register(
    "attention_programmed_backward", _backward, _backward_fake, autograd.backward_kernel(BACKWARD)
)
