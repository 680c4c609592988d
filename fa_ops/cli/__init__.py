"""The commands of `python -m fa_ops`; each module is imported when its command is used."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """A group that imports its commands, which are functions with typer's annotations."""

    functions = {
        "demo": "cli.demo.run", "doctor": "cli.doctor.run", "warm": "cli.cubins.warm",
        "cubins": "cli.cubins.cubins", "fuzz": "cli.fuzz.run", "bench": "cli.bench",
    }  # fmt: skip

    def list_commands(self, ctx):
        return list(self.functions)

    def resolve_command(self, ctx, args):
        """Fail with the nearest name for one that no command has."""
        if args and args[0] not in self.functions:
            near = difflib.get_close_matches(args[0], self.functions, 1)
            meant = f"Did you mean {near[0]!r}?" if near else f"Try {ctx.command_path} --help."
            ctx.fail(f"No such command {args[0]!r}. {meant}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx, name):
        if name not in self.functions:
            return None
        module, _, function = self.functions[name].rpartition(".")
        found = getattr(import_module(f"fa_ops.{module}"), function)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command()(found)
            command = typer.main.get_command(single)
        else:
            command = typer.main.get_group(found)
        command.name = name
        return command


class _Benchmarks(_Commands):
    """The group `bench`."""

    functions = {
        "forward": "bench.sweep.forward", "backward": "bench.sweep.backward",
        "memory": "bench.sweep.memory", "features": "bench.features.main",
        "accuracy": "bench.accuracy.main", "cpu": "bench.cpu.main", "decode": "bench.decode.main",
        "first": "bench.first.main", "host": "bench.host.main",
        "quantized": "bench.quantized.main", "flex": "bench.flex.main",
        "derivatives": "bench.derivatives.main", "selected": "bench.selected.main",
    }  # fmt: skip


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(cls=_Benchmarks, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fa_ops import __version__

        print(f"fa_ops {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Fused attention for PyTorch."""


@bench.callback()
def _bench() -> None:
    """Measure time, memory and accuracy, as the performance pages of the documentation do."""
