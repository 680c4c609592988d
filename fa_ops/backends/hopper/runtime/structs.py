"""Layouts of the kernels' parameters, read from their C declarations in `cuda/`.

A struct or a parameter list is declared once, in C++; what packs it takes offsets and formats from
here. Every program that includes a struct asserts that the compiler lays it out the same way.
"""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent.parent / "cuda"

# Format, size and alignment of what is not a struct.
_SCALARS = {"int": ("i", 4, 4), "u32": ("I", 4, 4), "float": ("f", 4, 4), "long long": ("q", 8, 8)}
_TENSOR_MAP = "128s", 128, 64
_FIELD = re.compile(r"(?:const )?((?:unsigned )?(?:long long|\w+)\b\*?)\s+(.*)")


class Field(NamedTuple):
    """A member of a struct or a parameter of a kernel."""

    name: str
    offset: int
    size: int
    format: str  # as in `struct`, of all its numbers, padding within included
    condition: str = ""  # of the #if that it is declared under; such fields come last


class ParamsLayout:
    """The members of a struct, or the parameters of a kernel, in order.

    Members under an #if come last. A kernel has those of one #if at most: each begins where the
    members without a condition end.
    """

    def __init__(self, text: str) -> None:
        self.fields: dict[str, Field] = {}
        self.alignment, offset, end, condition, begin = 1, 0, 0, "", None
        text = re.sub(r"//.*", "", text)
        for declaration in re.findall(r"^#.*|[^;#]+(?=;|\Z)", text, re.M):
            if declaration.startswith("#if"):
                begin = offset if begin is None else begin
                offset, condition = begin, declaration.removeprefix("#if ")
            elif declaration.strip() and not declaration.startswith("#"):
                for name, (format, size, alignment) in _declared(" ".join(declaration.split())):
                    offset += -offset % alignment
                    self.fields[name] = Field(name, offset, size, format, condition)
                    offset += size
                    self.alignment, end = max(self.alignment, alignment), max(end, offset)
        self.size = end + -end % self.alignment

    @property
    def format(self) -> str:
        """The `struct` format of all fields."""
        return self.packer().format.removeprefix("<") if self.fields else ""

    def packer(
        self, first: str | None = None, last: str | None = None, packed: tuple[str, ...] = ()
    ) -> struct.Struct:
        """Packs the fields from `first` to `last`, up to the one after `last`.

        Of those under an #if it packs the ones under the same #if as the first.

        Args:
            first, last: names of fields; the first and the last by default.
            packed: ranges "FIRST:LAST" of fields that are given as bytes, each one argument.
        """
        names = list(self.fields)
        begin = names.index(first) if first else 0
        end = names.index(last) + 1 if last else len(names)
        stop = self.fields[names[end]].offset if end < len(names) else self.size
        starts = {names.index(a): names.index(b) for a, b in (x.split(":") for x in packed)}
        text, i, offset = "<", begin, self.fields[names[begin]].offset
        conditions = (self.fields[name].condition for name in names[begin:end])
        condition = next(filter(None, conditions), "")
        while i < end:
            field, last_index = self.fields[names[i]], starts.get(i, i)
            if field.condition not in ("", condition):
                i += 1
                continue
            text += f"{field.offset - offset}x" if field.offset > offset else ""
            offset = self.fields[names[last_index]].offset + self.fields[names[last_index]].size
            text += f"{offset - field.offset}s" if i in starts else field.format
            i = last_index + 1
        return struct.Struct(text + (f"{stop - offset}x" if stop > offset else ""))

    def offsets(self) -> tuple[int, ...]:
        """The offset of each field."""
        return tuple(field.offset for field in self.fields.values())

    def unpack(self, data: bytes) -> dict[str, tuple]:
        """The numbers of each field that lies in `data`."""
        fields = [f for f in self.fields.values() if f.offset + f.size <= len(data)]
        return {f.name: struct.unpack_from("<" + f.format, data, f.offset) for f in fields}

    def assertions(self, name: str) -> str:
        """C++ that asserts that a struct has this layout.

        NVRTC before 13.5 knows neither `offsetof` nor `__builtin_offsetof`; all versions know the
        `__INTADDR__` that its front end implements `offsetof` with.
        """
        text = ""
        for field in self.fields.values():
            line = f"static_assert(__INTADDR__(&(({name}*)0)->{field.name}) == {field.offset});\n"
            condition = field.condition
            text += f"#if {condition}\n{line}#endif\n" if condition else line
        return text


@functools.cache
def struct_layout(source: str, name: str) -> ParamsLayout:
    """The layout of a struct that a file declares, its methods left out."""
    return ParamsLayout(_struct_text(_text(source), name))


@functools.cache
def kernel_layout(source: str, kernel: str) -> ParamsLayout:
    """The layout of a kernel's parameter list."""
    text = _text(source)
    found = re.search(rf"\b{kernel}\(((?:const )?\w+\s?\*[^)]*)\)", text)
    return ParamsLayout(found[1].replace("\n", " ").replace(",", ";"))


def _struct_text(text: str, name: str) -> str:
    body = re.search(rf"^struct {name} \{{\n(.*?)^\}};", text, re.S | re.M)[1]
    return re.split(r"\n\s*DEVICE ", body)[0]


def _declared(declaration: str) -> list[tuple[str, tuple[str, int, int]]]:
    """(name, (format, size, alignment)) of each variable of a declaration."""
    kind, names = _FIELD.fullmatch(declaration).groups()
    found = []
    for name in names.split(","):
        is_pointer = kind.endswith("*") or "*" in name
        format, size, alignment = ("Q", 8, 8) if is_pointer else _layout_of(kind)
        name, _, count = name.strip(" *").rstrip("]").partition("[")
        times = _constant(count) if count else 1
        found.append((name, (format * times, size * times, alignment)))
    return found


def _layout_of(kind: str) -> tuple[str, int, int]:
    if kind == "TensorMap":
        return _TENSOR_MAP
    if kind in _SCALARS:
        return _SCALARS[kind]
    layout = struct_layout(_files_of_structs()[kind], kind)
    return layout.format, layout.size, layout.alignment


@functools.cache
def _text(source: str) -> str:
    return (SOURCES / source).read_text()


@functools.cache
def _files_of_structs() -> dict[str, str]:
    """The file that declares each struct that parameters have, by its name; headers come first."""
    found, declared = {}, re.compile(r"^struct (\w+) \{", re.M)
    for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")):
        found |= dict.fromkeys(declared.findall(_text(path.name)), path.name)
    return found


@functools.cache
def _constant(name: str) -> int:
    declared = re.compile(rf"constexpr int {name} = (\d+);")
    found = (declared.search(_text(path.name)) for path in SOURCES.glob("*.cuh"))
    return int(next(filter(None, found))[1])
