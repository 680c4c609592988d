"""`python -m tests.evaluation.fusion_corpus FILE ...`: what the pass fuses in files of code.

A file is a Python module with `CASES`, a dict of objects with `make_inputs`, `fn`, `expected`
("fuse", "partial", "no_fuse"), `tags` and `cores`, its number of attentions. Every case runs in
eval and training mode, with static and dynamic shapes; outputs and gradients are compared with an
eager run in fp64. The fusions of Inductor's pass are counted for comparison.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_passes.fuse import fuse_module
from compile_passes.install import install, uninstall
from fa_ops.bench import command
from fa_ops.testing import assert_within_budget

TRAIN, DYNAMIC = "train", "dynamic"
MODES = ("eval", TRAIN, DYNAMIC, f"{DYNAMIC} {TRAIN}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one case in one mode."""

    fused: int  # attentions that this pass fuses
    inductor: int  # attentions that Inductor's pass fuses; -1 if it raises
    wrong: str = ""  # how the result is wrong


def load(path: Path) -> dict[str, Any] | None:
    """The CASES of a file, or None."""
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, "CASES", None)


def run(case: Any, train: bool, dynamic: bool, peer: bool, whole: bool = True) -> Outcome:
    """Compile a case with the pass, up to Inductor's code generation, and compare the results.

    If `peer`, also count what Inductor fuses without the pass; unless `whole`, run the pass alone.
    """
    inputs = case.make_inputs()
    compare = not (train and "stochastic" in case.tags)
    torch.manual_seed(0)
    try:
        baseline = _evaluate(case.fn, inputs, train)
    except ImportError as error:
        return Outcome(0, 0, f"cannot run: {error}")
    install()
    counters.clear()
    try:
        compiled = (_compiled if whole else _rewritten)(case.fn, dynamic)
        torch.manual_seed(0)
        actual = _evaluate(compiled, inputs, train, module=case.fn)
        fused = counters["fa_ops"]["fused"]
        by_inductor = 0 if fused else counters["inductor"]["fuse_attention"]
        compare = compare and not by_inductor  # a difference would be Inductor's
        wrong = _difference(case, inputs, train, actual, baseline) if compare else ""
    except Exception as error:
        fused, wrong = (
            counters["fa_ops"]["fused"],
            f"{type(error).__name__}: {error}".split("\n")[0],
        )
    finally:
        uninstall()
    by_inductor = _inductor(case.fn, inputs, train, dynamic) if peer else 0
    return Outcome(fused, by_inductor, wrong)


def _inductor(function: Callable, inputs: tuple, train: bool, dynamic: bool) -> int:
    """The number of attentions that Inductor fuses; -1 if it raises."""
    counters.clear()
    try:
        _evaluate(_compiled(function, dynamic), inputs, train, module=function)
    except Exception:
        return -1
    return counters["inductor"]["fuse_attention"]


def _compiled(function: Callable, dynamic: bool) -> Callable:
    def backend(gm, example_inputs):
        inner = lambda gm, *_, **__: make_boxed_func(gm.forward)  # noqa: E731
        return compile_fx(gm, example_inputs, inner_compile=inner)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic or None)


def _rewritten(function: Callable, dynamic: bool) -> Callable:
    def backend(gm, example_inputs):
        fuse_module(gm)
        gm.graph.lint()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic or None)


def _evaluate(
    function: Callable, inputs: tuple, train: bool, module: object = None
) -> list[Tensor]:
    """The outputs, and in training mode the gradients of inputs and parameters."""
    module = module or function
    inputs = tree_map_only(Tensor, lambda t: t.detach().clone(), inputs)
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point()]
    if isinstance(module, torch.nn.Module):
        module.train(train)
        leaves += list(module.parameters())
    if not train:
        with torch.no_grad():
            return [t for t in tree_leaves(function(*inputs)) if isinstance(t, Tensor)]
    for t in leaves:
        t.requires_grad_()
    outputs = [t for t in tree_leaves(function(*inputs)) if isinstance(t, Tensor)]
    roots = [t for t in outputs if t.requires_grad]
    seeds = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(i))
        for i, t in enumerate(roots)
    ]
    seeds = [s.to(t.dtype) for s, t in zip(seeds, roots, strict=True)]
    grads = torch.autograd.grad(roots, leaves, seeds, allow_unused=True, materialize_grads=True)
    return [t.detach() for t in outputs] + [t.contiguous() for t in grads]


