"""Measure time, memory and accuracy, as the performance pages of the documentation do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

from fa_ops.bench import accuracy as accuracy_errors
from fa_ops.bench import cpu as cpu_calls
from fa_ops.bench import decode as decode_calls
from fa_ops.bench import features as feature_costs
from fa_ops.bench import first as first_calls
from fa_ops.bench import host as host_calls
from fa_ops.bench import memory as memory_peaks
from fa_ops.bench import options, peers, problems, report
from fa_ops.bench import quantized as quantized_calls
from fa_ops.bench.options import Device, Json, Only
from fa_ops.bench.sweep import sweep

app = typer.Typer(help=__doc__, no_args_is_help=True)
console = Console()

_GRIDS = problems.PRESETS | problems.BIASED
Preset = Annotated[str, typer.Option(help=f"the grid: {', '.join(_GRIDS)}")]
Plot = Annotated[
    Path | None,
    typer.Option(help="plot the grid into this PNG", callback=options.in_existing_folder),
]
Budget = Annotated[float, typer.Option(min=0.1, help="milliseconds to time each cell for")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads")]


def _sweep_command(name: str) -> Callable:
    def command(
        preset: Preset = "standard",
        only: Only = None,
        device: Device = "auto",
        json: Json = None,
        plot: Plot = None,
        budget: Budget = 200.0,
        threads: Threads = None,
    ) -> None:
        device = options.device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        grid = _GRIDS[options.preset(preset, _GRIDS)]()
        chosen = peers.choose(device, only)
        backward = name == "backward"
        with torch.set_grad_enabled(backward):
            steps = sweep(grid, chosen, device, backward, budget)
            progress = Console(stderr=True)
            rows = list(track(steps, name, len(grid), console=progress, transient=True))
        facts = report.environment(device)
        title = f"{name}, {facts['device']}, torch {facts['torch']}"
        with contextlib.nullcontext() if console.is_terminal else _wide():
            report.print_sweep(console, title, rows, backward)
        if json is not None:
            report.write_json(json, device, name, report.sweep_records(rows, backward))
        if plot is not None:
            report.plot(plot, title, rows, backward)

    return command


@contextlib.contextmanager
def _wide():
    """Widen the console, so that tables written to a file are not truncated."""
    console.width, before = 200, console.width
    yield
    console.width = before


_FORWARD = "Compare forward passes with SDPA's kernels, FlexAttention and flash-attn."
_BACKWARD = "Compare backward passes alone with the same peers."
app.command("forward", help=_FORWARD)(_sweep_command("forward"))
app.command("backward", help=_BACKWARD)(_sweep_command("backward"))


@app.command()
def features(
    device: Device = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="sequence length; default: 16384 on a GPU, 512 on the CPU"),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="query heads")] = 16,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="key heads; default: as many as query heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=8, help="features of a head")] = 128,
    only: Only = None,
    flex: Annotated[bool, typer.Option(help="measure compiled FlexAttention too")] = False,
    budget: Budget = 200.0,
    json: Json = None,
) -> None:
    """Compare the cost of features, such as masks, with plain causal attention."""
    device = options.device(device)
    tokens = tokens or (16384 if device == "cuda" else 512)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise typer.BadParameter(f"{heads} query heads are no multiple of {kv_heads} key heads")
    chosen = feature_costs.choose(feature_costs.features(heads, tokens, device), only)
    pair = heads, kv_heads
    measured = feature_costs.times(chosen, pair, tokens, head_dim, device, budget, flex)
    name = report.environment(device)["device"]
    shown = heads if heads == kv_heads else f"{heads}/{kv_heads}"
    title = f"{shown} heads of {head_dim}, {tokens} tokens, {name}"
    console.print(feature_costs.table(title, measured))
    if json is not None:
        report.write_json(json, device, "features", feature_costs.records(measured))


app.command("accuracy")(accuracy_errors.main)
app.command("cpu")(cpu_calls.main)
app.command("decode")(decode_calls.main)
app.command("first")(first_calls.main)
app.command("host")(host_calls.main)
app.command("memory")(memory_peaks.main)
app.command("quantized")(quantized_calls.main)
