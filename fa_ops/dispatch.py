"""Which backend runs a call, and why."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from torch import Tensor

from fa_ops.types import Spec

BACKENDS = ("hopper", "triton", "cpu", "reference")
_AUTO = ("hopper", "triton", "cpu")

default: str | None = os.environ.get("FA_OPS_BACKEND") or None
_unavailable: dict[str, str | None] = {}


class use_backend:
    """Choose the backend of every call inside a `with` block; "auto" lets the call decide.

    The choice is process-wide while the block runs, not per thread. A backend named here never falls back.
    Raises ValueError if no backend has that name.
    """

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name

    def __enter__(self) -> None:
        global default
        self.previous = default
        default = self.name

    def __exit__(self, *_: object) -> None:
        global default
        default = self.previous


def check_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, got {name!r}")


def load(name: str) -> ModuleType:
    return importlib.import_module(f"fa_ops.backends.{name}")


def available_error(name: str) -> str | None:
    """Why the backend cannot run on this machine at all, or None. Asked once per process."""
    if name not in _unavailable:
        try:
            _unavailable[name] = load(name).available_error()
        except ImportError as error:
            _unavailable[name] = f"cannot be imported: {error}"
    return _unavailable[name]


def backends() -> list[tuple[str, str | None]]:
    """Every backend with the reason why it cannot run on this machine, or None where it can."""
    return [(name, available_error(name)) for name in BACKENDS]


def _refusal(name: str, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    return available_error(name) or load(name).support_error(q, k, v, spec)


def select(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> ModuleType:
    """The module that runs this call. Raises ValueError for an unknown name, NotImplementedError where nothing fits."""
    name = spec.backend or default or "auto"
    if name == "auto":
        reasons = {}
        for candidate in _AUTO:
            reasons[candidate] = _refusal(candidate, q, k, v, spec)
            if reasons[candidate] is None:
                return load(candidate)
        lines = "".join(f"\n  {candidate}: {reason}" for candidate, reason in reasons.items())
        raise NotImplementedError(f"no backend can run this attention call:{lines}")
    check_name(name)
    reason = _refusal(name, q, k, v, spec)
    if reason is not None:
        raise NotImplementedError(f"backend {name!r} cannot run this attention call: {reason}")
    return load(name)
