"""The list of backends, and the choice among them.

A call may name its backend; otherwise `use_backend` does, then `set_backend` or the environment
variable FA_OPS_BACKEND. The last resort is "auto": the first backend of the list for the call's
device that supports it. A backend that was named never falls back to another one.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from contextvars import ContextVar
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from fa_ops.call.call import Call
from fa_ops.call.options import MASK_BLOCK
from fa_ops.tracing import is_traced_by_dynamo

BACKENDS = ("hopper", "triton", "cpu", "reference")
# The backends that "auto" tries on each device; no others are imported.
AUTO = {"cuda": ("hopper", "triton"), "cpu": ("cpu",)}

_SKIPPING = ("hopper", "triton", "cpu")  # the backends that skip tiles by `mask_blocks`
_SUMMARISING = ("triton", "cpu")  # those that make `mask_blocks` of a mask

# What merges partial results for a backend that has no kernel for it.
_MERGING = {"hopper": "triton"}

_PACKAGES = ("triton",)  # third-party packages that backends import

# The process's choice.
default: str | None = os.environ.get("FA_OPS_BACKEND") or None

_available: dict[str, str | None] = {}


class _Block(NamedTuple):
    """A `with` block that chose a backend and has not ended where it is among the open ones."""

    name: str
    owner: use_backend
    ended: list[bool]  # one element: whether the block has ended in some other context


# The open blocks of this context, the innermost last.
_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("fa_ops_backend", default=())
open_blocks = _blocks.get  # a C function: () outside all blocks

# The innermost block of the code that Dynamo traces, which cannot trace context variables.
_traced: str | None = None


class use_backend:
    """Set the backend of calls inside a `with` block that name none; "auto" restores the choice.

    The choice holds in its context (see `contextvars`): in this thread, and in this task of asyncio
    and those that it starts. Threads started inside the block do not have it. Blocks may end in any
    order. Works in and around compiled code. `set_backend` chooses for the whole process.

    Raises:
        ValueError: no backend has that name.

    Examples:
        >>> with fa_ops.use_backend("reference"):
        ...     out = fa_ops.attention(q, k, v)
    """

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        self.entered: list[_Block] = []  # as blocks of one object may be nested, or overlap
        self.previous: list[str | None] = []  # the same in code that Dynamo traces

    def __enter__(self) -> None:
        global _traced
        if is_traced_by_dynamo():
            self.previous.append(_traced)
            _traced = self.name
            return
        block = _Block(self.name, self, [False])
        self.entered.append(block)
        _blocks.set((*_open_blocks(), block))

    def __exit__(self, *_: object) -> None:
        global _traced
        if is_traced_by_dynamo():
            _traced = self.previous.pop()
            return
        blocks = _open_blocks()
        mine = [block for block in blocks if block.owner is self]
        if mine:  # contexts that were copied inside the block keep the choice
            self.entered.remove(mine[-1])
            _blocks.set(tuple(block for block in blocks if block is not mine[-1]))
        else:  # a generator that ends in another context than it began in
            self.entered.pop().ended[0] = True


def _open_blocks() -> tuple[_Block, ...]:
    return tuple(block for block in _blocks.get() if not block.ended[0])


def set_backend(name: str | None) -> None:
    """Set the backend of the process's calls that name none and are in no block of `use_backend`.

    As the environment variable `FA_OPS_BACKEND` does when fa_ops is imported. For all threads at
    once, autograd's among them. "auto" or None: the fastest that supports the call.

    Raises:
        ValueError: no backend has that name.

    Examples:
        >>> fa_ops.set_backend("reference")
        >>> fa_ops.set_backend(None)
    """
    global default
    if name is not None:
        check_name(name)
    default = name


def chosen() -> str | None:
    """The backend of calls that name none, here and now; None: the fastest."""
    if is_traced_by_dynamo():
        return _traced or _this_module.chosen_in_context or default
    return _chosen_in_context() or default if open_blocks() else default


def _chosen_in_context() -> str | None:
    blocks = _open_blocks()
    return blocks[-1].name if blocks else None


def __getattr__(name: str) -> str | None:
    """`chosen_in_context`, an attribute because Dynamo guards on those of modules."""
    if name == "chosen_in_context":
        return _chosen_in_context()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_this_module = sys.modules[__name__]


def check_name(name: str) -> None:
    """Raise ValueError unless a backend has that name."""
    if not isinstance(name, str) or name not in (*BACKENDS, "auto"):
        known = ", ".join(repr(one) for one in BACKENDS)
        raise ValueError(f"backend must be 'auto' or one of {known}, got {name!r}")


def choose(call: Call) -> ModuleType:
    """The backend that runs this call: the one asked for, or the first that supports it.

    Raises:
        ValueError: no backend has the name asked for.
        NotImplementedError: the backend asked for, or every one, refuses the call; the message
            says why.
    """
    name, device = call.backend, call.query.device
    check_name(name)
    reasons = {}
    candidates = AUTO.get(device.type, ()) if name == "auto" else (name,)
    for candidate in candidates:
        reason = available_error(candidate)
        backend = load(candidate) if reason is None else None
        reasons[candidate] = reason or backend.supports(call)
        if reasons[candidate] is None:
            for preferred in reasons:
                _warn_if_missing(preferred)
            return backend
    if name != "auto":
        raise NotImplementedError(f"backend {name!r} cannot run this call: {reasons[name]}")
    lines = "".join(f"\n  {candidate}: {reason}" for candidate, reason in reasons.items())
    raise NotImplementedError(f"no backend can run this call on {device}:{lines}")


@functools.cache
def _warn_if_missing(name: str) -> None:
    """Warn that a backend made for this GPU cannot run on this machine, once per process."""
    reason = available_error(name)
    if reason is None:
        return
    try:
        is_for_this_gpu = getattr(load(name), "is_for_this_gpu", bool)()
    except ImportError:
        is_for_this_gpu = True  # the module that could tell cannot be imported
    if is_for_this_gpu:
        warnings.warn(
            f"fa_ops' {name!r} backend, the fastest on this GPU, is not available: {reason}. "
            "Slower kernels run instead; backend=, use_backend or FA_OPS_BACKEND choose one "
            "without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )


def load(name: str) -> ModuleType:
    """The backend's module."""
    return importlib.import_module(f"..backends.{name}", __package__)


