"""Dense attention on CPU: the choice between aten's flash kernel and the blockwise engine."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends.cpu import blockwise, flash
from fa_ops.backends.cpu.key_ranges import attended_ranges
from fa_ops.backends.cpu.mask_states import skipping_pays
from fa_ops.backends.dropout import is_words
from fa_ops.types import Gradients, Spec


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, first_batch: int = 0
) -> tuple[Tensor, Tensor]:
    """out and lse; `first_batch` is the batch index of the first element in the dropout stream."""
    pieces = None if skipping_pays(spec) else flash.plan(q, k, v, spec)
    if pieces is not None:
        return flash.forward(q, k, v, spec, pieces)
    ranges = attended_ranges(spec, q.shape[2], k.shape[2])
    return blockwise.forward(q, k, v, spec, ranges, first_batch)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, spec: Spec, mask_grad: bool = False, first_batch: int = 0,
) -> Gradients:  # fmt: skip
    """Gradients by the engine that runs the call; `out` and `lse` are the forward's results."""
    plain = grad_lse is None and not mask_grad and not skipping_pays(spec)
    pieces = flash.plan_backward(grad_out, q, k, v, lse, spec) if plain else None
    if pieces is not None:
        grads = flash.backward(grad_out, q, k, v, out, lse, spec, pieces)
    else:
        ranges = attended_ranges(spec, q.shape[2], k.shape[2])
        grads = blockwise.backward(
            grad_out, grad_lse, q, k, v, out, lse, spec, ranges, mask_grad, first_batch
        )
    if spec.sinks is None and grad_lse is None and _attends_one_key(k, v, out, lse, spec):
        # The weight is 1 whatever the score. Multiplied, because gradients that are NaN stay NaN.
        grads.query.mul_(0.0), grads.key.mul_(0.0)
    if spec.sinks is None:
        return grads
    return grads._replace(sinks=_sinks_gradient(grad_out, grad_lse, out, lse, spec.sinks))


def _attends_one_key(k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: Spec) -> bool:
    """Whether no row attends more than one key.

    A call with one key may be a part of attention over more keys, which `out` and `lse` belong to.
    With dropout it is none if it has a seed.
    """
    if k.shape[2] != 1 or not k.numel():
        return k.shape[2] == 1
    if spec.dropout_p:
        return not is_words(spec.dropout_seed)
    is_value = out.unflatten(1, (k.shape[1], -1)) == v.unsqueeze(2)
    return bool((is_value.all(-1).flatten(1, 2) | (lse == float("-inf"))).all())


def _sinks_gradient(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor
) -> Tensor:
    """A sink of weight w scales out by (1 - w), and d lse / d sink = w."""
    largest = torch.finfo(lse.dtype).max  # the lse of a sink of +inf is +inf
    weight = torch.exp(sinks.to(lse.dtype).clamp(max=largest).view(-1, 1) - lse.clamp(max=largest))
    slope = -torch.einsum("bhsd,bhsd->bhs", grad_out.to(lse.dtype), out.to(lse.dtype))
    if grad_lse is not None:
        slope += grad_lse
    weight.masked_fill_(lse == float("-inf"), 0.0)  # a sink of -inf in a row without keys
    return weight.mul_(slope).sum((0, 2)).to(sinks.dtype)
