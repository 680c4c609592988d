"""`python -m tests.evaluation.fusion_sweep`: what the pass fuses in transformers' architectures.

A tiny model of every architecture, with random weights and eager attention, is compiled up to
Inductor's code generation, in eval and in training mode (without dropout). The command prints the
numbers of softmaxes, of attentions, and of attentions that this pass and Inductor's own fuse,
and the differences of outputs and gradients from an eager run. Results are written to a JSON
file after every architecture, and a second run continues from it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from compile_passes.fuse import NO_SCORES, NO_VALUE, fuse_module
from compile_passes.match.matcher import ONE_KEY
from fa_ops.bench.command import in_existing_folder
from fa_ops.testing import assert_within_budget
from tests.evaluation.hf_sweep import inputs, tiny
from tests.evaluation.hf_sweep.run import Base, time_limit

# A softmax without these two products belongs to a router, a pooling or a loss; one over a single
# key, which images of tiny models leave, is 1.
NOT_ATTENTION = (NO_SCORES, NO_VALUE, ONE_KEY)
NO_RESULTS = {
    **dict.fromkeys(("softmaxes", "attentions", "fused", "operators", "inductor", "seconds"), 0),
    **{"output": None, "gradient": None, "wrong": "", "misses": [], "calls": []},
}
_DROPOUTS = "dropout pdrop drop_rate drop_path layerdrop mask_time_prob mask_feature_prob".split()
TOLERANCE = 1e-4  # relative; larger differences are judged by a run in fp64


def architectures() -> list[str]:
    """The model types that transformers lists."""
    names = {*modeling_auto.MODEL_MAPPING_NAMES, *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return sorted(names)


def examine(name: str) -> dict[str, Any]:
    """The results of both modes; {"skipped": why} if the model does not run in eager mode."""
    try:
        model, given = _eager(name)
    except TimeoutError:
        raise
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {error}".split("\n")[0][:120]}
    return {mode: run_mode(model, given, mode == "train") for mode in ("eval", "train")}


def _eager(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model with eager attention, without dropout, and its inputs; texts are left padded."""
    base = Base(name)
    _disable_dropout(base.config)
    model, given = tiny.build(base.config, "eager"), dict(base.inputs)
    if "input_ids" in given and "attention_mask" in inputs.names(model):
        given["attention_mask"] = inputs.padding("left")
    with torch.no_grad():
        results = _floats(model(**given))
    if not all(torch.isfinite(t).all() for t in results):
        raise ValueError("its result is not finite")
    return model, given


