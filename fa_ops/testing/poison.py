"""Memory that nobody wrote is NaN, so that a kernel that leaves a hole in its output fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils._device import _device_constructors

_ALLOCATORS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


def _allocators() -> list[tuple[object, str]]:
    """The Hopper tier makes its results with a function of its own."""
    from fa_ops.backends.hopper import dense_backward, dense_forward

    return [*_ALLOCATORS, (dense_forward, "empty"), (dense_backward, "empty")]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """In a `with` block, what torch's functions for uninitialised tensors return is full of NaN.

    So are results of the Hopper tier; its workspaces, which are vectors, are not.
    """
    _device_constructors()  # torch remembers its answer, which must hold the functions themselves
    with contextlib.ExitStack() as patches:
        for owner, name in _allocators():
            poisoned = _poisoned(getattr(owner, name), 0 if owner in (torch, torch.Tensor) else 2)
            patches.enter_context(mock.patch.object(owner, name, poisoned))
        yield


def _poisoned(allocate: Callable, dims: int) -> Callable:
    """`dims`: how many dimensions a tensor has at least to be poisoned."""

    def wrapper(*args, **options):
        x = allocate(*args, **options)
        if x.dtype.is_floating_point and x.device.type != "meta" and x.dim() >= dims:
            with torch.no_grad():
                x.fill_(float("nan"))
        return x

    return wrapper
