"""`python -m fa_ops warm`: compile Hopper kernels into the cache before their first call."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from fa_ops.backends.hopper import compiler, warm
from fa_ops.cli import options


def run(
    head_dim: Annotated[
        list[int] | None,
        typer.Option(help="a multiple of 8; repeatable; default: 64, 128, 192, 256"),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16 or float16; repeatable; default: both")
    ] = None,
) -> None:
    """Compile the Hopper kernels of common calls into the cache, with or without a GPU."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in warm.DTYPES}
    chosen = head_dim or warm.COMMON_HEAD_DIMS
    head_dims = options.one_of("--head-dim", chosen, warm.HEAD_DIMS)
    dtypes = options.one_of("--dtype", dtype, tuple(known))
    console = Console(highlight=False)
    variants = list(warm.variants(head_dims, [known[name] for name in dtypes]))
    try:
        shown = track(variants, "compiling", console=console, transient=True)
        compiled = sum(warm.compile_variant(variant) for variant in shown)
    except compiler.CompileError as error:
        raise SystemExit(str(error)) from None
    kernels = sum(len(variant.entries) for variant in variants)
    console.print(
        f"{compiled} kernels compiled, {kernels - compiled} were there: {compiler.cache_dir()}",
        soft_wrap=True,
    )