def _difference(case: Any, inputs: tuple, train: bool, actual: list, baseline: list) -> str:
    try:
        double = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        function = copy.deepcopy(case.fn)
        if isinstance(function, torch.nn.Module):
            function = function.double()
        oracle = _evaluate(function, double, train)
    except RuntimeError:  # code with a fixed dtype
        oracle = baseline
    for i, (a, o, b) in enumerate(zip(actual, oracle, baseline, strict=True)):
        if a.dtype != b.dtype or _strides(a) != _strides(b):
            return f"result {i} is {a.dtype} {a.stride()}, eager's {b.dtype} {b.stride()}"
        is_defined = torch.isfinite(b)  # the operator returns 0 where eager returns NaN
        if "nan" in case.tags:
            a, o, b = (torch.where(is_defined, t, 0) for t in (a, o, b))
        try:
            assert_within_budget(f"result {i}", a, o, b)
        except AssertionError as error:
            return str(error)
    return ""


def _strides(t: Tensor) -> list[int]:
    """The strides of the dimensions with more than one element."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]


def _verdict(case: Any, outcome: Outcome) -> str:
    if outcome.wrong:
        return "[red]wrong"
    if case.expected == "no_fuse":
        return "[red]fused" if outcome.fused else "-"
    is_expected = outcome.fused >= case.cores or case.expected == "partial"
    return f"{outcome.fused}" if is_expected else f"[yellow]{outcome.fused}"


def main(
    files: Annotated[list[Path], typer.Argument(help="modules with CASES")],
    contains: Annotated[str, typer.Option("-k", help="only cases whose name contains this")] = "",
    peer: Annotated[bool, typer.Option(help="count what Inductor's own pass fuses")] = True,
    modes: Annotated[str, typer.Option(help="comma separated")] = ",".join(MODES),
) -> None:
    """Run the pass over files of attention code; exit with 1 if a result is wrong."""
    chosen = command.one_of("--modes", command.words(modes), MODES)
    cases = {}
    for file in files:
        if not file.is_file():
            raise typer.BadParameter(f"no such file: {file}")
        found = load(file)
        if found is None:
            raise typer.BadParameter(f"{file} has no CASES")
        cases |= {name: case for name, case in found.items() if contains in name}
    if not cases:
        raise typer.BadParameter(f"-k: no case's name contains {contains!r}")
    functorch_config.enable_autograd_cache = False
    outcomes = {name: _outcomes(case, chosen, peer) for name, case in cases.items()}
    raise typer.Exit(int(show(cases, outcomes, chosen, peer) > 0))


def _outcomes(case: Any, modes: list[str], peer: bool) -> dict[str, Outcome]:
    can_train = "infer" not in case.tags
    return {mode: run(case, TRAIN in mode and can_train, DYNAMIC in mode, peer) for mode in modes}


def show(cases: dict, results: dict[str, dict[str, Outcome]], modes: list[str], peer: bool) -> int:
    """Print a row for each case, and totals; return the number of wrong results."""
    alone = [f"Inductor {mode}" for mode in modes] if peer else []
    table = Table("case", "expected", *modes, *alone, "problem")
    totals = {mode: [0, 0] for mode in modes}
    wrong = 0
    for name, case in cases.items():
        outcomes = results[name]
        for mode, outcome in outcomes.items():
            wrong += bool(outcome.wrong) or (case.expected == "no_fuse" and outcome.fused > 0)
            if case.expected == "fuse":
                totals[mode][0] += outcome.fused >= case.cores
                totals[mode][1] += outcome.inductor >= case.cores
        problem = next((f"{m}: {o.wrong}" for m, o in outcomes.items() if o.wrong), "")
        verdicts = [_verdict(case, o) for o in outcomes.values()]
        by_inductor = ["raises" if o.inductor < 0 else str(o.inductor) for o in outcomes.values()]
        table.add_row(name, case.expected, *verdicts, *(by_inductor if peer else []), problem)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    fusable = sum(c.expected == "fuse" for c in cases.values())
    for mode, (fused, by_inductor) in totals.items():
        comparison = f", Inductor alone {by_inductor}" if peer else ""
        console.print(f"{mode}: {fused} of {fusable} fused{comparison}")
    console.print(f"{wrong} wrong")
    return wrong


if __name__ == "__main__":
    typer.run(main)
