"""`python -m fa_ops cubins`: the wheel fa-ops-cubins, Hopper kernels compiled ahead of time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fa_ops import __version__
from fa_ops.backends.hopper.runtime import cubin_cache
from fa_ops.backends.hopper.runtime import nvrtc as compiler
from fa_ops.cli import warm

_PROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "fa-ops-cubins"
version = "{version}"
description = "Hopper kernels of fa-ops, compiled ahead of time by NVRTC {nvrtc}"
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["fa-ops=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
_BUILD = "import sys, hatchling.build as backend; print(backend.build_wheel(sys.argv[1]))"


def run(
    folder: Annotated[Path, typer.Argument(help="where the wheel is written")] = Path("dist"),
    head_dim: warm.HeadDims = None,
    dtype: warm.Dtypes = None,
    eight_bit: warm.EightBit = False,
) -> None:
    """Build a wheel of the Hopper kernels of common calls, with or without a GPU.

    Where it is installed beside the same version of fa_ops, these kernels are not compiled at run
    time. Needs hatchling.
    """
    console = Console(highlight=False)
    variants = warm.chosen(head_dim, dtype, eight_bit)
    warm.compile_all(variants, console)
    programs = [
        compiler.program(kind, entry, defines)
        for kind, entries, defines in variants
        for entry in entries
    ]
    with tempfile.TemporaryDirectory() as project:
        _write_project(Path(project), programs)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", _BUILD, str(folder.absolute())]
        built = subprocess.run(command, cwd=project, capture_output=True, text=True)
    if built.returncode:
        raise SystemExit(f"hatchling could not build the wheel:\n{built.stderr}")
    wheel = folder / built.stdout.split()[-1]
    size = wheel.stat().st_size / 2**20
    console.print(f"{len(programs)} kernels, {size:.1f} MiB: {wheel}", soft_wrap=True)


def _write_project(project: Path, programs: list[compiler.Program]) -> None:
    """A project of one package whose files are the machine code of the programs."""
    package = project / cubin_cache.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text('"""Kernels that fa_ops loads instead of compiling."""\n')
    for program, code in zip(programs, compiler.compiled(programs)):
        (package / compiler.file_name(program)).write_bytes(code)
    nvrtc = ".".join(map(str, compiler.version(compiler.nvrtc())))
    text = _PROJECT.format(version=__version__, nvrtc=nvrtc, package=package.name)
    (project / "pyproject.toml").write_text(text)
