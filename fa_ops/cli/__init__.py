"""The commands of `python -m fa_ops`; each is imported when it runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from fa_ops.cli.options import in_a_folder, words


class _Commands(TyperGroup):
    """Adds the command groups that live elsewhere."""

    elsewhere = {"bench": "fa_ops.bench.cli"}

    def list_commands(self, ctx):
        return [*super().list_commands(ctx), *self.elsewhere]

    def get_command(self, ctx, name):
        if name not in self.elsewhere:
            return super().get_command(ctx, name)
        group = typer.main.get_group(import_module(self.elsewhere[name]).app)
        group.name = name
        return group


app = typer.Typer(
    cls=_Commands,
    help="Fused attention for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("demo")
def _demo(
    prompt: Annotated[
        str, typer.Option(help="what the model is asked")
    ] = "In one sentence: why is the sky blue?",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu")] = "auto",
    tokens: Annotated[int, typer.Option(min=1, max=512, help="how many to generate")] = 24,
) -> None:
    """A real Llama answers four ways: eager, SDPA, attn_implementation="fa_ops", torch.compile."""
    import_module("fa_ops.cli.demo").run(prompt, device, tokens)


@app.command("doctor")
def _doctor(
    model: Annotated[
        str | None,
        typer.Option(help="a transformers model type, or a model's folder: layers and masks too"),
    ] = None,
) -> None:
    """Versions, devices, why each backend is or is not available, and the cache folder."""
    import_module("fa_ops.cli.doctor").run(model)


@app.command("warm")
def _warm(
    head_dim: Annotated[
        list[int] | None, typer.Option(help="64, 128, 192 or 256; several times for several")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16 or float16; both unless told")
    ] = None,
) -> None:
    """Compile the Hopper kernels of ordinary calls into the cache, with or without a GPU."""
    import_module("fa_ops.cli.warm").run(head_dim, dtype)


@app.command("fuzz")
def _fuzz(
    backend: Annotated[
        str | None, typer.Option(help="comma-separated; unless told, the device's that can run")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu")] = "auto",
    cases: Annotated[int, typer.Option(min=1, help="how many, over all backends")] = 1000,
    each: Annotated[
        int, typer.Option(min=1, help="cases of each specialisation, which is compiled for once")
    ] = 100,
    seed: Annotated[int, typer.Option(min=0, help="the first specialisation's number")] = 0,
    case: Annotated[
        int | None, typer.Option(min=0, help="this one case of specialisation --seed alone")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="comma-separated: bfloat16, float16, float32, float64")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="processes; 0 for this one; unless told, the cores")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="stop after so many")] = None,
    json: Annotated[
        Path | None, typer.Option(help="write all counts and failures here", callback=in_a_folder)
    ] = None,
    arena: Annotated[
        bool,
        typer.Option("--arena", help="calls at the edges alone, in memory with checked margins"),
    ] = False,
) -> None:
    """Random calls, forward and backward, against the fp64 oracle; fails if one is off."""
    import_module("fa_ops.cli.fuzz").run(
        words(backend), device, cases, each, seed, case, words(dtype), workers, seconds, json, arena
    )  # fmt: skip
