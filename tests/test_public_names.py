"""The names and signatures that users may call, as `public_names.txt` has them.

`python -m tests.test_public_names > tests/public_names.txt` writes the file. A difference is read
like code: a name that goes, or an argument that changes its place, breaks the programs of users.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import ForwardRef

import pytest

from tests.imports import PACKAGES

PATH = Path(__file__).with_name("public_names.txt")
COMPAT = "fa_ops.compat"
MODULES = (
    "fa_ops", "fa_ops.distributed", "fa_ops.testing", COMPAT, "compile_passes", "hf_integration",
    "hf_integration.diffusers",
    # what stands in for modules of other packages
    f"{COMPAT}.flash_attn", f"{COMPAT}.flash_attn.bert_padding",
    f"{COMPAT}.flash_attn.flash_attn_interface", f"{COMPAT}.flash_attn.layers.rotary",
    f"{COMPAT}.flash_attn.ops.triton.rotary", f"{COMPAT}.flash_attn_interface",
    f"{COMPAT}.flash_attn.raw", f"{COMPAT}.ring_flash_attn",
)  # fmt: skip


def described(module: str) -> list[str]:
    """A line for each public name of a module, and for each public attribute of its classes."""
    lines = []
    namespace = vars(importlib.import_module(module))
    for name in sorted(namespace.get("__all__") or _defined(namespace)):
        value = namespace[name]
        if isinstance(value, ModuleType):
            lines.append(f"module {name}")
        elif isinstance(value, type):
            lines += [f"class {name}{_constructor(value)}", *_attributes(value)]
        elif callable(value):
            lines.append(f"{name}{_signature(value)}")
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return [part for line in lines for part in _wrapped(line)]


def _defined(namespace: dict[str, object]) -> Iterator[str]:
    """Names of functions and classes of our packages in a module without `__all__`."""
    for name, value in namespace.items():
        is_public = not name.startswith("_") or name.startswith("_flash_attn")
        if callable(value) and is_public and _is_ours(value):
            yield name


def _is_ours(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in PACKAGES


def _constructor(cls: type) -> str:
    ours = [base for base in cls.__mro__ if _is_ours(base)]
    has_own = any(vars(base).keys() & {"__init__", "__new__"} for base in ours)
    return _signature(cls) if has_own else ""


def _attributes(cls: type) -> Iterator[str]:
    """Public methods and properties that our packages define."""
    namespace = {}
    for base in filter(_is_ours, reversed(cls.__mro__)):
        namespace |= vars(base)
    for name, value in sorted(namespace.items()):
        if name.startswith("_") or name in getattr(cls, "_fields", ()):
            continue
        if isinstance(value, property | cached_property):
            yield f"  {name}: property"
        elif callable(method := getattr(cls, name)):
            yield f"  {name}{_signature(method)}"


def _signature(function: object) -> str:
    """Parameters and result; annotations are as they are written in the source."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=_text(p.annotation)) for p in signature.parameters.values()]
    result = _text(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=result))


class _Text:
    """An annotation that is printed as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _text(annotation: object) -> object:
    if annotation is inspect.Signature.empty:
        return annotation
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    return _Text(
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    )


def _wrapped(line: str) -> list[str]:
    """Lines of up to 98 columns, which end between arguments."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    parts = line.replace(" ", "\xa0").replace(",\xa0", ", ")
    filled = textwrap.wrap(
        parts, 98, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [part.replace("\xa0", " ") for part in filled]


def stored() -> dict[str, list[str]]:
    sections = PATH.read_text().strip().split("\n\n")
    return {name: lines for name, *lines in (section.split("\n") for section in sections)}


@pytest.mark.parametrize("module", MODULES)
def test_public_names(module):
    if module == "hf_integration.diffusers":
        pytest.importorskip("diffusers")
    change = "\n".join(difflib.unified_diff(stored()[module], described(module), lineterm=""))
    assert not change, f"write {PATH.name} anew if this is meant:\n{change}"


def test_every_section_is_compared():
    assert tuple(stored()) == MODULES


if __name__ == "__main__":
    print("\n\n".join("\n".join([name, *described(name)]) for name in MODULES))
