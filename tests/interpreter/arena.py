"""Memory with a margin: whatever a kernel writes outside of its results shows."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

MARGIN = 4096  # numbers on either side
SENTINEL = 77.0


class Arena:
    """Tensors that lie inside larger ones, which are otherwise full of one number."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Tensor, int, float]] = []

    def place(self, x: Tensor, fill: float = SENTINEL) -> Tensor:
        """A copy of x, with its strides, amid numbers that are `fill`."""
        return self.empty(x.shape, x.stride(), x.dtype, x.device, fill).copy_(x)

    def empty(
        self, size: tuple, stride: tuple, dtype: torch.dtype, device, fill: float = SENTINEL
    ) -> Tensor:
        """An uninitialised tensor; its own numbers are NaN."""
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if 0 not in size else 0
        block = torch.full((span + 2 * MARGIN,), fill, dtype=dtype, device=device)
        inner = block.as_strided(tuple(size), tuple(stride), MARGIN)
        self._blocks.append((block, span, fill))
        return inner.fill_(float("nan")) if dtype.is_floating_point else inner.zero_()

    def overwritten(self) -> int:
        """How many numbers around all tensors are not as they were."""
        changed = 0
        for block, span, fill in self._blocks:
            for margin in (block[:MARGIN], block[MARGIN + span :]):
                same = margin.isnan() if fill != fill else margin == fill
                changed += int((~same).sum())
        return changed


@contextlib.contextmanager
def arena() -> Iterator[Arena]:
    """In a `with` block, what the Triton backend allocates lies in an arena."""
    found = Arena()

    def like(x: Tensor, **options) -> Tensor:
        real = real_empty_like(x, **options)
        return found.empty(real.shape, real.stride(), real.dtype, real.device)

    def plain(*size, dtype: torch.dtype, device, **_) -> Tensor:
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        strides = torch.empty(size, device="meta").stride()
        return found.empty(size, strides, dtype, device)

    def strided(size: tuple, stride: tuple, dtype: torch.dtype, device: int) -> Tensor:
        place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
        return found.empty(size, stride, dtype, place)

    real_empty_like = torch.empty_like
    with contextlib.ExitStack() as patches:
        for name in ("forward", "decode", "decode_append"):
            module = importlib.import_module(f"fa_ops.backends.triton.{name}")
            patches.enter_context(mock.patch.object(module, "empty", strided))
        host = importlib.import_module("fa_ops.backends.triton.backward")
        torch_of_host = _Torch(empty=plain, empty_like=like)
        patches.enter_context(mock.patch.object(host, "torch", torch_of_host))
        yield found


class _Torch:
    """The module torch but for some of its functions."""

    def __init__(self, **functions: Callable) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)
