"""fa::merge_states: attention over a union of disjoint key sets from the attention over each."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import library
from fa_ops.types import Spec

MERGE = torch.ops.fa.merge_states.default


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    if outs.numel() == 0:
        return _merge_fake(outs, lses)
    return dispatch.select(outs, outs, outs, Spec()).merge_states(outs, lses)


def _merge_fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


class _Merge(library.SingleLevelFunction):
    @staticmethod
    def forward(ctx, keyset, outs, lses):
        with library.lower_levels():
            out, lse = MERGE.redispatch(keyset & library.AFTER_AUTOGRAD, outs, lses)
        ctx.save_for_backward(outs, lses, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        outs, lses, out, lse = ctx.saved_tensors
        weights = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))  # a state without keys weighs 0
        grad_outs, grad_lses = None, torch.zeros_like(lses)
        if grad_out is not None:
            grad_outs = (weights.unsqueeze(-1) * grad_out).to(outs.dtype)
            grad_lses = ((outs.to(lse.dtype) - out.to(lse.dtype)) * grad_out.to(lse.dtype)).sum(-1)
        if grad_lse is not None:
            grad_lses = grad_lses + grad_lse
        return None, grad_outs, grad_lses * weights


def _merge_autograd(keyset, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (outs.requires_grad or lses.requires_grad):
        return library.apply(_Merge, keyset, outs, lses)
    library.reject_forward_ad("merge_states", outs, lses)
    return MERGE.redispatch(keyset & library.AFTER_AUTOGRAD, outs, lses)


library.register("merge_states", _merge, _merge_fake, _merge_autograd)
