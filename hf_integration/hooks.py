"""The names of fa_ops, hooks into transformers, and errors of packages that cannot be imported.

Hooks enable features that transformers reserves for implementations whose name contains "flash".
There are two: vision and audio towers describe packed images by cu_seq_lens instead of looping over
them, and continuous batching accepts the implementation. Each hook first checks that this
transformers release has the code to be patched. If not, the feature stays off, and `states` holds
the reason.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType

NAME = "fa_ops"
PAGED = "paged|" + NAME
EIGHT_BIT = NAME + "_8bit"
FLASH_NAMES = ("flash_attention_2", "paged|flash_attention_2")  # `register` may take these too
names = {NAME, PAGED, EIGHT_BIT}  # all names under which our functions are registered
_IS_FLASH = "is_flash_attention_requested"
_BATCHING = "transformers.generation.continuous_batching"

# Feature -> "on", or why it is off.
states: dict[str, str] = {"continuous batching": "not installed yet"}


def is_ours(config: object) -> bool:
    """Whether the attention implementation of a config is one of ours."""
    return getattr(config, "_attn_implementation", None) in names


def original_of(function: Callable | None) -> Callable | None:
    """What is wrapped now: without a wrapper of modules that were dropped and imported again."""
    scope = getattr(function, "__globals__", {})
    name = scope.get("__name__", "")
    is_ours = hasattr(function, "_fa_ops") and name.startswith(f"{__package__}.")
    is_dropped = is_ours and getattr(sys.modules.get(name), "__dict__", None) is not scope
    return function.__wrapped__ if is_dropped else function


def install_cu_seqlens(module: ModuleType) -> bool:
    """Make the towers of a modeling module pass cu_seq_lens to our function. Idempotent."""
    is_flash = original_of(getattr(module, _IS_FLASH, None))
    if is_flash is None:
        return False
    if hasattr(is_flash, "_fa_ops"):
        return True
    try:
        source = inspect.getsource(module)
    except OSError:
        return False
    if "cu_seq_lens_q=" not in source:
        return False  # the module uses the function for something else
    setattr(module, _IS_FLASH, _accepting_ours(is_flash))
    return True


def install_batching() -> None:
    """Make continuous batching accept our name, and set its state. Idempotent."""
    if states["continuous batching"] == "on":
        return
    try:
        modules = [
            importlib.import_module(f"{_BATCHING}.{name}")
            for name in ("continuous_api", "initialization", "cache")
        ]
    except ImportError as error:
        states["continuous batching"] = f"off: {error}"
        return
    update = inspect.signature(modules[2].PagedAttentionCache.update).parameters
    if not ("kwargs" in update or {"read_index", "write_index"} <= update.keys()):
        states["continuous batching"] = "off: PagedAttentionCache.update has other arguments"
        return
    for module in modules:
        is_flash = original_of(getattr(module, _IS_FLASH, None))
        if is_flash is not None and not hasattr(is_flash, "_fa_ops"):
            setattr(module, _IS_FLASH, _accepting_ours(is_flash))
    for name in ("lazy_import_flash_attention", "lazy_import_paged_flash_attention"):
        imports = original_of(getattr(modules[1], name, None))
        if imports is not None and not hasattr(imports, "_fa_ops"):
            setattr(modules[1], name, _with_cache(imports, name))
    states["continuous batching"] = "on"


def _accepting_ours(is_flash: Callable) -> Callable:
    """`is_flash_attention_requested` that also returns True for our name."""

    @functools.wraps(is_flash)
    def wrapper(config=None, requested_attention_implementation=None, *args, **kwargs):
        name = requested_attention_implementation
        if name in names or (name is None and is_ours(config)):
            return True
        return is_flash(config, requested_attention_implementation, *args, **kwargs)

    wrapper._fa_ops = True
    return wrapper


def _with_cache(imports: Callable, name: str) -> Callable:
    """The import of flash functions, of which continuous batching needs the one with a cache."""

    @functools.wraps(imports)
    def wrapper(implementation, *args, **kwargs):
        if implementation in names:
            if name == "lazy_import_paged_flash_attention":
                return None, is_ours
            return (None, None, is_ours, None, None), (dict, dict)
        return imports(implementation, *args, **kwargs)

    wrapper._fa_ops = True
    return wrapper


# Errors of the packages that this one needs.


def failed_import(user: str, package: str, oldest: str, error: BaseException) -> ImportError:
    """An ImportError for a package that is missing or too old, or else with its own cause."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "none"
    least = [int(n) for n in oldest.split(".")]
    if [int(n) for n in re.findall(r"\d+", found)[: len(least)]] < least:
        remedy = f"pip install '{package}>={oldest}'"
        return ImportError(f"{user} needs {package} {oldest} or later, found {found}: {remedy}")
    while error.__cause__ is not None:
        error = error.__cause__
    return ImportError(f"{package} {found} cannot be imported: {error}")
