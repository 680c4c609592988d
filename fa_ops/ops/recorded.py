"""Calls that record a gradient and repeat: a node of autograd around what was prepared for them.

What holds of `prepared` holds here: the checks and the choice of a backend decide nothing new for a
call with the same key. Autograd sees such a call and nothing else does: where anything else
watches, in the forward or in the backward pass, the operator is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fa_ops import dispatch
from fa_ops.ops import autograd, checks, dense, library, prepared
from fa_ops.types import Spec, with_tensors


def key_of(q: Tensor, k: Tensor, v: Tensor, tensors: tuple, *options) -> tuple | None:
    """What makes two calls that record a gradient the same, or None where the operator must see
    the call. `tensors` are what `types.tensors_of` gives; or none."""
    if not (torch.is_grad_enabled() and library.only_autograd_watches(q, k, v, *tensors)):
        return None
    if q is None or k is None or v is None:  # which the door refuses
        return None
    mask, slopes, sinks, *_ = tensors or (None,) * 3
    if not (q.requires_grad or k.requires_grad or v.requires_grad or _needs_grad(mask, sinks)):
        return None
    if slopes is not None and slopes.requires_grad:
        return None  # which the operator refuses
    if not library.is_strided(q, k, v, *tensors):
        return None
    return prepared.signature(q, k, v, tensors, "recorded", *options)


def make(key: tuple, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Callable[..., Tensor] | None:
    """What runs calls with this key and records their gradients: (q, k, v, *tensors) -> out.

    Raises what the operator would.
    """
    flat = all(t is None or t.is_contiguous() for t in spec[7:11])  # as kernels index them
    if not (flat and q.numel() and k.numel() and v.numel()):
        return None
    checks.dense(q, k, v, spec, real=True)
    return prepared.remember(key, partial(Recorded.apply, Call(key, q, k, v, spec)))


class Call:
    """What calls of one key share: their options, and what their backends have prepared."""

    def __init__(self, key: tuple, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> None:
        self._key, self._options = key, prepared.options_of(key)
        self._spec = with_tensors(spec, (None,) * 5)
        backend = dispatch.select(q, k, v, spec)
        prepare = getattr(backend, "prepare_with_lse", None)
        own = prepare and prepare(q, k, v, spec)
        self.forward = own or partial(self._general_forward, backend)
        self.backward: Callable[..., tuple] | None = None  # some calls have no backward pass

    def repeats(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out, lse, *small) -> bool:
        """Whether the backward pass is this call's, which whoever unpacks what was saved may have
        changed, and is nobody else's to see. Raises what the operator would."""
        if (
            torch.compiler.is_compiling()
            or torch.are_deterministic_algorithms_enabled()
            or not library.nobody_watches(grad_out, q, k, v, out, lse, *small)
            or not (lse.is_contiguous() and library.dispatched_alike(grad_out, lse))
            or prepared.signature(q, k, v, small, *self._options) != self._key
        ):
            return False
        checks.saved(grad_out, None, q, v, out, lse, real=True)
        if self.backward is None:
            spec = with_tensors(self._spec, small)
            backend = dispatch.select(q, k, v, spec, backward=True)
            prepare = getattr(backend, "prepare_backward", None)
            own = prepare and prepare(q, k, v, spec)
            self.backward = own or partial(self._general_backward, backend)
        return True

    def _general_forward(self, backend, q, k, v, *small):
        with library.below_autograd():
            return backend.forward(q, k, v, with_tensors(self._spec, small))

    def _general_backward(self, backend, grad_out, q, k, v, out, lse, *small, mask_grad=False):
        grad_out, out = checks.with_rows(grad_out), checks.with_rows(out)
        return backend.backward(
            grad_out, None, q, k, v, out, lse, with_tensors(self._spec, small), mask_grad=mask_grad
        )

    def by_operator(self, grad_out: Tensor, saved: tuple, mask_grad: bool) -> tuple:
        args, options = autograd.arguments(None, with_tensors(self._spec, saved[5:]))
        return dense.BACKWARD(grad_out, None, *saved[:5], *args, **options, mask_grad=mask_grad)


class Recorded(library.SingleLevelFunction):
    """forward(call, q, k, v, *small) -> out; `small` as in `key_of`."""

    @staticmethod
    def forward(ctx, call, q, k, v, *small):
        out, lse = call.forward(q, k, v, *small)
        ctx.save_for_backward(q, k, v, out, lse, *small)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, grad_out):
        call, saved = ctx.call, ctx.saved_tensors
        repeats = call.repeats(grad_out, *saved)
        if len(saved) == 5:
            grads = call.backward(grad_out, *saved) if repeats else None
            return None, *(grads or call.by_operator(grad_out, saved, False))[:3]
        of_mask, of_sinks = ctx.needs_input_grad[4], ctx.needs_input_grad[6]
        if repeats:
            grads = call.backward(grad_out, *saved, mask_grad=of_mask)
        else:
            grads = call.by_operator(grad_out, saved, of_mask)
        *grads, dmask, dsinks = grads
        dmask, dsinks = dmask if of_mask else None, dsinks if of_sinks else None
        return None, *grads, dmask, None, dsinks, None, None


def _needs_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)
