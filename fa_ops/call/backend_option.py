"""The option `backend`: the names of backends, and the choice for calls that give none.

A call may name its backend; otherwise `use_backend` does, then `set_backend` or the environment
variable FA_OPS_BACKEND. The last resort is "auto": the fastest that supports the call.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from typing import NamedTuple

from fa_ops.tracing import is_traced_by_dynamo

BACKENDS = ("hopper", "triton", "cpu", "reference")

# The process's choice.
default: str | None = os.environ.get("FA_OPS_BACKEND") or None


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
