"""Makes Triton's interpreter faster, and has it multiply some float32 in parts, as large calls."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types

import pytest

from fa_ops.backends.triton import configs, launch


@pytest.fixture(scope="session", autouse=True)
def real_float32_products():
    """The rule of how float32 is multiplied. The calls of these tests, all small, take the ordinary
    units but for some head dims, whose parts are those of a launch (8, 40) or made as they are
    loaded (24, 72): the interpreter takes many times as long for that.
    """
    rule = configs.float32_products

    def products(arch, scores, rows, head_dim, *rest):
        return {8: "split", 40: "split", 24: "loaded", 72: "loaded"}.get(head_dim, "ieee")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(configs, "float32_products", products)
        yield rule


@pytest.fixture(scope="session", autouse=True)
def strict_allocation():
    """`launch.empty` that refuses torch.Size, as the function that allocates on a GPU does."""

    def empty(size, stride, *rest):
        assert type(size) is tuple and type(stride) is tuple
        return launch.empty(size, stride, *rest)

    with pytest.MonkeyPatch.context() as patches:
        for name in ("append", "cached", "decode", "forward", "matrix_products", "short_rows"):
            module = importlib.import_module(f"{launch.__package__}.{name}")
            patches.setattr(module, "empty", empty)
        yield


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """The interpreter without work that is repeated, two thirds of its time.

    - In every function that a kernel calls, it looks for builtins among all members of
      `triton.language`, to replace those that it has not replaced yet.
    - Sums and products of integers are repeated in 64 bits, for an assertion that it makes in debug
      mode only.
    - The type of a block is made for every result, with its name, and a table of dtypes at each
      look at it.
    """
    if not launch.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patches:
        unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
        patches.setattr(builder, "options", unchecked)
        _replace_builtins_once(patches, interpreter)
        _remember_types(patches, interpreter)
        yield


def _replace_builtins_once(patches, interpreter):
    from triton import language

    @functools.cache
    def names(package) -> list[str]:
        members = inspect.getmembers(package)
        return [name for name, member in members if language.core.is_builtin(member)]

    def getmembers(package):
        found = names(package)
        if not found or not language.core.is_builtin(getattr(package, found[0])):
            return []  # all are replaced, or none
        return [(name, getattr(package, name)) for name in found]

    @functools.cache
    def packages(function) -> frozenset[str]:
        both = language, language.core
        return frozenset(
            x.__name__ for x in function.__globals__.values() if any(x is y for y in both)
        )

    replace, replaced = interpreter._patch_lang, set()

    def replace_once(function):
        """What the outermost call, the kernel's, replaced is restored at its end."""
        if packages(function) <= replaced:
            return None
        scope, is_kernel = replace(function), not replaced
        replaced.update(packages(function))
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (restore(), replaced.clear())
        return scope

    faster = types.SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
    patches.setattr(interpreter, "inspect", faster)
    patches.setattr(interpreter, "_patch_lang", replace_once)


def _remember_types(patches, interpreter):
    from triton.language import core

    numpy_dtype, make_block = interpreter._get_np_dtype, core.block_type.__init__
    dtypes, blocks = {}, {}

    def known_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    def known_block(block, element_ty, shape):
        sizes = [getattr(size, "value", size) for size in core._unwrap_if_constexpr(shape)]
        key = element_ty.name, *sizes
        if key not in blocks:
            make_block(block, element_ty, shape)
            blocks[key] = vars(block).copy()
        vars(block).update(blocks[key])

    patches.setattr(interpreter, "_get_np_dtype", known_dtype)
    patches.setattr(core.block_type, "__init__", known_block)
