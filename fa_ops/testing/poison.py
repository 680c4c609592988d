"""Memory that nobody wrote is NaN, so that a kernel that leaves a hole in its output fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch

_ALLOCATORS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """In a `with` block, what torch's functions for uninitialised tensors return is full of NaN."""
    with contextlib.ExitStack() as patches:
        for owner, name in _ALLOCATORS:
            poisoned = _poisoned(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, poisoned))
        yield


def _poisoned(allocate: Callable) -> Callable:
    def wrapper(*args, **options):
        x = allocate(*args, **options)
        if x.dtype.is_floating_point and x.device.type != "meta":
            with torch.no_grad():
                x.fill_(float("nan"))
        return x

    return wrapper
