"""`python -m tests.evaluation.fusion_bench`: the speed-up of fusion, and its cost.

`speed` compiles the variants of each workload of `fusion_workloads.py`: a prefill and a training
step of a Llama with attn_implementation="sdpa", without the fusion pass ("sdpa") and with it
("sdpa_fused"), and with "fa_ops"; both steps not compiled; a left-padded batch beside one without
padding; GPT-2 with a causal mask in a buffer beside the causal flag; FlexAttention on documents.
Each round times every variant once, in random order, and divides by the time of one of them in that
round. Drift between rounds, for instance of clocks, then cancels out, and differences of a few per
cent become visible.
`cost` prints the share of the pass in the compile time. Weights are random; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import random
import statistics
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import compilation_time_metrics, counters

from compile_passes.install import TIMER, install
from fa_ops.bench import command
from tests.evaluation.fusion_workloads import (
    LLAMA_3_8B,
    TINY,
    WORKLOADS,
    Sizes,
    Step,
    Workload,
    llama,
)

VARIANTS = list(dict.fromkeys(v for w in WORKLOADS.values() for v in w.variants + w.others))


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a variant."""

    workload: str
    variant: str
    ms: float  # the median of the rounds
    low: float
    high: float
    ratio: tuple[float, float, float]  # to the base: median of the rounds, and its 95 % interval
    gib: float | None  # peak memory, with the weights and gradients of one model; None on a CPU
    fused: int  # attentions that the pass replaced
    difference: float  # of the results, relative to the base
    compile_s: float  # until the third step has ended


@dataclasses.dataclass(frozen=True)
class Timing:
    """How often steps are timed."""

    device: str
    rounds: int
    repeats: int  # steps of a variant in each round


