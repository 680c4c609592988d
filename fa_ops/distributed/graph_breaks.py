"""Functions that exchange messages run outside the graphs of torch.compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

from fa_ops.ops.imports import after_import

_waiting: list[Callable[[], None]] = []  # for the compiler to be imported


def outside_graphs(function: Callable) -> Callable:
    """Make torch.compile break its graph at the function, rather than trace the host's plans.

    `torch.compiler.disable` would import the compiler, which takes seconds, so it is applied once
    something else has imported it.
    """
    current = [function]

    @functools.wraps(function)
    def call(*args, **options):
        return current[0](*args, **options)

    def disable() -> None:
        reason = f"{function.__name__} exchanges messages with other processes"
        current[0] = torch.compiler.disable(function, reason=reason)

    _waiting.append(disable)
    if _is_imported():
        _disable_all()
    return call


def _is_imported() -> bool:
    """Whether the compiler has been imported, and not just begun to be."""
    return hasattr(sys.modules.get("torch._dynamo"), "disable")


def _disable_all() -> None:
    while _waiting and _is_imported():
        _waiting.pop()()


after_import("torch._dynamo", _disable_all)
