"""fa::attention_varlen and its backward: sequences packed along the token dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call.call import PACKED, Call, Saved
from fa_ops.call.options import Packing, Spec
from fa_ops.ops import autograd, library
from fa_ops.plans import planning
from fa_ops.plans.outputs import packed_outputs

VARLEN = torch.ops.fa.attention_varlen.default
BACKWARD = torch.ops.fa.attention_varlen_backward.default


def bind(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options,
) -> tuple[Packing, Spec]:
    """The operators' arguments after query, key and value."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return packing, Spec(None, dropout_p, is_causal, **options)


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    call = _call(q, k, v, args, options)
    return planning.run(call)


def _call(q: Tensor, k: Tensor, v: Tensor, args: tuple, options: dict) -> Call:
    packing, spec = bind(*args, **options)
    return Call(PACKED, q, k, v, spec, packing)


def _fake(q, k, v, *args, **options):
    planning.check(_call(q, k, v, args, options), real=False)
    return packed_outputs(q, v)


def _autograd(keyset, q, k, v, *args, **options):
    call = _call(q, k, v, args, options)
    if autograd.needs_grad(call):
        return autograd.record(OPERATORS, keyset, call, with_lse=True)
    return autograd.without_gradient(VARLEN, keyset, call, True, *args, **options)


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, **options):
    saved = Saved(grad_out, grad_lse, out, lse)
    grads = autograd.run_backward(_call(q, k, v, args, options), saved)
    dsinks = q.new_empty(0) if grads.sinks is None else grads.sinks
    return grads.query, grads.key, grads.value, dsinks


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, **options):
    call = _call(q, k, v, args, options)
    planning.check(call._replace(saved=Saved(grad_out, grad_lse, out, lse)), real=False)
    sinks = call.spec.sinks
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


OPERATORS = autograd.Operators(VARLEN, BACKWARD)

library.register("attention_varlen", _forward, _fake, _autograd)
library.register(
    "attention_varlen_backward", _backward, _backward_fake, autograd.backward_kernel(BACKWARD)
)
