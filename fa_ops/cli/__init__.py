"""The commands of `python -m fa_ops`; each module is imported when its command runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from fa_ops.cli.options import in_existing_folder, words


class _Commands(TyperGroup):
    """The command group with `bench`, which is imported only when it is used."""

    def list_commands(self, ctx):
        return [*super().list_commands(ctx), "bench"]

    def get_command(self, ctx, name):
        if name != "bench":
            return super().get_command(ctx, name)
        group = typer.main.get_group(import_module("fa_ops.bench.cli").app)
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
        str, typer.Option(help="the question for the model")
    ] = "In one sentence: why is the sky blue?",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu")] = "auto",
    tokens: Annotated[int, typer.Option(min=1, max=512, help="number of tokens to generate")] = 24,
) -> None:
    """Run a Llama with eager attention, SDPA, attn_implementation="fa_ops" and torch.compile."""
    import_module("fa_ops.cli.demo").run(prompt, device, tokens)


@app.command("doctor")
def _doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="a transformers model type or model folder: explain its layers and masks"
        ),
    ] = None,
) -> None:
    """Print versions, devices, why each backend is or is not available, and the cache folder."""
    import_module("fa_ops.cli.doctor").run(model)


@app.command("warm")
def _warm(
    head_dim: Annotated[
        list[int] | None, typer.Option(help="64, 128, 192 or 256; repeatable; default: all")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16 or float16; repeatable; default: both")
    ] = None,
) -> None:
    """Compile the Hopper kernels of common calls into the cache, with or without a GPU."""
    import_module("fa_ops.cli.warm").run(head_dim, dtype)


@app.command("fuzz")
def _fuzz(
    backend: Annotated[
        str | None, typer.Option(help="comma-separated; default: those available on the device")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu")] = "auto",
    cases: Annotated[int, typer.Option(min=1, help="number of cases over all backends")] = 1000,
    each: Annotated[
        int, typer.Option(min=1, help="cases of each specialisation, which share compiled kernels")
    ] = 100,
    seed: Annotated[int, typer.Option(min=0, help="number of the first specialisation")] = 0,
    case: Annotated[
        int | None, typer.Option(min=0, help="run only this case of specialisation --seed")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="comma-separated: bfloat16, float16, float32, float64")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="processes; 0: this one; default: one for each core")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="stop after this time")] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            help="write all counts and failures to this file", callback=in_existing_folder
        ),
    ] = None,
    arena: Annotated[
        bool,
        typer.Option("--arena", help="only edge cases, in memory with checked margins"),
    ] = False,
) -> None:
    """Compare random calls, forward and backward, with the fp64 oracle; fail if one differs."""
    import_module("fa_ops.cli.fuzz").run(
        words(backend), device, cases, each, seed, case, words(dtype), workers, seconds,
        json, arena,
    )  # fmt: skip
