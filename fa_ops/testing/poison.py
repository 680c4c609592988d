"""Fill uninitialised memory with NaN, so that a kernel that skips part of its output fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from fa_ops.testing import allocators


@contextlib.contextmanager
def poisoned_memory(backend: str = "hopper") -> Iterator[None]:
    """In a `with` block, uninitialised tensors of torch and of the named backend hold NaN.

    The Hopper backend's workspaces, which are 1-D, are left as they are.
    """
    _device_constructors()  # torch caches this set, which must hold the unpatched functions
    with allocators.replaced(_with_nan, backend, lambda x: _with_nan(x) if x.dim() > 1 else x):
        yield


def _with_nan(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        with torch.no_grad():
            x.fill_(float("nan"))
    return x