def _disable_dropout(config: Any) -> None:
    """Disable every kind of dropout, and the cache, in a config and its parts."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "sub_configs"):
            _disable_dropout(value)
        elif isinstance(value, float) and any(word in name for word in _DROPOUTS):
            setattr(config, name, 0.0)
        elif name == "use_cache":
            config.use_cache = False


def _floats(output: object) -> list[Tensor]:
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    return [t for t in tensors if t.is_floating_point()]


def run_mode(model: nn.Module, given: dict, train: bool) -> dict[str, Any]:
    """What is fused in one mode, and the differences from an eager run."""
    model.train(train)
    findings: list = []
    by_inductor = operators = 0

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        nonlocal by_inductor, operators
        inner = lambda gm, *_, **__: make_boxed_func(gm.forward)  # noqa: E731
        counters["inductor"].clear()
        with contextlib.suppress(Exception):
            run = compile_fx(copy.deepcopy(gm), example_inputs, inner_compile=inner)
            del run
        count = counters["inductor"]["fuse_attention"]
        found = fuse_module(gm)
        compiled = compile_fx(gm, example_inputs, inner_compile=inner)
        by_inductor += count  # after compiling: where that raises, Dynamo tries smaller graphs
        operators += sum(str(node.target).startswith("fa.attention") for node in gm.graph.nodes)
        findings.extend(found)
        return compiled

    torch._dynamo.reset()
    start = time.perf_counter()
    try:
        expected = _results(model, model, given, train)
    except (RuntimeError, ValueError, TypeError) as error:  # for instance, without labels
        return NO_RESULTS | {"cannot run": f"{type(error).__name__}: {error}".split("\n")[0][:120]}
    try:
        actual = _results(torch.compile(model, backend=backend), model, given, train)
        output, gradient, wrong = None, None, ""
        if any(f.fused for f in findings):  # otherwise a difference is Inductor's
            output, gradient, wrong = _compare(model, given, train, actual, expected)
    except TimeoutError:
        raise
    except Exception as error:
        if "TimeoutError" in str(error):
            raise TimeoutError("too slow to compile") from error
        output = gradient = None
        wrong = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    by_hand = [f for f in findings if f.operation == "softmax" and f.reason not in NOT_ATTENTION]
    attentions = [f for f in findings if f.fused or f in by_hand]
    return {
        "softmaxes": len(findings),
        "attentions": len(attentions),
        "fused": sum(f.fused for f in findings),
        "operators": operators,
        "inductor": min(by_inductor, len(attentions)),
        "output": output,
        "gradient": gradient,
        "wrong": wrong,
        "seconds": round(time.perf_counter() - start, 1),
        "misses": [[f.reason, str(f.location), f.location.code] for f in findings if not f.fused],
        "calls": sorted({f.masks for f in findings if f.fused}),
    }


def _results(run: Callable, model: nn.Module, given: dict, train: bool) -> tuple[list, list]:
    """The outputs, and the gradients of the parameters."""
    torch.manual_seed(0)
    if not train:
        with torch.no_grad():
            return _floats(run(**given)), []
    outputs = _floats(run(**given))
    roots = [t for t in outputs if t.requires_grad]
    generators = (torch.Generator().manual_seed(i) for i in range(len(roots)))
    seeds = [torch.randn(t.shape, generator=g).to(t) for t, g in zip(roots, generators)]
    leaves = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    return [t.detach() for t in outputs], list(grads)


def _compare(model, given, train, actual, expected) -> tuple[float, float | None, str]:
    """The relative differences of outputs and gradients, and what exceeds the budget."""
    worst, exceeding = [0.0, 0.0], []
    for kind, (found, eager) in enumerate(zip(actual, expected, strict=True)):
        assert len(found) == len(eager)
        scale = max((e.abs().max().item() for e in eager if e is not None and e.numel()), default=0)
        for i, (a, e) in enumerate(zip(found, eager, strict=True)):
            if a is None and e is None:
                continue
            if a is None or e is None:
                exceeding.append((kind, i))
                continue
            difference = (a - e).abs().max().item() / max(scale, 1e-30) if a.numel() else 0.0
            worst[kind] = max(worst[kind], difference)
            if not difference <= TOLERANCE:
                exceeding.append((kind, i))
    wrong = (
        _compare_with_fp64(model, given, train, actual, expected, exceeding) if exceeding else ""
    )
    return worst[0], worst[1] if train else None, wrong


def _compare_with_fp64(model, given, train, actual, expected, exceeding) -> str:
    """Compare results that differ with those in fp64; returns what exceeds the budget."""
    double = copy.deepcopy(model).double()
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    try:
        with _Float64Mode():
            oracle = _results(double, double, given, train)
    except Exception as error:
        return f"differs, and fp64 does not run: {type(error).__name__}"
    for kind, i in exceeding:
        name = f"{('output', 'gradient')[kind]} {i}"
        a, o, e = (x[kind][i] for x in (actual, oracle, expected))
        if a is None or e is None:
            return f"{name} is missing on one side"
        try:
            assert_within_budget(name, a, o, e)
        except AssertionError as error:
            return str(error)
    return ""


class _Float64Mode(TorchFunctionMode):
    """Replaces float32 in a model's code by float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = Tensor.double if func is Tensor.float else func
        replaced = tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {})
        )
        return func(*replaced[0], **replaced[1])


