"""`python -m tests.evaluation.fusion_libraries`: what the pass fuses in other people's libraries.

Small models of timm, x-transformers, vit-pytorch, torchvision, open_clip and diffusers, as far as
these are installed, are compiled up to Inductor's code generation, in eval and in training mode.
The command prints for each library the attentions that this pass and Inductor's own fuse, and the
largest differences from an eager run. Results are written to a JSON file after every model, and a
second run continues from it.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from fa_ops.bench import command
from fa_ops.bench.command import in_existing_folder
from tests.evaluation.fusion_sweep import run_mode
from tests.evaluation.hf_sweep.run import time_limit
from tests.evaluation.library_models import LIBRARIES

PACKAGES = {"open_clip": "open_clip_torch"}
MODES = ("eval", "train")


def examine(build: Any) -> dict[str, Any]:
    """The results of one model in both modes; {"skipped": why} if it cannot be built or run."""
    torch.manual_seed(0)
    try:
        model, given = build()
        with torch.no_grad():
            model(**given)
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {error}".split("\n")[0][:120]}
    return {mode: run_mode(model, given, mode == "train") for mode in MODES}


def summary(results: dict[str, dict[str, Any]], console: Console) -> int:
    """Print a row for each library and mode, and what is not fused; return the wrong results."""
    table = Table("library", "models", "mode", "attentions", "fused", "Inductor alone")
    for column in ("largest difference of outputs", "of gradients", "wrong"):
        table.add_column(column)
    wrong = 0
    for library, models in results.items():
        ran = [r for r in models.values() if "skipped" not in r]
        for mode in MODES:
            of_mode = [r[mode] for r in ran]
            sums = [sum(r[x] for r in of_mode) for x in ("attentions", "fused", "inductor")]
            largest = [
                max((r[x] or 0.0 for r in of_mode), default=0.0) for x in ("output", "gradient")
            ]
            differ = sum(bool(r["wrong"]) for r in of_mode)
            wrong += differ
            shown = [f"{x:.0e}" if x else "-" for x in largest]
            table.add_row(library, str(len(ran)), mode, *map(str, sums), *shown, str(differ))
    console.print(table)
    for library, models in results.items():
        for name, result in models.items():
            if "skipped" in result:
                console.print(f"{library}, {name}: skipped: {result['skipped']}")
                continue
            for line in dict.fromkeys(_lines(result)):
                console.print(f"{library}, {name}: {line}")
    return wrong


def _lines(result: dict[str, Any]) -> list[str]:
    """Why attentions of a model are not fused, and what is wrong."""
    by_mode = [(mode, result[mode]) for mode in MODES]
    wrong = [f"wrong in {mode}: {r['wrong']}" for mode, r in by_mode if r["wrong"]]
    return wrong + [miss[0] for _, r in by_mode for miss in r["misses"]]


def main(
    libraries: Annotated[str, typer.Option(help="comma separated")] = ",".join(LIBRARIES),
    json_file: Annotated[
        Path, typer.Option("--json", help="results, read and written", callback=in_existing_folder)
    ] = Path("fusion_libraries.json"),
    seconds: Annotated[int, typer.Option(min=1, help="for one model at most")] = 120,
    only_report: Annotated[bool, typer.Option(help="run nothing")] = False,
) -> None:
    """Run the pass on small models of libraries; exit with 1 if a result is wrong."""
    chosen = command.one_of("--libraries", command.words(libraries), tuple(LIBRARIES))
    try:
        results = json.loads(json_file.read_text()) if json_file.exists() else {}
    except ValueError as error:
        raise typer.BadParameter(f"{json_file} holds no results: {error}") from None
    warnings.simplefilter("ignore")
    functorch_config.enable_autograd_cache = False
    inductor_config.fallback_random = True  # the random numbers of eager mode
    for library in [] if only_report else chosen:
        try:
            models = LIBRARIES[library]()
        except ImportError as error:
            print(f"{library}: not installed: {error}")
            continue
        version = importlib.metadata.version(PACKAGES.get(library, library))
        done = results.setdefault(f"{library} {version}", {})
        for name, build in models.items():
            if name in done:
                continue
            try:
                with time_limit(seconds):
                    done[name] = examine(build)
            except TimeoutError as error:
                done[name] = {"skipped": str(error)}
            json_file.write_text(json.dumps(results, indent=1) + "\n")
            torch._dynamo.reset()
            gc.collect()
    raise typer.Exit(int(summary(results, Console()) > 0))


if __name__ == "__main__":
    typer.run(main)
