"""Memory of results under test: buffers with margins, and uninitialised memory full of NaN."""

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

# Buffers with margins around each tensor, which reveal writes outside a kernel's outputs.

MARGIN = 1 << 14  # minimal bytes on either side; a larger tensor has margins of its own size
FILL = 0xFF  # NaN in every float dtype, -1 in integers: reading a margin changes results too


class Arena:
    """Places tensors inside larger buffers; `check` finds writes outside the tensors.

    Examples:
        >>> arena = Arena()
        >>> q, k, v = (arena.placed(x) for x in (q, k, v))
        >>> with arena.outputs("triton"):
        ...     out = fa_ops.attention(q, k, v, backend="triton")
        >>> arena.check()
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int, int, Tensor | None]] = []

    def placed(self, x: Tensor, read_only: bool = True) -> Tensor:
        """Copy x, with its strides, into a buffer with margins.

        Args:
            read_only: whether `check` also verifies that the copy, and the memory between its
                elements, has not changed.
        """
        y = self._allocated(x)
        span = _span(x)
        with torch.no_grad():
            flat = torch.as_strided(x.detach(), (span,), (1,))
            torch.as_strided(y, (span,), (1,), y.storage_offset()).copy_(flat)
        if read_only:
            buffer, first, last, _ = self._buffers[-1]
            self._buffers[-1] = buffer, first, last, buffer[first:last].clone()
        return y.requires_grad_(x.requires_grad)

    @contextlib.contextmanager
    def outputs(self, backend: str) -> Iterator[None]:
        """In a `with` block, uninitialised memory that the backend allocates has margins.

        Floating point memory is NaN until it is written.
        """
        with replaced(self._allocated, backend):
            yield

    def check(self) -> None:
        """Raise AssertionError if a margin or a read-only tensor has changed; drop all buffers."""
        buffers, self._buffers = self._buffers, []
        changed = []
        for buffer, first, last, content in buffers:
            parts = [(buffer[:first] != FILL).sum(), (buffer[last:] != FILL).sum()]
            parts.append((buffer[first:last] != content).sum() if content is not None else parts[0])
            changed.append(torch.stack(parts))
        if not changed:
            return
        counts = torch.stack(changed).tolist()  # one copy from the device
        for (buffer, first, last, content), (before, after, inside) in zip(buffers, counts):
            size = f"a tensor of {last - first} bytes on {buffer.device}"
            assert not before, f"{before} bytes before {size} were overwritten"
            assert not after, f"{after} bytes after {size} were overwritten"
            assert content is None or not inside, f"{inside} bytes of {size} were overwritten"

    def _allocated(self, x: Tensor) -> Tensor:
        """A tensor with x's shape and strides, filled with `FILL`, in a buffer with margins."""
        bytes_of_x = _span(x) * x.element_size()
        margin = -(-max(MARGIN, bytes_of_x) // MARGIN) * MARGIN
        with torch.no_grad():
            buffer = torch.zeros(bytes_of_x + 2 * margin, dtype=torch.uint8, device=x.device)
            buffer.fill_(FILL)
            y = torch.tensor([], dtype=x.dtype, device=x.device)  # results must not be views
            y.set_(buffer.untyped_storage(), margin // x.element_size(), x.shape, x.stride())
        self._buffers.append((buffer, margin, margin + bytes_of_x, None))
        return y


def _span(x: Tensor) -> int:
    """The number of elements of memory from x's first element to its last, both included."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))


# Replace every function by which a backend allocates uninitialised memory, or fill it with NaN.

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

    found = pkgutil.walk_packages(hopper.__path__, f"{hopper.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
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
