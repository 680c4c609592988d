"""The command: the tests of every family with sdpa and fa_ops, and those of FlashAttention 2."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import transformers
import typer

from fa_ops.bench.command import in_existing_folder
from tests.evaluation.hf_upstream import report, source
from tests.evaluation.hf_upstream.families import FAMILIES

ROOT = Path(__file__).parents[3]


def main(
    folder: Annotated[
        Path, typer.Argument(help="the source distribution of the installed version, unpacked")
    ],
    models: Annotated[str, typer.Option(help="comma separated")] = ",".join(FAMILIES),
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="the file for results", callback=in_existing_folder),
    ] = None,
    seconds: Annotated[int, typer.Option(min=1, help="limit for the tests of one model")] = 1800,
) -> None:
    """Run transformers' common model tests with fa_ops instead of sdpa or flash_attention_2.

    Exits with 1 if a test passes only with sdpa, or one of FlashAttention 2 fails.
    """
    _check(folder, models.split(","))
    results: dict[str, dict] = {}
    for family in models.split(","):
        results[family] = {}
        for scope, implementation in report.RUNS:
            name = report.key(scope, implementation)
            results[family][name] = _run(folder, family, scope, implementation, seconds)
            print(f"{family}, {name}: done", file=sys.stderr, flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(results, indent=1))
    shown = report.lines(results)
    print("\n".join(shown))
    raise typer.Exit(int(not report.is_good(results)))


def _check(folder: Path, families: list[str]) -> None:
    for family in families:
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise typer.BadParameter(f"no model is called {family!r}: {known}")
    for package in ("parameterized", "pytest"):
        if importlib.util.find_spec(package) is None:
            raise typer.BadParameter(f"transformers' tests need: pip install {package}")
    try:
        found = source.version(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if found != transformers.__version__:
        raise typer.BadParameter(
            f"{folder} is transformers {found}, installed is {transformers.__version__}"
        )


def _run(folder: Path, family: str, scope: str, implementation: str, seconds: int) -> dict | str:
    """The results of the tests in a new process, because they change global state; or an error."""
    # With _INSIDE_SUB_PROCESS, transformers' tests start no further process.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "_INSIDE_SUB_PROCESS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "found.json")
        command = [sys.executable, "-m", "tests.evaluation.hf_upstream.run", str(folder.resolve())]
        command += [family, scope, implementation, str(out)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        quiet["cwd"] = ROOT
        try:
            done = subprocess.run(command, env=environment, timeout=seconds, **quiet)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return json.loads(out.read_text())


if __name__ == "__main__":
    typer.run(main)
