"""`python -m fa_ops warm`: compile Hopper kernels into the cache before their first call."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from fa_ops.backends.hopper.runtime import nvrtc, warm
from fa_ops.cli import options

HeadDims = Annotated[
    list[int] | None,
    typer.Option(help="a multiple of 8; repeatable; default: 64, 128, 192, 256"),
]
Dtypes = Annotated[
    list[str] | None, typer.Option(help="bfloat16 or float16; repeatable; default: both")
]

EightBit = Annotated[bool, typer.Option("--eight-bit", help="kernels of 8-bit numbers too")]


def run(head_dim: HeadDims = None, dtype: Dtypes = None, eight_bit: EightBit = False) -> None:
    """Compile the Hopper kernels of common calls into the cache, with or without a GPU."""
    console, variants = Console(highlight=False), chosen(head_dim, dtype, eight_bit)
    compiled = compile_all(variants, console)
    kernels = sum(len(variant.entries) for variant in variants)
    console.print(
        f"{compiled} kernels compiled, {kernels - compiled} were there: {nvrtc.cache_dir()}",
        soft_wrap=True,
    )


def chosen(
    head_dim: list[int] | None, dtype: list[str] | None, eight_bit: bool
) -> list[warm.Variant]:
    """The variants of the options `--head-dim`, `--dtype` and `--eight-bit`."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in warm.DTYPES}
    head_dims = list(dict.fromkeys(head_dim or warm.COMMON_HEAD_DIMS))
    for dim in head_dims:
        if dim not in warm.HEAD_DIMS:
            largest = max(warm.HEAD_DIMS)
            message = f"--head-dim must be a multiple of 8 from 8 to {largest}, got {dim}"
            raise typer.BadParameter(message)
    dtypes = [known[name] for name in options.one_of("--dtype", dtype, tuple(known))]
    more = warm.eight_bit_variants(head_dims, dtypes) if eight_bit else ()
    return [*warm.variants(head_dims, dtypes), *more]


def compile_all(variants: list[warm.Variant], console: Console) -> int:
    """Compile into the cache what it lacks; returns the number of kernels."""
    shown = track(variants, "compiling", console=console, transient=True)
    try:
        return sum(warm.compile_variant(variant) for variant in shown)
    except nvrtc.CompileError as error:
        raise SystemExit(str(error)) from None
