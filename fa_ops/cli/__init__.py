"""The commands of `python -m fa_ops`; each module is imported when its command is used."""

from __future__ import annotations

from importlib import import_module

import typer
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """A group that imports its commands, which are functions with typer's annotations."""

    functions = {
        "demo": "demo.run", "doctor": "doctor.run", "warm": "cubins.warm",
        "cubins": "cubins.cubins", "fuzz": "fuzz.run", "bench": "",  # a group of its own
    }  # fmt: skip

    def list_commands(self, ctx):
        return list(self.functions)

    def get_command(self, ctx, name):
        if name not in self.functions:
            return None
        if name == "bench":
            command = typer.main.get_group(import_module("fa_ops.bench.cli").app)
        else:
            module, function = self.functions[name].split(".")
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command()(getattr(import_module(f"fa_ops.cli.{module}"), function))
            command = typer.main.get_command(single)
        command.name = name
        return command


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
    """Fused attention for PyTorch."""
