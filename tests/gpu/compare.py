"""One backend in several versions of its sources, by turns in one process:

    python -m tests.gpu.compare ../before . [--preset lengths] [--only "D64 causal,S512"]
                                            [--backward] [--backend hopper] [--budget 60]

A version is a checkout, as `git worktree add` makes one. Its backends are loaded under a name of
their own. Prints milliseconds, how many times as fast as the first version each other one is, and
how far its results are from the first one's: 0 where no bit changed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.bench.problems import PRESETS, Problem
from fa_ops.bench.timing import Run, device_times
from tests.kernels import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Version(NamedTuple):
    name: str
    backend: ModuleType
    spec: Callable  # its `Spec`


def load(tree: Path, name: str, backend: str, folder: Path) -> Version:
    """The backend of a checkout, copied to `folder` as part of a package of that name."""
    if not any((tree / "fa_ops" / "backends").glob(f"{backend}*")):
        sys.exit(f"a version must be a checkout that has fa_ops/backends/{backend}, got {tree}")
    package = folder / name
    shutil.copytree(tree / "fa_ops" / "backends", package / "backends")
    shutil.copy(tree / "fa_ops" / "types.py", package)
    (package / "__init__.py").touch()
    for source in package.rglob("*.py"):
        source.write_text(re.sub(r"\bfa_ops\b", name, source.read_text()))
    module = importlib.import_module(f"{name}.backends.{backend}")
    reason = module.available_error()
    if reason is not None:
        sys.exit(f"{backend} of {tree}: {reason}")
    return Version(name, module, importlib.import_module(f"{name}.types").Spec)


def run_of(version: Version, problem: Problem, backward: bool) -> tuple[Run, Sequence[Tensor]]:
    """What is timed, and its results."""
    backend, spec = version.backend, version.spec(is_causal=problem.causal)
    q, k, v = problem.inputs(DEVICE, "bhsd")
    if not backward:
        prepare = getattr(backend, "prepare", lambda *_: None)
        call = prepare(q, k, v, spec) or (lambda q, k, v: backend.forward(q, k, v, spec)[0])
        return Run(lambda _: call(q, k, v)), [call(q, k, v)]
    out, lse = backend.forward(q, k, v, spec)
    generator = torch.Generator(DEVICE).manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, device=DEVICE, dtype=out.dtype)
    call = lambda: backend.backward(grad, None, q, k, v, out, lse, spec)  # noqa: E731
    return Run(lambda _: call()), call()[:3]


def difference(results: Sequence[Tensor], first: Sequence[Tensor]) -> float:
    """Relative, of the one that is farthest off."""
    return max(relative_error(a, b) for a, b in zip(results, first))


def compare(
    versions: Sequence[Version], problems: Sequence[Problem], backward: bool, budget: float
) -> Iterator[tuple[Problem, list[float], list[float]]]:
    """Of each problem milliseconds and differences, in the versions' order."""
    for problem in problems:
        runs, results = {}, []
        for version in versions:
            runs[version.name], found = run_of(version, problem, backward)
            results.append(found)
        times = device_times(runs, DEVICE, budget)
        off = [difference(found, results[0]) for found in results]
        yield problem, [times[version.name].ms for version in versions], off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="lengths")
    parser.add_argument("--only", default="", help="problems with all words of one of these")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--backend", default="hopper" if DEVICE == "cuda" else "cpu")
    parser.add_argument("--budget", type=float, default=60, help="timed milliseconds of each")
    options = parser.parse_args()
    wanted = [set(words.split()) for words in options.only.split(",")]
    problems = [p for p in PRESETS[options.preset]() if any(w <= {*str(p).split()} for w in wanted)]
    if not problems:
        parser.error(f"--only must name problems of {options.preset}, got {options.only!r}")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        trees = enumerate(options.trees)
        versions = [load(t, f"version{i}", options.backend, Path(folder)) for i, t in trees]
        ratios = []
        for problem, ms, off in compare(versions, problems, options.backward, options.budget):
            ratios.append([ms[0] / x for x in ms])
            others = zip(ms[1:], ratios[-1][1:], off[1:])
            cells = (f"{x:8.3f} {ratio:5.2f}x ({far:.0e})" for x, ratio, far in others)
            print(f"{problem!s:28}{ms[0]:8.3f}", *cells, sep="  ", flush=True)
        for tree, *column in list(zip(options.trees, *ratios))[1:]:
            print(
                f"{tree}: {math.exp(statistics.mean(map(math.log, column))):.3f}x, geometric mean"
            )


if __name__ == "__main__":
    main()
