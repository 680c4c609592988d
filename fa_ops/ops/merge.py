"""fa::merge_states: attention over a union of disjoint key sets from the attention over each."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.ops import library
from fa_ops.plans import dispatch, outputs

MERGE = torch.ops.fa.merge_states.default


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    checks.states(outs, lses)
    if not outs.numel():
        return outputs.merged(outs, lses)
    backend = _backend(dispatch.merging_backend(), outs)
    return backend.merge_states(outs.contiguous(), lses.contiguous())


def _backend(name: str, outs: Tensor) -> ModuleType:
    return dispatch.choose_for(name, outs.device, lambda backend: backend.merge_error(outs))


def merger_into(out: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """What merges a state into one like this, in place: (out, lse, part, part_lse) -> None."""
    return merger_of(_backend("auto", out)) if out.numel() else outputs.merged_into


def merger_of(backend: ModuleType) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """The same of a backend. Without a kernel for that, it merges into tensors that are copied."""
    if hasattr(backend, "merge_into"):
        return backend.merge_into

    def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        outs = torch.stack((out, part.to(out.dtype)))
        merged, merged_lse = backend.merge_states(outs, torch.stack((lse, part_lse)))
        out.copy_(merged)
        lse.copy_(merged_lse)

    return merge_into


def _fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    checks.states(outs, lses)
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


class _Merge(library.SingleLevelFunction):
    """With w_n = exp(lse_n - lse): out = sum w_n out_n, so d out_n = w_n d out and
    d lse_n = w_n ((out_n - out) . d out + d lse). Both directions are made of torch's own
    operations, so they can be differentiated again."""

    @staticmethod
    def forward(ctx, keyset, outs, lses):
        with library.recording():
            out, lse = library.redispatch(MERGE, keyset, outs, lses)
        ctx.save_for_backward(outs, lses, out, lse)
        if library.is_forward_mode():
            ctx.save_for_forward(outs, lses, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def jvp(ctx, _, of_outs, of_lses):
        outs, lses, *_ = ctx.saved_tensors
        wide, has_keys = lses.dtype, lses > float("-inf")
        most = torch.finfo(wide).max
        lses = lses.masked_fill(~has_keys, -most).clamp(max=most)
        weights = torch.softmax(lses, 0).masked_fill(~has_keys, 0.0)
        of_lse, of_out = torch.zeros_like(weights[0]), torch.zeros_like(outs[0], dtype=wide)
        if of_outs is not None:
            of_outs = of_outs.to(wide).masked_fill(~has_keys.unsqueeze(-1), 0.0)
            of_out = (weights.unsqueeze(-1) * of_outs).sum(0)
        if of_lses is not None:
            shares = weights * of_lses.masked_fill(~has_keys, 0.0)
            of_lse = shares.sum(0)
            changes = (shares - weights * of_lse).unsqueeze(-1)
            values = outs.to(wide).masked_fill(~has_keys.unsqueeze(-1), 0.0)
            of_out = of_out + (changes * values).sum(0)
        return of_out.to(outs.dtype), of_lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        outs, lses, out, lse = ctx.saved_tensors
        dead = lse == float("-inf")
        most = torch.finfo(lse.dtype).max  # a state whose lse is +inf has all weight
        top = lse.masked_fill(dead, 0.0).clamp(max=most)
        weights = torch.exp(lses.clamp(max=most) - top)  # 0 for a state without keys
        grad_outs, grad_lses = None, torch.zeros_like(lses)
        if grad_out is not None:
            wide = grad_out.to(lse.dtype)
            grad_outs = (weights.unsqueeze(-1) * wide).to(outs.dtype)
            grad_lses = ((outs.to(lse.dtype) - out.to(lse.dtype)) * wide).sum(-1)
        if grad_lse is not None:
            grad_lses = grad_lses + grad_lse
        # the out of a state without keys may be anything
        return None, grad_outs, (grad_lses * weights).masked_fill(lses == float("-inf"), 0.0)


def _autograd(keyset, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    if outs is None or lses is None:
        checks.given(outs=outs, lses=lses)
    recorded = torch.is_grad_enabled() and (outs.requires_grad or lses.requires_grad)
    if recorded or library.has_tangent(outs, lses):
        return library.apply(_Merge, keyset, outs, lses)
    return library.redispatch(MERGE, keyset, outs, lses)


library.register("merge_states", _merge, _fake, _autograd)