def summary(results: dict[str, Any], console: Console, rows: bool) -> int:
    """Print the tables; return the number of wrong results."""
    ran = {name: r for name, r in results.items() if "skipped" not in r}
    if rows:
        columns = ("attentions", "fused", "Inductor", "output", "gradient", "problem")
        table = Table("architecture", "mode", "softmaxes", *columns)
        for name, result in ran.items():
            for mode, r in result.items():
                figures = (r["softmaxes"], r["attentions"], r["fused"], r["inductor"])
                diffs = ("-" if r[x] is None else f"{r[x]:.0e}" for x in ("output", "gradient"))
                table.add_row(name, mode, *map(str, figures), *diffs, r["wrong"])
        console.print(table)
    wrong = 0
    with_attention = [
        r for r in ran.values() if r["eval"]["attentions"] or r["train"]["attentions"]
    ]
    console.print(
        f"{len(ran)} architectures ran, {len(with_attention)} with attention; "
        f"{len(results) - len(ran)} could not be built or run"
    )
    for mode in ("eval", "train"):
        modes = [r[mode] for r in ran.values()]
        attentions, fused, by_inductor = (
            sum(r[x] for r in modes) for x in ("attentions", "fused", "inductor")
        )
        calls = sum(r.get("operators", 0) for r in modes)
        different = sum(bool(r["wrong"]) for r in modes)
        wrong += different
        share = fused / max(attentions, 1)
        console.print(
            f"{mode}: {fused} of {attentions} attentions fused ({share:.1%}) into {calls} calls, "
            f"Inductor alone {by_inductor}; {different} architectures differ beyond the budget"
        )
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for name, result in ran.items():
        for reason, *_ in result["eval"]["misses"] + result["train"]["misses"]:
            reasons[reason].append(name)
    table = Table("not fused because", "softmaxes", "architectures")
    for reason, names in sorted(reasons.items(), key=lambda x: -len(x[1])):
        each = list(dict.fromkeys(names))
        shown = ", ".join(each[:6]) + (f" and {len(each) - 6} more" if len(each) > 6 else "")
        table.add_row(reason, str(len(names)), shown)
    console.print(table)
    return wrong


def main(
    names: Annotated[list[str] | None, typer.Argument(help="architectures; all by default")] = None,
    json_file: Annotated[
        Path, typer.Option("--json", help="results, read and written", callback=in_existing_folder)
    ] = Path("fusion_sweep.json"),
    again: Annotated[bool, typer.Option(help="repeat results that the file has")] = False,
    seconds: Annotated[int, typer.Option(min=1, help="for one architecture at most")] = 120,
    part: Annotated[str, typer.Option("--slice", help="i/n: every n-th, from the i-th on")] = "0/1",
    only_report: Annotated[bool, typer.Option(help="run nothing")] = False,
    rows: Annotated[bool, typer.Option(help="a row for each architecture")] = False,
) -> None:
    """Run the pass on tiny models of every architecture; exit with 1 if a result is wrong."""
    try:
        results = json.loads(json_file.read_text()) if json_file.exists() else {}
    except ValueError as error:
        raise typer.BadParameter(f"{json_file} holds no results: {error}") from None
    first, _, step = part.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise typer.BadParameter(f"--slice must be i/n with i below n, got {part!r}")
    known = architectures()
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"transformers has no architecture {name!r} to build")
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    functorch_config.enable_autograd_cache = False
    inductor_config.fallback_random = True  # the random numbers of eager mode
    for name in [] if only_report else names or known[int(first) :: int(step)]:
        if name in results and not again:
            continue
        try:
            with time_limit(seconds):
                results[name] = examine(name)
        except TimeoutError as error:
            results[name] = {"skipped": str(error)}
        print(name, _line(results[name]), flush=True)
        json_file.write_text(json.dumps(results, indent=1) + "\n")
        torch._dynamo.reset()
        gc.collect()
    raise typer.Exit(int(summary(results, Console(), rows) > 0))


def _line(result: dict) -> str:
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    parts = (f"{m} {r['fused']}/{r['attentions']} {r['wrong']}" for m, r in result.items())
    return ", ".join(parts)


if __name__ == "__main__":
    typer.run(main)
