"""Results whose gradients raise NotImplementedError instead of being missing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def undifferentiable(message: str, inputs: Sequence[Tensor], *results: Tensor) -> tuple:
    """The results, with a gradient that raises if one of the inputs requires grad."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Undifferentiable.apply(message, len(results), *results, *inputs)
    return results


def differentiable_once(what: str) -> Callable:
    """A decorator for the backward of an autograd.Function, whose own derivative then raises.

    Backward is called with (ctx, saved tensors, *gradients), as they may be unpacked only once.
    torch's `once_differentiable` returns gradients that count as constants if the gradients that
    arrive require no grad, even though those of attention depend on the saved tensors.
    """

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def first(ctx, *grads):
            saved = ctx.saved_tensors
            with torch.no_grad():
                found = backward(ctx, saved, *grads)
            if not torch.is_grad_enabled():
                return found
            inputs = [x for x in (*grads, *saved) if x is not None]
            message = f"{what} has no second derivative: double backward is not implemented"
            results = iter(undifferentiable(message, inputs, *(x for x in found if x is not None)))
            return tuple(None if x is None else next(results) for x in found)

        return first

    return decorate


class _Undifferentiable(torch.autograd.Function):
    """forward(message, number of results, *results, *inputs) -> results"""

    @staticmethod
    def forward(ctx, message, count, *tensors):
        ctx.message = message
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ctx.message)
