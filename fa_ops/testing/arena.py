"""Buffers with margins around each tensor, which reveal writes outside a kernel's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fa_ops.testing import allocators

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
        with allocators.replaced(self._allocated, backend):
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
