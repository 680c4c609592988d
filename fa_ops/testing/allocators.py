"""Every function by which a backend allocates uninitialised memory, to be replaced in a test."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

_TORCH = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


def _of_hopper() -> list[tuple[object, str]]:
    """`empty` in every module that allocates by that name, repeated calls included."""
    from fa_ops.backends import hopper

    names = [one.name for one in pkgutil.iter_modules(hopper.__path__)]
    modules = [importlib.import_module(f"{hopper.__name__}.{name}") for name in names]
    return [(module, "empty") for module in modules if hasattr(module, "empty")]


@contextlib.contextmanager
def replaced(
    wrap: Callable[[Tensor], Tensor], backend: str, own: Callable[[Tensor], Tensor] | None = None
) -> Iterator[None]:
    """In a `with` block, whoever allocates uninitialised memory gets `wrap(x)` instead of x.

    Tensors on the meta device stay as they are.

    Args:
        backend: whose own functions for this are replaced too.
        own: what wraps the results of those; `wrap` unless given.
    """
    with contextlib.ExitStack() as patches:

        def put(owner: object, name: str, function: Callable | None) -> None:
            patches.enter_context(mock.patch.object(owner, name, function))

        for owner, name in _TORCH:
            put(owner, name, _wrapped(getattr(owner, name), wrap))
        if backend == "hopper":
            for owner, name in _of_hopper():
                put(owner, name, _wrapped(getattr(owner, name), own or wrap))
        if backend == "triton":
            from fa_ops.backends.triton import launch

            put(launch, "_empty_strided_cuda", None)  # it then uses torch.empty_strided
        yield


def _wrapped(allocate: Callable, wrap: Callable[[Tensor], Tensor]) -> Callable:
    @functools.wraps(allocate)
    def function(*args, **options):
        x = allocate(*args, **options)
        return x if x.device.type == "meta" else wrap(x)

    return function
