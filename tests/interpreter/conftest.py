"""Makes Triton's interpreter faster, and has it multiply some float32 in parts, as large calls."""

from __future__ import annotations

import functools
import inspect
import types

import pytest

from fa_ops.backends.triton import configs, launch


@pytest.fixture(scope="session", autouse=True)
def real_is_small():
    """The rule by which calls are small. Of the calls of these tests, all small, those with some
    head dims (8, 24, 40, 72) are multiplied as larger ones are, in parts: the interpreter takes
    many times as long for that.
    """
    rule = configs.is_small
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(configs, "is_small", lambda scores, head_dim: head_dim % 16 != 8)
        yield rule


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """In every function that a kernel calls, the interpreter looks for builtins among all members
    of `triton.language`, to replace those that it has not replaced yet. That was a third of its
    time.
    """
    if not launch.INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    @functools.cache
    def names(package) -> list[str]:
        members = inspect.getmembers(package)
        return [name for name, member in members if language.core.is_builtin(member)]

    def getmembers(package):
        found = names(package)
        if not found or not language.core.is_builtin(getattr(package, found[0])):
            return []  # all are replaced, or none
        return [(name, getattr(package, name)) for name in found]

    faster = types.SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "inspect", faster)
        yield
