"""`python -m tests.evaluation.flash_upstream FILE`: flash-attn's own tests on fa_ops.

FILE is `tests/test_flash_attn.py`, `tests/test_rotary.py` or `hopper/test_flash_attn.py` of a
checkout of https://github.com/Dao-AILab/flash-attention, which stays as it is. Its imports of
flash-attn are answered by `fa_ops.compat.install`. The tests have hundreds of thousands of cases,
of which the same number is drawn for each test. They need einops.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, NamedTuple
from unittest import mock

import pytest
import torch
import typer

from fa_ops import compat
from fa_ops.bench.command import in_existing_folder

# Tests that must fail, with the reason.
KNOWN = {
    "test_flash_attn_kvcache_paged_block_table_bounds": "lengths beyond the pages raise a "
    "RuntimeError in flash-attn, which reads them on the host; here they raise a ValueError on "
    "the CPU and are clamped on a GPU",
    "test_compilation_count": "it counts compilations of a Triton kernel for rotary embedding, "
    "which consists of operations of torch here",
    "test_flash3_bw_compatibility": "it reads the schemas of FlashAttention 3's own C++ operators, "
    "which are Python functions here",
}


class Outcome(NamedTuple):
    """The outcome of one case."""

    test: str
    arguments: str
    status: str  # "passed", "skipped", "failed"
    why: str = ""


def main(
    file: Annotated[Path, typer.Argument(help="a file of flash-attn's tests", exists=True)],
    cases: Annotated[int, typer.Option(min=1, help="cases of each test")] = 100,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    longest: Annotated[int, typer.Option(min=1, help="largest length that is drawn")] = 2**31,
    only: Annotated[str, typer.Option(help="a part of the names of tests")] = "",
    seconds: Annotated[float, typer.Option(help="after which no case begins")] = math.inf,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="the file for results", callback=in_existing_folder),
    ] = None,
) -> None:
    """Run sampled cases of flash-attn's own tests.

    Prints failures by reason, and exits with 1 if there are others than those that are known.
    """
    outcomes, end = [], time.monotonic() + seconds
    with installed(), pretended(device):
        tests = tests_of(load(file, device))
        random.Random(seed).shuffle(tests)
        for name, test in tests:
            if only in name:
                found = [
                    run(name, test, arguments)
                    for arguments in draw(test, cases, seed, longest)
                    if time.monotonic() < end
                ]
                counts = Counter(outcome.status for outcome in found)
                print(f"{name}: {dict(counts)}", file=sys.stderr, flush=True)
                outcomes += found
    if json_file is not None:
        json_file.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    print("\n".join(lines(outcomes)))
    wrong = [o for o in outcomes if o.status == "failed" and o.test not in KNOWN]
    raise typer.Exit(int(bool(wrong)))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A context in which flash-attn is fa_ops."""
    for name in ("flash_attn", "flash_attn_interface"):
        compat.install(name)
    try:
        yield
    finally:
        for name in ("flash_attn", "flash_attn_interface"):
            compat.uninstall(name)


@contextlib.contextmanager
def pretended(device: str) -> Iterator[None]:
    """A context in which the tests believe that the CPU is a Hopper GPU."""
    if device == "cuda":
        yield
        return
    properties = SimpleNamespace(total_memory=2**37, multi_processor_count=132)
    with (
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("torch.cuda.get_device_properties", lambda *_: properties),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch("torch.cuda.empty_cache", lambda *_: None),
    ):
        yield


def load(file: Path, device: str) -> ModuleType:
    """The module of a file of tests, with the device in place of "cuda"."""
    tree = ast.parse(file.read_text(), str(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == "cuda":
            node.value = device
    module = ModuleType(f"flash_upstream_{file.stem}")
    module.__file__ = str(file)
    path = [str(file.parent), *sys.path]
    with mock.patch.object(sys, "path", path):
        exec(compile(tree, str(file), "exec"), vars(module))
    return module


def tests_of(module: ModuleType) -> list[tuple[str, Callable]]:
    """The tests of a module by name."""
    return [(n, f) for n, f in vars(module).items() if n.startswith("test_") and callable(f)]


def draw(test: Callable, number: int, seed: int, longest: int) -> list[dict[str, Any]]:
    """Different arguments for a test, from the values of its marks."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
            rows = [v if len(names) > 1 else (v,) for v in values]
            fitting = [
                row for row in rows if all(map(_fits, names, row, itertools.repeat(longest)))
            ]
            axes.append([dict(zip(names, row, strict=True)) for row in fitting])
    random_state, drawn = random.Random(seed), {}
    for _ in range(20 * number):
        if len(drawn) == number or not all(axes):
            break
        picked = [random_state.choice(axis) for axis in axes]
        arguments = {name: value for part in picked for name, value in part.items()}
        drawn.setdefault(str(arguments), arguments)
    return list(drawn.values())


def _fits(name: str, value: Any, longest: int) -> bool:
    return "seqlen" not in name or not isinstance(value, int) or value <= longest


def run(name: str, test: Callable, arguments: dict[str, Any]) -> Outcome:
    """Run one case."""
    shown = ", ".join(f"{k}={v}" for k, v in arguments.items())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            test(**arguments)
    except pytest.skip.Exception as error:
        return Outcome(name, shown, "skipped", str(error))
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return Outcome(name, shown, "skipped", _line(error))
    except (Exception, pytest.fail.Exception) as error:
        return Outcome(name, shown, "failed", _line(error))
    return Outcome(name, shown, "passed")


def _line(error: BaseException) -> str:
    """The type of an error and the first line of its text, with the line of the test."""
    frame = error.__traceback__
    while frame.tb_next is not None and "test_" not in frame.tb_frame.f_code.co_name:
        frame = frame.tb_next
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}, line {frame.tb_lineno}: {text}"


def lines(outcomes: list[Outcome]) -> list[str]:
    """A table of counts, and the failures by reason."""
    table = ["| test | passed | failed | skipped |", "|---|---|---|---|"]
    for name in dict.fromkeys(outcome.test for outcome in outcomes):
        counts = Counter(outcome.status for outcome in outcomes if outcome.test == name)
        shown = (str(counts[status]) for status in ("passed", "failed", "skipped"))
        table.append(f"| {name} | {' | '.join(shown)} |")
    failed: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.status == "failed":
            failed.setdefault((outcome.test, outcome.why), []).append(outcome.arguments)
    for (test, why), arguments in failed.items():
        known = f" (known: {KNOWN[test]})" if test in KNOWN else ""
        table.append(f"{test}: {len(arguments)} x {why}{known}; first: {arguments[0]}")
    return table


if __name__ == "__main__":
    typer.run(main)
