"""Replace every function by which a backend allocates uninitialised memory, or fill it with NaN."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

_TORCH = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


@functools.cache
def _hopper_allocators() -> list[tuple[object, str]]:
    """`empty` in every Hopper module that defines it, those of repeated calls included."""
    from fa_ops.backends import hopper

    names = [module.name for module in pkgutil.iter_modules(hopper.__path__)]
    modules = [importlib.import_module(f"{hopper.__name__}.{name}") for name in names]
    return [(module, "empty") for module in modules if hasattr(module, "empty")]


@contextlib.contextmanager
def replaced(
    wrap: Callable[[Tensor], Tensor],
    backend: str,
    wrap_hopper: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """In a `with` block, allocating uninitialised memory returns `wrap(x)` instead of x.

    Tensors on the meta device stay as they are.

    Args:
        backend: the backend whose allocation functions are replaced in addition to torch's.
        wrap_hopper: applied instead of `wrap` to what the Hopper backend's functions return.
    """
    with contextlib.ExitStack() as patches:

        def patch(owner: object, name: str, function: Callable | None) -> None:
            patches.enter_context(mock.patch.object(owner, name, function))

        for owner, name in _TORCH:
            patch(owner, name, _wrapped(getattr(owner, name), wrap))
        if backend == "hopper":
            for owner, name in _hopper_allocators():
                patch(owner, name, _wrapped(getattr(owner, name), wrap_hopper or wrap))
        if backend == "triton":
            from fa_ops.backends.triton import launch

            patch(launch, "_empty_strided_cuda", None)  # it then uses torch.empty_strided
        yield


@contextlib.contextmanager
def poisoned_memory(backend: str = "hopper") -> Iterator[None]:
    """In a `with` block, uninitialised tensors of torch and of the named backend hold NaN.

    A kernel that skips part of its output then fails. The Hopper backend's workspaces, which are
    1-D, are left as they are.
    """
    _device_constructors()  # torch caches this set, which must hold the unpatched functions
    with replaced(_with_nan, backend, lambda x: _with_nan(x) if x.dim() > 1 else x):
        yield


def _with_nan(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        with torch.no_grad():
            x.fill_(float("nan"))
    return x


def _wrapped(allocate: Callable, wrap: Callable[[Tensor], Tensor]) -> Callable:
    @functools.wraps(allocate)
    def function(*args, **options):
        x = allocate(*args, **options)
        return x if x.device.type == "meta" else wrap(x)

    return function
