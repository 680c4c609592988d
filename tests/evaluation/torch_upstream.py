"""`python -m tests.evaluation.torch_upstream FILE`: torch's own tests of SDPA on fa_ops.

FILE is `test/test_transformers.py` of a checkout of https://github.com/pytorch/pytorch, which stays
as it is, with the files beside it that it imports. Every case runs twice: with torch's kernels
alone, and with those of `fa_ops.compat.sdpa` in their place. The tests have thousands of cases, of
which the same number is drawn for each test. They need expecttest.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import math
import random
import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple
from unittest import mock

import torch
import typer

from fa_ops.bench.command import in_existing_folder
from fa_ops.compat import sdpa


class Outcome(NamedTuple):
    """The outcomes of one case."""

    test: str
    case: str
    alone: str  # with torch's kernels: "passed", "skipped", "failed"
    replaced: str  # with those of fa_ops
    calls: int  # of the kernels of fa_ops, without those that went to torch's kernels
    why: str = ""  # the error with those of fa_ops


def main(
    file: Annotated[Path, typer.Argument(help="torch's test_transformers.py", exists=True)],
    cases: Annotated[int, typer.Option(min=1, help="cases of each test")] = 20,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    only: Annotated[str, typer.Option(help="a part of the names of tests")] = "",
    seconds: Annotated[float, typer.Option(help="after which no case begins")] = math.inf,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="the file for results", callback=in_existing_folder),
    ] = None,
) -> None:
    """Run sampled cases of torch's own tests of SDPA, with and without the kernels of fa_ops.

    Exits with 1 if a case fails with them that passes without. On a CPU, F.sdpa uses an operator
    that is not replaced, so that only cases which name the flash operators reach fa_ops.
    """
    outcomes, end = [], time.monotonic() + seconds
    print("| test | passed | calls of fa_ops | fails with fa_ops alone |\n|---|---|---|---|")
    chosen = random.Random(seed)
    tests = list(tests_of(load(file), file, device).items())
    chosen.shuffle(tests)
    for test, found in tests:
        if only in test and time.monotonic() < end:
            drawn = chosen.sample(found, min(cases, len(found)))
            ran = [compare(test, case, device) for case in drawn if time.monotonic() < end]
            outcomes += ran
            print("\n".join(lines(ran)), end="\n" if ran else "", flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    raise typer.Exit(int(any(map(fails_only_replaced, outcomes))))


def load(file: Path) -> ModuleType:
    """The module of a file of tests."""
    name = f"torch_upstream_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(file.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module


def tests_of(module: ModuleType, file: Path, device: str) -> dict[str, list[unittest.TestCase]]:
    """The cases for a device by the test that they are of."""
    written = [
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    found: dict[str, list[unittest.TestCase]] = {name: [] for name in written}
    for each in vars(module).values():
        if isinstance(each, type) and each.__name__.endswith(device.upper()):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(each):
                name = case._testMethodName
                found[max(filter(name.startswith, written), key=len)].append(case)
    return {name: cases for name, cases in found.items() if cases}


def compare(test: str, case: unittest.TestCase, device: str) -> Outcome:
    """Run one case with torch's kernels, and again with those of fa_ops."""
    again = type(case)(case._testMethodName)
    alone, _ = run(case)
    with replaced(device) as calls:
        status, why = run(again)
    return Outcome(test, case.id(), alone, status, sum(calls.values()), why)


@contextlib.contextmanager
def replaced(device: str) -> Iterator[Counter[str]]:
    """A context in which SDPA runs on fa_ops, with the number of calls of each kernel."""
    calls: Counter[str] = Counter()

    def counted(name: str, kernel: Callable) -> Callable:
        def call(*args, **options):
            found = kernel(*args, **options)
            calls[name] += 1
            return found

        return call

    kernels = {name: counted(name, kernel) for name, kernel in sdpa.KERNELS.items()}
    with mock.patch.dict(sdpa.KERNELS, kernels), warnings.catch_warnings():
        handle = sdpa.activate(device.upper())
        try:
            yield calls
        finally:
            handle.remove()


@contextlib.contextmanager
def warned_always() -> Iterator[None]:
    """A context in which warnings are not left out because they were said before."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def run(case: unittest.TestCase) -> tuple[str, str]:
    """The status of a case, and its error in a line."""
    result = unittest.TestResult()
    with warned_always():
        case.run(result)
    bad = result.failures + result.errors
    if any("OutOfMemoryError" in text for _, text in bad):
        torch.cuda.empty_cache()
        return "skipped", "not enough memory"
    if bad or result.unexpectedSuccesses:
        text = bad[0][1].strip().splitlines() if bad else ["unexpected success"]
        errors = [x for x in text if x and not x.startswith(" ") and "Error" in x.split(":")[0]]
        return "failed", (errors or text[-1:])[0][:300]
    return ("skipped", "") if result.skipped else ("passed", "")


def fails_only_replaced(outcome: Outcome) -> bool:
    """Whether a case fails with the kernels of fa_ops, and not with torch's."""
    return outcome.replaced == "failed" != outcome.alone


def lines(outcomes: list[Outcome]) -> list[str]:
    """The row of a test in the table, and the errors of cases that fail with fa_ops alone."""
    passed, failed = (sum(o.replaced == s for o in outcomes) for s in ("passed", "failed"))
    worse = list(filter(fails_only_replaced, outcomes))
    if not outcomes:
        return []
    counts = f"{passed} of {passed + failed} | {sum(o.calls for o in outcomes)} | {len(worse)}"
    return [f"| {outcomes[0].test} | {counts} |", *(f"{o.case}: {o.why}" for o in worse)]


if __name__ == "__main__":
    typer.run(main)