def available_error(name: str) -> str | None:
    """Why the backend cannot run on this machine at all, or None. Determined once per process."""
    if name not in _available:
        try:
            _available[name] = load(name).available_error()
        except ImportError as error:
            remedy = f"; pip install {error.name}" if error.name in _PACKAGES else ""
            _available[name] = f"cannot be imported: {error}{remedy}"
    return _available[name]


def refusal(name: str, call: Call) -> str | None:
    """Why the backend cannot run this call; None where it can."""
    return available_error(name) or load(name).supports(call)


def mask_blocks_pay(queries: int, mask: Tensor) -> bool:
    """Whether attention with a dense mask is faster with `mask_blocks`, counting their making.

    With fewer queries than a tile has, making them reads as much of the mask as attention does.
    """
    return queries >= MASK_BLOCK and skips_tiles(mask.device.type)


def merging_backend() -> str:
    """The backend of `merge_states`: the default one, or what merges in its place."""
    name = chosen() or "auto"
    return _MERGING.get(name, name)


def skips_tiles(device: str) -> bool:
    """Whether the usual backend of a device skips by `mask_blocks`, and some backend makes them."""
    name = chosen() or "auto"
    names = AUTO.get(device, ()) if name == "auto" else (name,)
    able = [name for name in names if available_error(name) is None]
    return bool(able) and able[0] in _SKIPPING and any(n in _SUMMARISING for n in able)


def backends() -> list[tuple[str, str | None]]:
    """Every backend, with why it cannot run on this machine, or None where it can."""
    return [(name, available_error(name)) for name in BACKENDS]


class CallExplanation(NamedTuple):
    """The backend and kernel of a call, and the reasons why other backends do not run it."""

    backend: str | None  # None: none can
    kernel: str | None
    route: str
    reasons: dict[str, str | None]  # of every backend; None where it can run the call

    def __str__(self) -> str:
        lines = [f"backend: {self.backend or 'none'}"]
        if self.kernel is not None:
            lines += [f"kernel: {self.kernel}", f"route: {self.route}"]
        lines += [f"  {name}: {reason or 'can run this'}" for name, reason in self.reasons.items()]
        return "\n".join(lines)
