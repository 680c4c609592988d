"""The command; results are written to a JSON file, from which a later run continues."""

from __future__ import annotations

import gc
import json
import os
import warnings
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from transformers import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

import hf_integration
from fa_ops.bench.command import in_existing_folder
from tests.evaluation.hf_sweep import report, run
from tests.evaluation.hf_sweep.scenarios import SCENARIOS


def main(
    types: Annotated[list[str] | None, typer.Argument(help="model types; all by default")] = None,
    json_file: Annotated[
        Path, typer.Option("--json", help="results, read and written", callback=in_existing_folder)
    ] = Path("sweep.json"),
    against: Annotated[str, typer.Option(help="implementations, comma separated")] = "fa_ops",
    scenarios: Annotated[str, typer.Option(help="scenarios, comma separated")] = ",".join(
        SCENARIOS
    ),
    again: Annotated[bool, typer.Option(help="repeat results that the file has")] = False,
    only_report: Annotated[bool, typer.Option(help="run nothing")] = False,
) -> None:
    """Compare attention implementations with eager attention on a tiny model of every model type.

    Logits, gradients and greedy tokens in 13 scenarios, in fp32 on the CPU, in one process.
    """
    for name in types or ():
        if name not in CONFIG_MAPPING_NAMES:
            raise typer.BadParameter(f"{name!r} is not a model type of transformers")
    for name in scenarios.split(","):
        if name not in SCENARIOS:
            raise typer.BadParameter(f"no scenario is called {name!r}: {', '.join(SCENARIOS)}")
    for name in against.split(","):
        if name not in AttentionInterface():
            raise typer.BadParameter(f"no implementation is called {name!r}")
    try:
        results = json.loads(json_file.read_text()) if json_file.exists() else {}
    except ValueError as error:
        raise typer.BadParameter(f"{json_file} holds no results: {error}") from None
    warnings.simplefilter("ignore")
    logging.set_verbosity(50)
    known = results.setdefault("types", {})
    results["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
    wanted = [] if only_report else types or list(CONFIG_MAPPING_NAMES)
    for model_type in wanted:
        earlier = {} if again else known.get(model_type, {})
        missing = [name for name in against.split(",") if name not in earlier]
        if "base_error" in earlier or not missing:
            continue
        known[model_type] = earlier | _results(model_type, missing, scenarios.split(","))
        print(model_type, _short(known[model_type]), flush=True)
        part = json_file.with_name(json_file.name + ".part")
        part.write_text(json.dumps(results, indent=1))
        os.replace(part, json_file)
        gc.collect()
    print("\n".join(report.lines(known)))


def _results(model_type: str, implementations: list[str], scenarios: list[str]) -> dict:
    try:
        with run.time_limit(run.SECONDS):
            base = run.Base(model_type)
    except (LookupError, TimeoutError) as error:
        return {"base_error": str(error)}
    results = {}
    for name in implementations:
        try:
            with run.time_limit(run.SECONDS):
                results[name] = run.compare(base, name, scenarios)
        except TimeoutError as error:
            results[name] = {scenario: ["error", str(error)] for scenario in scenarios}
    return results


def _short(result: dict) -> str:
    if "base_error" in result:
        return f"eager attention does not run: {result['base_error']}"
    texts = []
    for name, scenarios in result.items():
        bad = [f"{s} {r[0]} {r[1]}" for s, r in scenarios.items() if r[0] in ("fail", "error")]
        good = sum(r[0] == "pass" for r in scenarios.values())
        texts.append(f"{name}: {good} pass" + "".join(f"; {text}" for text in bad))
    return " | ".join(texts)


assert hf_integration.NAME  # the import registers the implementation

if __name__ == "__main__":
    typer.run(main)
