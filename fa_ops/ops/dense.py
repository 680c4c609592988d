"""fa::attention, fa::attention_with_lse and fa::attention_backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.call import DENSE, Call, Saved
from fa_ops.call.options import Spec
from fa_ops.ops import autograd, library
from fa_ops.plans import planning
from fa_ops.plans.outputs import dense_outputs

ATTENTION = torch.ops.fa.attention.default
WITH_LSE = torch.ops.fa.attention_with_lse.default
BACKWARD = torch.ops.fa.attention_backward.default


def _forward(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    call = Call(DENSE, q, k, v, Spec(*args, **options))
    return planning.run(call)


def _attention(q: Tensor, k: Tensor, v: Tensor, *args, **options) -> Tensor:
    call = Call(DENSE, q, k, v, Spec(*args, **options))
    return planning.run(call, with_lse=False)[0]


def _fake(q, k, v, *args, **options):
    checks.dense(q, k, v, Spec(*args, **options))
    return dense_outputs(q, v)


def _attention_fake(q, k, v, *args, **options):
    return _fake(q, k, v, *args, **options)[0]


def _autograd(keyset, q, k, v, *args, **options):
    call = Call(DENSE, q, k, v, Spec(*args, **options))
    if autograd.needs_grad(call):
        return autograd.record(OPERATORS, keyset, call, with_lse=True)
    return autograd.without_gradient(WITH_LSE, keyset, call, True, *args, **options)


def _attention_autograd(keyset, q, k, v, *args, **options):
    call = Call(DENSE, q, k, v, Spec(*args, **options))
    if autograd.needs_grad(call):
        return autograd.record(OPERATORS, keyset, call, with_lse=False)
    return autograd.without_gradient(ATTENTION, keyset, call, False, *args, **options)


def _backward(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    saved = Saved(grad_out, grad_lse, out, lse, mask_grad)
    grads = autograd.run_backward(Call(DENSE, q, k, v, Spec(*args, **options)), saved)
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _backward_fake(grad_out, grad_lse, q, k, v, out, lse, *args, mask_grad=False, **options):
    spec, saved = Spec(*args, **options), Saved(grad_out, grad_lse, out, lse, mask_grad)
    planning.check(Call(DENSE, q, k, v, spec, saved=saved), real=False)
    dmask = torch.empty_like(spec.attn_mask) if mask_grad else q.new_empty(0)
    dsinks = q.new_empty(0) if spec.sinks is None else torch.empty_like(spec.sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dmask, dsinks


OPERATORS = autograd.Operators(WITH_LSE, BACKWARD)

library.register("attention", _attention, _attention_fake, _attention_autograd)
library.register("attention_with_lse", _forward, _fake, _autograd)
library.register(
    "attention_backward", _backward, _backward_fake, autograd.backward_kernel(BACKWARD)
)