def milliseconds(step: Step, timing: Timing) -> float:
    """The mean time of a step, after one warm-up step."""
    step()
    if timing.device == "cpu":
        start = time.perf_counter()
        for _ in range(timing.repeats):
            step()
        return (time.perf_counter() - start) * 1e3 / timing.repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(timing.repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / timing.repeats


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and its distribution-free 95 % interval, by order statistics."""
    ordered = sorted(values)
    n = len(ordered)
    half = 0.98 * n**0.5
    low, high = max(int(n / 2 - half), 0), min(math.ceil(n / 2 + half), n - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def peak(step: Step, device: str) -> float | None:
    """The peak memory of a step in GiB."""
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


class Measurement:
    """The compiled variants of a workload, and their results."""

    def __init__(self, workload: Workload, sizes: Sizes, device: str, variants: list[str]) -> None:
        """Compile every variant and run it three times."""
        torch._dynamo.config.recompile_limit = 64  # the variants share LlamaModel.forward
        torch.manual_seed(0)
        self.workload, self.variants = workload, variants
        self.steps: dict[str, Step] = {}
        self.outputs: dict[str, Tensor] = {}
        self.fused: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        with _without_caches():
            for variant, step in workload.steps(sizes, device, variants):
                counters["fa_ops"].clear()
                start = time.perf_counter()
                out = [step() for _ in range(3)][-1]
                self.steps[variant], self.outputs[variant] = step, out.float().cpu()
                self.fused[variant] = counters["fa_ops"]["fused"]
                self.seconds[variant] = time.perf_counter() - start

    def results(self, timing: Timing) -> list[Result]:
        """Time the variants alternately."""
        memory = {name: peak(step, timing.device) for name, step in self.steps.items()}
        times: dict[str, list[float]] = {name: [] for name in self.variants}
        order = list(self.steps)
        for index in range(timing.rounds):
            random.Random(index).shuffle(order)
            for name in order:
                times[name].append(milliseconds(self.steps[name], timing))
        base = self.workload.base if self.workload.base in times else self.variants[0]
        right = self.outputs[base]
        return [
            Result(
                self.workload.name,
                name,
                statistics.median(times[name]),
                min(times[name]),
                max(times[name]),
                median_interval([t / b for t, b in zip(times[name], times[base], strict=True)]),
                memory[name],
                self.fused[name],
                ((self.outputs[name] - right).norm() / right.norm()).item(),
                self.seconds[name],
            )
            for name in self.variants
        ]


def _worker(pipe: Connection, name: str, sizes: Sizes, timing: Timing, variants: list[str]) -> None:
    """Compile a workload, say so, and measure it when it is told to."""
    try:
        measurement = Measurement(WORKLOADS[name], sizes, timing.device, variants)
        pipe.send(None)
        pipe.recv()
        pipe.send(measurement.results(timing))
    except Exception:
        pipe.send(traceback.format_exc())


def measure(
    chosen: dict[str, list[str]], sizes: Sizes, timing: Timing, seconds: float
) -> Iterator[tuple[str, list[Result] | str]]:
    """The results of each workload, or the reason why there are none, as they are found.

    Each workload has a process. All compile at once, and are then timed one after another.
    """
    context = multiprocessing.get_context("spawn")
    pipes, workers = {}, {}
    for name, variants in chosen.items():
        pipes[name], given = context.Pipe()
        arguments = (given, name, sizes, timing, variants)
        workers[name] = context.Process(target=_worker, args=arguments, daemon=True)
        workers[name].start()
        given.close()
    try:
        end = time.monotonic() + seconds
        compiled = _all_messages(pipes, end)
        for name, pipe in pipes.items():
            message = compiled.get(name, f"did not compile in {seconds:.0f} s")
            if message is None:
                pipe.send("go")
                message = _message(pipe)
            yield name, message
    finally:
        for worker in workers.values():
            worker.kill()


def _all_messages(pipes: dict[str, Connection], end: float) -> dict[str, object]:
    """The first message of each worker that sends one before `end`."""
    waiting, messages = {pipe: name for name, pipe in pipes.items()}, {}
    while waiting:
        ready = wait(list(waiting), max(end - time.monotonic(), 0))
        if not ready:
            break
        for pipe in ready:
            messages[waiting.pop(pipe)] = _message(pipe)
    return messages


def _message(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except EOFError:
        return "its process ended without a result"


def show(title: str, results: list[Result], base: str, console: Console) -> None:
    """Print a table of the results of one workload."""
    table = Table("variant", "ms", f"of {base}", "GiB", "fused", "difference", "compiled in s")
    table.title, table.title_justify = title, "left"
    for r in results:
        middle, low, high = r.ratio
        ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        memory = "-" if r.gib is None else f"{r.gib:.2f}"
        rest = (ratio, memory, str(r.fused), f"{r.difference:.1e}", f"{r.compile_s:.0f}")
        table.add_row(r.variant, f"{r.ms:.2f}", *rest)
    console.print(table)


app = typer.Typer(help=__doc__, no_args_is_help=True)

Device = Annotated[str, typer.Option(help="auto, cuda or cpu")]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="write the figures here", callback=command.in_existing_folder),
]


@app.command()
def speed(
    device: Device = "auto",
    json_file: Json = None,
    tiny: Annotated[bool, typer.Option(help="small models, to try the command")] = False,
    layers: Annotated[
        int, typer.Option(min=1, help="of the prefill; half of them for training")
    ] = 8,
    prefill: Annotated[int, typer.Option(min=1, help="tokens, in a batch of 1")] = 8192,
    train: Annotated[int, typer.Option(min=1, help="tokens, in a batch of 2")] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    repeats: Annotated[int, typer.Option(min=1, help="steps of a variant in each round")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="for compiling, all at once")] = 300,
    variants: Annotated[
        str | None, typer.Option(help="comma separated, besides the base; all if not given")
    ] = None,
    names: Annotated[str, typer.Option("--workloads", help="comma separated")] = ",".join(
        WORKLOADS
    ),
) -> None:
    """Time the variants of each workload."""
    device = command.device(device)
    given = command.one_of("--variants", command.words(variants), VARIANTS)
    wanted = command.one_of("--workloads", command.words(names), WORKLOADS)
    if device == "cpu" and not tiny:
        raise typer.BadParameter("a model of 8B shape needs CUDA; --tiny tries the command")
    sizes = Sizes(TINY if tiny else LLAMA_3_8B, layers, prefill, train)
    if tiny:
        sizes = dataclasses.replace(sizes, gpt_layers=2, gpt_heads=2, gpt_batch=2, heads=4)
        sizes = dataclasses.replace(sizes, gpt_tokens=min(prefill, sizes.gpt_tokens))
    chosen = {name: _chosen(WORKLOADS[name], given if variants else None) for name in wanted}
    console, records, failed = Console(), [], False
    for name, found in measure(chosen, sizes, Timing(device, rounds, repeats), seconds):
        title = f"{name}: {WORKLOADS[name].describe(sizes)}"
        if isinstance(found, str):
            failed = True
            console.print(f"{title}: {found}", markup=False)
            continue
        show(title, found, WORKLOADS[name].base, console)
        records += [dataclasses.asdict(result) for result in found]
    if json_file is not None:
        facts = {"transformers": metadata.version("transformers")}
        command.write_json(json_file, device, "fusion speed", records, **facts)
    if failed:
        raise typer.Exit(1)


def _chosen(workload: Workload, given: list[str] | None) -> list[str]:
    """The variants of a workload that run: its base and those that are asked for."""
    known = (*workload.variants, *workload.others)
    wanted = workload.variants if given is None else (workload.base, *given)
    return [name for name in known if name in wanted]


@app.command()
def cost(
    device: Device = "auto",
    json_file: Json = None,
    depths: Annotated[str, typer.Option(help="layers, comma separated")] = "10,20,30",
) -> None:
    """Measure the share of the pass in the first call, without caches, for several depths of a
    Llama, and for layers without attention.
    """
    device = command.device(device)
    numbers = [int(x) for x in command.words(depths)]
    models = [("Llama", n, lambda n=n: llama(TINY, n, "eager", device).float()) for n in numbers]
    models.append(("MLP", numbers[-1], lambda: _without_attention(numbers[-1], device)))
    table = Table("model", "layers", "compile s", "pass s", "share", "fused")
    rows = []
    for name, layers, make in models:
        torch._dynamo.reset()
        counters.clear()
        compilation_time_metrics.clear()
        model, ids = make(), torch.zeros(1, 64, dtype=torch.long, device=device)
        start = time.perf_counter()
        with _without_caches(), install(), torch.no_grad():
            torch.compile(model)(ids)
        total = time.perf_counter() - start
        spent = sum(compilation_time_metrics[TIMER])
        rows.append({"model": name, "layers": layers, "compile_s": total, "pass_s": spent})
        fused = str(counters["fa_ops"]["fused"])
        share = f"{spent / total:.2%}"
        table.add_row(name, str(layers), f"{total:.1f}", f"{spent:.4f}", share, fused)
    Console().print(table)
    if json_file is not None:
        command.write_json(json_file, device, "fusion cost", rows)


def _without_attention(layers: int, device: str) -> torch.nn.Module:
    """As many layers as a Llama, without attention."""
    size, inner = TINY["hidden_size"], TINY["intermediate_size"]
    blocks = [torch.nn.Embedding(TINY["vocab_size"], size)]
    for _ in range(layers):
        blocks += [torch.nn.LayerNorm(size), torch.nn.Linear(size, inner), torch.nn.SiLU()]
        blocks += [torch.nn.Linear(inner, size)]
    return torch.nn.Sequential(*blocks).to(device)


def _without_caches():
    """A context without Inductor's caches, because cached graphs skip the pass."""
    return torch._inductor.config.patch(force_disable_caches=True)


if __name__ == "__main__":
    app()
