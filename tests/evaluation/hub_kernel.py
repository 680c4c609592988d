"""`python -m tests.evaluation.hub_kernel FOLDER`: the package as a kernel of the Hugging Face Hub.

Hugging Face `kernels` imports a kernel under a name of its own, so that several versions can be
loaded in one process. Imports within the package must therefore be relative, and its operators must
not be those of another version.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import fa_ops
from fa_ops.compat import flash_attn

# Variants without compiled code, as `kernels` names them, and the backend of each.
_BACKENDS = {
    "torch-cpu": {"type": "cpu"},
    "torch-cuda": {"type": "cuda", "archs": ["8.0+PTX"]},  # and everything newer
}
_CARD = """\
---
library_name: kernels
license: apache-2.0
---

Fused attention for PyTorch: `attention`, `attention_varlen`, `attention_with_kv_cache` and
`quantized_attention` of fa_ops, and the functions of flash-attn. Kernels are compiled on first use.
Needs torch 2.11 and Python 3.10 or later.
"""


def main(
    folder: Annotated[Path, typer.Argument(help="a folder that does not exist, or is empty")],
    name: Annotated[str, typer.Option(help="the name of the kernel's repository")] = "fa-ops",
    version: Annotated[int, typer.Option(min=0, help="of the interface; 0: may change")] = 1,
) -> None:
    """Write a kernel repository that Hugging Face `kernels` can load, here or from the Hub."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise typer.BadParameter(f"must be lower-case letters, digits and dashes, got {name!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"{folder} is not an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error.strerror}") from None
    for variant in _BACKENDS:
        write(folder / "build" / variant, variant, name, version)
        typer.echo(f"{folder / 'build' / variant}")
    (folder / "README.md").write_text(_CARD)


def write(folder: Path, variant: str, name: str, version: int) -> None:
    """Write one variant: the package, and its metadata.json."""
    identifier = f"{name.replace('-', '_')}_{variant.removeprefix('torch-')}_{_hash()}"
    files = sources(identifier)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    digests = {
        path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for path, text in sorted(files.items())
    }
    metadata = {
        "id": identifier, "name": name, "version": version, "license": "Apache-2.0",
        "python-depends": [], "backend": _BACKENDS[variant],
        "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _hash() -> str:
    """Seven digits that differ between any two versions of the sources."""
    text = json.dumps(sources("fa"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:7]


# The sources of fa_ops as a package of any name, which registers its operators in a namespace.

_ROOT = Path(fa_ops.__file__).parent
_SUFFIXES = (".py", ".cu", ".cuh")
# Commands, what they and tests need, and what changes other packages.
_LEFT_OUT = (
    "__init__.py", "__main__.py", "bench", "cli", "testing", "compat/__init__.py", "compat/sdpa.py",
)  # fmt: skip


def sources(namespace: str) -> dict[str, str]:
    """The files of the package by path, whose operators are ``torch.ops.<namespace>``.

    Raises:
        ValueError: an import that cannot be made relative, or of a module that is left out.
    """
    names = [name for name in _files() if not _is_left_out(name)]
    found = {name: (_ROOT / name).read_text() for name in names}
    found["compat/__init__.py"] = '"""Functions with the names of other libraries."""\n'
    found["__init__.py"] = _public_names()
    for name in found:
        if name.endswith(".py"):
            found[name] = _in_namespace(_relative(name, found[name], names), namespace)
    return found


def _public_names() -> str:
    """`fa_ops/__init__.py` without what changes other packages, and the functions of flash-attn."""
    source = (_ROOT / "__init__.py").read_text()
    left_out = (
        "from fa_ops import compat\n", '    "compat",\n',
        "    from fa_ops import testing as testing\n",
        '"testing"',  # a name of the tuple of submodules
    )  # fmt: skip
    for part in left_out:
        assert part in source, part
        source = source.replace(part, "")
    names = flash_attn.__all__
    functions = f"from fa_ops.compat.flash_attn import {', '.join(names)}\n"
    return f"{source}\n{functions}\n__all__ += {names!r}\n"


def _files() -> Iterator[str]:
    for path in sorted(_ROOT.rglob("*")):
        if path.suffix in _SUFFIXES:
            yield path.relative_to(_ROOT).as_posix()


def _is_left_out(name: str) -> bool:
    return any(name == other or name.startswith(other + "/") for other in _LEFT_OUT)


def _relative(name: str, source: str, names: list[str]) -> str:
    """The source of a file with relative imports of the package."""
    lines, dots = source.splitlines(keepends=True), "." * len(Path(name).parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.split(".")[0] == "fa_ops"]
            if ours:
                raise ValueError(f"{name}:{node.lineno}: import {ours[0]} cannot be made relative")
        if not isinstance(node, ast.ImportFrom) or node.module.split(".")[0] != "fa_ops":
            continue
        inside = node.module.split(".")[1:]
        for alias in node.names:
            if not _is_there([*inside, alias.name], names):
                raise ValueError(f"{name}:{node.lineno}: {node.module}.{alias.name} is left out")
        line, start = lines[node.lineno - 1], node.col_offset
        before = f"from {node.module} import"
        assert line.startswith(before, start), line
        after = f"from {dots}{'.'.join(inside)} import"
        lines[node.lineno - 1] = line[:start] + after + line[start + len(before) :]
    return "".join(lines)


def _is_there(parts: list[str], names: list[str]) -> bool:
    """Whether a module, or the module of which this is an attribute, is in the package."""
    module, attribute_of = "/".join(parts), "/".join(parts[:-1])
    files = {f"{module}.py", f"{module}/__init__.py"}
    if attribute_of:
        files |= {f"{attribute_of}.py", f"{attribute_of}/__init__.py"}
    return not files.isdisjoint(names)


def _in_namespace(source: str, namespace: str) -> str:
    source = re.sub(r"\btorch\.ops\.fa\b", f"torch.ops.{namespace}", source)
    source = re.sub(r"\bfa::", f"{namespace}::", source)
    return source.replace('Library("fa",', f'Library("{namespace}",')


if __name__ == "__main__":
    typer.run(main)
