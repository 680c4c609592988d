"""`python -m fa_ops warm` and `cubins`: Hopper kernels that are compiled ahead of time.

`warm` compiles them into the cache before their first call, `cubins` into the wheel fa-ops-cubins.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fa_ops import __version__
from fa_ops.backends.hopper.runtime import cubin_cache, nvrtc
from fa_ops.backends.hopper.runtime import warm as kernels
from fa_ops.bench import options, report

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in kernels.DTYPES}
HeadDims = Annotated[
    str | None, typer.Option(help="comma-separated multiples of 8; default: 64,128,192,256")
]
Dtypes = Annotated[
    str | None,
    typer.Option(help=f"comma-separated; default: {','.join(_DTYPES)}"),
]

EightBit = Annotated[bool, typer.Option("--eight-bit", help="kernels of 8-bit numbers too")]


def warm(head_dim: HeadDims = None, dtype: Dtypes = None, eight_bit: EightBit = False) -> None:
    """Compile the Hopper kernels of common calls into the cache, with or without a GPU."""
    console, variants = Console(highlight=False), chosen(head_dim, dtype, eight_bit)
    compiled = compile_all(variants, console)
    kernels = sum(len(variant.entries) for variant in variants)
    console.print(
        f"{compiled} kernels compiled, {kernels - compiled} were there: {nvrtc.cache_dir()}",
        soft_wrap=True,
    )


def chosen(head_dim: str | None, dtype: str | None, eight_bit: bool) -> list[kernels.Variant]:
    """The variants of the options `--head-dim`, `--dtype` and `--eight-bit`."""
    head_dims = kernels.COMMON_HEAD_DIMS
    if head_dim is not None:
        head_dims = options.integers("--head-dim", head_dim)
    for dim in head_dims:
        if dim not in kernels.HEAD_DIMS:
            largest = max(kernels.HEAD_DIMS)
            message = f"--head-dim must be a multiple of 8 from 8 to {largest}, got {dim}"
            raise typer.BadParameter(message)
    names = options.one_of("--dtype", options.words(dtype), _DTYPES)
    dtypes = [_DTYPES[name] for name in names]
    more = kernels.eight_bit_variants(head_dims, dtypes) if eight_bit else ()
    return [*kernels.variants(head_dims, dtypes), *more]


def _described(variant: kernels.Variant) -> str:
    macros = (f"{name}={value}" for name, value in variant.defines.items() if value)
    return f"{variant.kind} {' '.join(macros)}"


def compile_all(variants: list[kernels.Variant], console: Console) -> int:
    """Compile into the cache what it lacks; returns the number of kernels."""
    kinds = dict.fromkeys(variant.kind for variant in variants)
    shown = report.watched(variants, "compiling", "cpu", kinds, "programs", _described)
    try:
        return sum(kernels.compile_variant(variant) for variant in shown)
    except nvrtc.CompileError as error:
        raise SystemExit(str(error)) from None


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


def cubins(
    folder: Annotated[Path, typer.Argument(help="where the wheel is written")] = Path("dist"),
    head_dim: HeadDims = None,
    dtype: Dtypes = None,
    eight_bit: EightBit = False,
) -> None:
    """Build a wheel of the Hopper kernels of common calls, with or without a GPU.

    Where it is installed beside the same version of fa_ops, these kernels are not compiled at run
    time. Needs hatchling.
    """
    console = Console(highlight=False)
    variants = chosen(head_dim, dtype, eight_bit)
    compile_all(variants, console)
    programs = [
        nvrtc.program(kind, entry, defines)
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


def _write_project(project: Path, programs: list[nvrtc.Program]) -> None:
    """A project of one package whose files are the machine code of the programs."""
    package = project / cubin_cache.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text('"""Kernels that fa_ops loads instead of compiling."""\n')
    for program, code in zip(programs, nvrtc.compiled(programs)):
        (package / nvrtc.file_name(program)).write_bytes(code)
    compiler = ".".join(map(str, nvrtc.version(nvrtc.nvrtc())))
    text = _PROJECT.format(version=__version__, nvrtc=compiler, package=package.name)
    (project / "pyproject.toml").write_text(text)
