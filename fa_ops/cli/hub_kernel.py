"""`python -m fa_ops hub-kernel`: the package as a kernel for Hugging Face `kernels`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from fa_ops.cli.hub_sources import sources

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


def run(
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
