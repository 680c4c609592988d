"""Uninitialised memory that is NaN, so that a kernel that leaves a hole in its output fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from fa_ops.testing import allocators


@contextlib.contextmanager
def poisoned_memory(backend: str = "hopper") -> Iterator[None]:
    """In a `with` block, what torch's functions for uninitialised tensors return is full of NaN.

    So are results of the named backend; the Hopper tier's workspaces, which are vectors, are not.
    """
    _device_constructors()  # torch remembers its answer, which must hold the functions themselves
    with allocators.replaced(_with_nan, backend, lambda x: _with_nan(x) if x.dim() > 1 else x):
        yield


def _with_nan(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        with torch.no_grad():
            x.fill_(float("nan"))
    return x
