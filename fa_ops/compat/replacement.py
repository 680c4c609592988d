"""Kernels of aten operators that hand what they cannot do to the kernel that was there before."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import DispatchKeySet

_REFUSALS = (NotImplementedError, ValueError, TypeError)
_said: set[tuple[str, str]] = set()


class Replacement:
    """A kernel in place of another one.

    Args:
        operator: an operator's name without its namespace, aten.
        key: the dispatch key, "CUDA" or "CPU".
        kernel: raises NotImplementedError, ValueError or TypeError for what it cannot do, before
            it computes or writes anything.
    """

    def __init__(self, operator: str, key: str, kernel: Callable) -> None:
        self._operator, self._kernel = operator, kernel
        self._before = None
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key):
            self._before = torch.library.get_kernel(f"aten::{operator}", key)

    def __call__(self, keyset: DispatchKeySet, *args, **options):
        """Run the kernel, or else the one before it; raises only where there was none."""
        try:
            return self._kernel(*args, **options)
        except _REFUSALS as error:
            if self._before is None:
                raise
            self._say(error)
        return self._before.call_boxed(keyset, *args, **options)

    def _say(self, error: Exception) -> None:
        """Warn once of each kind of call that another kernel runs."""
        kind = str(error).partition(",")[0]
        if (self._operator, kind) not in _said:
            _said.add((self._operator, kind))
            warnings.warn(f"torch's own kernel runs {self._operator}: {error}", stacklevel=2)
