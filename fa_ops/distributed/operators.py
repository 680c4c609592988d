"""The operator's calls in a step, by their plans where the dispatcher would have nothing to do."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import planning
from fa_ops.call import DENSE, MERGE_INTO, Call, Run, Saved
from fa_ops.ops import autograd, library
from fa_ops.types import Spec, keywords

_merging: dict[tuple, Run] = {}


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """out and lse. Nothing is recorded for a gradient."""
    if library.can_bypass_dispatcher(q, k, v, *spec.tensors):
        with library.below_autograd():
            return planning.run(Call(DENSE, q, k, v, spec))
    return torch.ops.fa.attention_with_lse(q, k, v, *spec[:3], **keywords(spec))


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, spec: Spec,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k and v."""
    given = grad_out, grad_lse, q, k, v, out, lse
    if library.can_bypass_dispatcher(*given, *spec.tensors) and all(
        g is None or library.have_same_dispatch_keys(g, lse) for g in (grad_out, grad_lse)
    ):
        with library.below_autograd():
            saved = Saved(grad_out, grad_lse, out, lse)
            return autograd.run_backward(Call(DENSE, q, k, v, spec), saved)[:3]
    return torch.ops.fa.attention_backward(*given, *spec[:3], **keywords(spec))[:3]


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a result over other keys into out (B, H, S, D) and lse (B, H, S), in place."""
    kind = (out.dtype, part.dtype, out.shape[3], out.device, out.numel() == 0)
    run = _merging.get(kind)
    if run is None:
        call = Call(MERGE_INTO, out, out, out, backend="auto")
        run = _merging[kind] = planning.plan_for(call).prepare(call)
    run(out, lse, part, part_lse)
