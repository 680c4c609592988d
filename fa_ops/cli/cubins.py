"""`python -m fa_ops warm` and `cubins`: Hopper kernels that are compiled ahead of time.

`warm` compiles them into the cache before their first call, `cubins` into the wheel fa-ops-cubins.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console

from fa_ops import __version__
from fa_ops.backends.hopper import backward, decode, eight_bit, forward
from fa_ops.backends.hopper.configs import (
    MAX_NARROW_DIM,
    BackwardConfig,
    backward_config,
    decode_config,
    forward_config,
    mla_config,
    quantized_config,
)
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import cubin_cache, nvrtc
from fa_ops.backends.hopper.runtime.launch import Entry
from fa_ops.bench import command
from fa_ops.call.options import MAX_HEAD_DIM, NO_SCALES, PAGE_SCALES, ROW_SCALES

HEAD_DIMS = tuple(range(8, MAX_HEAD_DIM + 1, 8))
COMMON_HEAD_DIMS = (64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16)
# full, causal, with a window, with key ranges
_FORWARDS = ({}, {"window": True}, {"window": True, "left": True}, {"ranges": True})
_PAGES = (0, 16, 64)  # keys of a cache's page; 0: contiguous
_DECODED_PAGES = (*_PAGES, 1)  # 1: of any number that no copy brings whole


class Variant(NamedTuple):
    """The kernels that similar calls launch: the arguments of `nvrtc.cubins`."""

    kind: str
    entries: tuple[str, ...]
    defines: dict[str, int]


def variants(
    head_dims: Sequence[int] = COMMON_HEAD_DIMS, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Variant]:
    """The kernels of calls without dense masks, dropout, softcap, ALiBi and sinks.

    These are forward, backward, causal prefill of a cache, decoding with up to 8 queries of a KV
    head, decoding over a latent cache, and what writes new keys to a cache. Over 256 features there
    are no kernels that attend a cache.
    """
    for dtype in dtypes:
        yield from _appends(dtype, dtype)
    for D, dtype in itertools.product(head_dims, dtypes):
        yield from _forwards(D, dtype)
        for page in _PAGES if D <= MAX_NARROW_DIM else ():
            config = forward_config(D, D, page=page)
            defines = macros(config, dtype, window=True, kv_lens=True)
            yield Variant("forward", ("forward",), defines)
        for page in _DECODED_PAGES if D <= MAX_NARROW_DIM else ():
            config = decode_config(D, D, 8, page)
            defines = macros(config, dtype, paged=page > 0)
            yield Variant("decode", _names(decode.entries_of(config)), defines)
        for config, features in dict.fromkeys(_backwards(D)):
            defines = macros(config, dtype, **dict(features))
            entries = _names(backward.entries_of(config, defines))
            yield Variant("backward", entries, defines)
    for dtype, page in itertools.product(dtypes, _DECODED_PAGES):
        config = mla_config(page)
        defines = macros(config, dtype, paged=page > 0)
        yield Variant("mla", _names(decode.entries_of(config)), defines)


def _appends(dtype: torch.dtype, cached: torch.dtype) -> Iterator[Variant]:
    """Without rotation, and with tables in float32 and in the dtype of the query."""
    for angles in (None, torch.float32, dtype):
        yield Variant("append", ("append",), decode.append_defines(dtype, cached, angles))


def _backwards(D: int) -> Iterator[tuple[BackwardConfig, tuple[tuple[str, bool], ...]]]:
    """Configurations and features of backward passes, groups of query heads whole or in parts."""
    for name in ("", "window", "ranges"):
        features = ((name, True),) if name else ()
        for pairs, split in itertools.product((False, True), repeat=2):
            config = backward_config(D, D, prefers_pairs=pairs, differs_by_row=name == "ranges")
            yield config, (*features, ("split", split))
        if name != "ranges":
            for sums_rows in (False, True):
                config = backward_config(D, D, whole_heads=True, sums_rows=sums_rows)
                yield config, (*features, ("split", False))


def _forwards(D: int, dtype: torch.dtype) -> Iterator[Variant]:
    config = forward_config(D, D)
    for features in _FORWARDS:
        defines = macros(config, dtype, **features)
        yield Variant(config.kernel, (config.kernel,), defines)


def eight_bit_variants(
    head_dims: Sequence[int] = COMMON_HEAD_DIMS, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Variant]:
    """The kernels of `quantized_attention` with its defaults, and of `attention` of e4m3 tensors.

    Full and causal, for the head dims that the kernels have. And those of e4m3 caches, with up to 8
    queries of a KV head, and without scales of tokens.
    """
    for dtype in dtypes:
        yield Variant("dequantize", ("dequantize",), forward.dequantize_defines(dtype))
        yield from _appends(dtype, eight_bit.E4M3)
    narrow = [D for D in head_dims if D <= MAX_NARROW_DIM]
    for D, dtype, page in itertools.product(narrow, dtypes, _DECODED_PAGES):
        for scales in (NO_SCALES, ROW_SCALES, PAGE_SCALES)[: 3 if page else 2]:
            config = decode_config(D, D, 8, page, is_e4m3=True, scales=scales)
            defines = macros(config, dtype, paged=page > 0)
            yield Variant("decode", _names(decode.entries_of(config)), defines)
    for D in filter(eight_bit.has_head_dim, head_dims):
        for window in (False, True):
            config = quantized_config(D, D, has_16_bits=True)
            for dtype in dtypes:
                defines = macros(config, dtype, window=window)
                yield Variant("quantized", ("quantized",), defines)
            for head_scales in (False, True):
                scale_defines = macros(
                    quantized_config(D, D), torch.bfloat16, is_int8=False, window=window,
                    signs=True, head_scales=head_scales,
                )  # fmt: skip
                yield Variant("quantized", ("quantized",), scale_defines)
        for dtype in dtypes:
            defines = eight_bit.quantize_defines(dtype, D, D)
            yield Variant("quantize", ("quantize",), defines)
        yield Variant("scaled", ("scaled",), eight_bit.e4m3_defines(D))


def _names(entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries)


def compile_variant(variant: Variant) -> int:
    """Compile a variant into the cache; returns the number of kernels that were missing.

    Raises:
        CompileError: NVRTC is missing, or refuses a source.
    """
    kind, entries, defines = variant
    missing = nvrtc.uncached(kind, entries, defines)
    nvrtc.cubins(kind, missing, defines)
    return len(missing)


# The commands.

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
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
    total = sum(len(variant.entries) for variant in variants)
    console.print(
        f"{compiled} kernels compiled, {total - compiled} were there: {nvrtc.cache_dir()}",
        soft_wrap=True,
    )


def chosen(head_dim: str | None, dtype: str | None, eight_bit: bool) -> list[Variant]:
    """The variants of the options `--head-dim`, `--dtype` and `--eight-bit`."""
    head_dims = COMMON_HEAD_DIMS
    if head_dim is not None:
        head_dims = command.integers("--head-dim", head_dim)
    for dim in head_dims:
        if dim not in HEAD_DIMS:
            largest = max(HEAD_DIMS)
            message = f"--head-dim must be a multiple of 8 from 8 to {largest}, got {dim}"
            raise typer.BadParameter(message)
    names = command.one_of("--dtype", command.words(dtype), _DTYPES)
    dtypes = [_DTYPES[name] for name in names]
    more = eight_bit_variants(head_dims, dtypes) if eight_bit else ()
    return [*variants(head_dims, dtypes), *more]


def _described(variant: Variant) -> str:
    defines = (f"{name}={value}" for name, value in variant.defines.items() if value)
    return f"{variant.kind} {' '.join(defines)}"


def compile_all(variants: list[Variant], console: Console) -> int:
    """Compile into the cache what it lacks; returns the number of kernels."""
    kinds = dict.fromkeys(variant.kind for variant in variants)
    shown = command.watched(variants, "compiling", "cpu", kinds, "programs", _described)
    try:
        return sum(compile_variant(variant) for variant in shown)
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
        build = [sys.executable, "-c", _BUILD, str(folder.absolute())]
        built = subprocess.run(build, cwd=project, capture_output=True, text=True)
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
