"""`python -m tests.evaluation.fusion_bench`: the speed-up of fusion on a Llama, and its cost.

`speed` compiles variants of the model: eager attention with Inductor alone ("inductor"), the same
with the fusion pass ("fused"), attn_implementation="sdpa" without and with it ("sdpa_fused"), and
"fa_ops". Each round times every
variant once, in random order, and divides by the time of "fa_ops" in that round. Drift between
rounds, for instance of clocks, then cancels out, and differences of a few per cent become visible.
`cost` prints the share of the pass in the compile time. Weights are random; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import compilation_time_metrics, counters

from compile_passes.backend import fa_ops
from compile_passes.install import TIMER, install
from fa_ops.bench import report
from fa_ops.cli import options

# name: (attn_implementation, whether the pass runs)
VARIANTS = {
    "fused": ("eager", True),
    "inductor": ("eager", False),
    "sdpa": ("sdpa", False),
    "sdpa_fused": ("sdpa", True),
    "fa_ops": ("fa_ops", False),
}
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A forward pass, or a training step (forward and backward), over `batch` x `length` tokens.
    With `padded`, row b is padded on the left by b / batch of its length.
    """

    name: str
    layers: int
    batch: int
    length: int
    train: bool = False
    padded: bool = False


def workloads(layers: int, prefill: int, train: int) -> dict[str, Workload]:
    """The workloads by name."""
    found = (
        Workload("prefill", layers, 1, prefill),
        Workload("train", max(layers // 2, 1), 2, train, train=True),
        Workload("batch", layers, 8, max(prefill // 8, 8)),
        Workload("padded", layers, 8, max(prefill // 8, 8), padded=True),
    )
    return {workload.name: workload for workload in found}


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a variant."""

    workload: str
    variant: str
    ms: float  # the median of the rounds
    low: float
    high: float
    ratio: tuple[float, float, float]  # to "fa_ops": median of the rounds, and its 95 % interval
    gib: float | None  # peak memory, with the weights and gradients of one model; None on a CPU
    fused: int  # attentions that the pass replaced
    difference: float  # of the hidden states, relative to Inductor alone


def build(shape: dict, layers: int, variant: str, device: str, like: object = None):
    """A LlamaModel in bf16 with random weights, or with those of the model `like`."""
    from transformers import LlamaConfig, LlamaModel

    implementation = VARIANTS[variant][0]
    if implementation == "fa_ops":
        import hf_integration  # noqa: F401  registers the name
    config = LlamaConfig(
        **shape,
        num_hidden_layers=layers,
        use_cache=False,
        max_position_embeddings=16384,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaModel(config).to(torch.bfloat16)
    if like is not None:
        for parameter, shared in zip(model.parameters(), like.parameters(), strict=True):
            parameter.data = shared.data
    return model


def step_of(model: torch.nn.Module, ids: Tensor, workload: Workload, fused: bool) -> Callable:
    """A function that runs a forward pass, or forward and backward, and returns hidden states."""
    compiled = torch.compile(model, backend=fa_ops if fused else "inductor", dynamic=False)
    mask = None
    if workload.padded:
        rows = torch.arange(workload.batch, device=ids.device)[:, None]
        first = rows * workload.length // workload.batch
        mask = (torch.arange(workload.length, device=ids.device) >= first).long()

    def infer() -> Tensor:
        with torch.no_grad():
            return compiled(ids, attention_mask=mask).last_hidden_state

    def train() -> Tensor:
        hidden = compiled(ids, attention_mask=mask).last_hidden_state
        hidden.float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        return hidden.detach()

    model.train(workload.train)
    return train if workload.train else infer


def milliseconds(step: Callable, device: str, repeats: int) -> float:
    """The mean time of a step over `repeats` steps, after one warm-up step."""
    step()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) * 1e3 / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and its distribution-free 95 % interval, by order statistics."""
    ordered = sorted(values)
    n = len(ordered)
    half = 0.98 * n**0.5
    low, high = max(int(n / 2 - half), 0), min(math.ceil(n / 2 + half), n - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def peak(step: Callable, device: str) -> float | None:
    """The peak memory of a step in GiB."""
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def measure(
    workload: Workload, shape: dict, device: str, rounds: int, repeats: int, variants: list[str]
) -> list[Result]:
    """Compile every variant, then time them alternately on the same weights."""
    torch._dynamo.reset()
    ids = torch.randint(0, shape["vocab_size"], (workload.batch, workload.length), device=device)
    steps, outputs, fused = {}, {}, {}
    first = None
    for variant in variants:
        model = build(shape, workload.layers, variant, device, first)
        first = first or model
        counters["fa_ops"].clear()
        steps[variant] = step_of(model, ids, workload, VARIANTS[variant][1])
        for _ in range(3):
            outputs[variant] = steps[variant]()
        outputs[variant] = outputs[variant].float().cpu()
        fused[variant] = counters["fa_ops"]["fused"]
    memory = {variant: peak(step, device) for variant, step in steps.items()}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    order = list(steps)
    for index in range(rounds):
        random.Random(index).shuffle(order)
        for variant in order:
            times[variant].append(milliseconds(steps[variant], device, repeats))
    reference = outputs["inductor" if "inductor" in outputs else variants[0]]
    base = times["fa_ops" if "fa_ops" in times else variants[0]]
    return [
        Result(
            workload.name,
            variant,
            statistics.median(times[variant]),
            min(times[variant]),
            max(times[variant]),
            median_interval([t / b for t, b in zip(times[variant], base, strict=True)]),
            memory[variant],
            fused[variant],
            ((outputs[variant] - reference).norm() / reference.norm()).item(),
        )
        for variant in variants
    ]


def show(results: list[Result], console: Console) -> None:
    """Print a table of results."""
    table = Table("workload", "variant", "ms", "of fa_ops", "GiB", "fused", "difference")
    for r in results:
        middle, low, high = r.ratio
        ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        memory = "-" if r.gib is None else f"{r.gib:.2f}"
        rest = (ratio, memory, str(r.fused), f"{r.difference:.1e}")
        table.add_row(r.workload, r.variant, f"{r.ms:.2f}", *rest)
    console.print(table)


app = typer.Typer(help=__doc__, no_args_is_help=True)

Device = Annotated[str, typer.Option(help="auto, cuda or cpu")]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="write the figures here", callback=options.in_existing_folder),
]


@app.command()
def speed(
    device: Device = "auto",
    json_file: Json = None,
    tiny: Annotated[bool, typer.Option(help="a small model, to try the command")] = False,
    layers: Annotated[
        int, typer.Option(min=1, help="of the prefill; half of them for training")
    ] = 8,
    prefill: Annotated[int, typer.Option(min=1, help="tokens, in a batch of 1")] = 8192,
    train: Annotated[int, typer.Option(min=1, help="tokens, in a batch of 2")] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="steps of a variant in each round")] = 3,
    variants: Annotated[str, typer.Option(help="comma separated")] = ",".join(VARIANTS),
    names: Annotated[
        str, typer.Option("--workloads", help="comma separated: prefill, train, batch, padded")
    ] = "prefill,train",
) -> None:
    """Time the variants on a prefill and on a training step."""
    device = options.device(device)
    chosen = options.one_of("--variants", options.words(variants), VARIANTS)
    if device == "cpu" and not tiny:
        raise typer.BadParameter("a model of 8B shape needs CUDA; --tiny tries the command")
    torch._dynamo.config.recompile_limit = 64  # the variants share LlamaModel.forward
    results = []
    known = workloads(layers, prefill, train)
    for workload in map(known.get, options.one_of("--workloads", options.words(names), known)):
        with _without_caches():
            shape = TINY if tiny else LLAMA_3_8B
            results += measure(workload, shape, device, rounds, repeats, chosen)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    show(results, Console())
    if json_file is not None:
        records = [dataclasses.asdict(result) for result in results]
        facts = {"transformers": metadata.version("transformers")}
        report.write_json(json_file, device, "fusion speed", records, **facts)


@app.command()
def cost(
    device: Device = "auto",
    json_file: Json = None,
    depths: Annotated[str, typer.Option(help="layers, comma separated")] = "10,20,30",
) -> None:
    """Measure the share of the pass in the first call, without caches, for several depths of a
    Llama, and for layers without attention.
    """
    device = options.device(device)
    numbers = [int(x) for x in options.words(depths)]
    models = [("Llama", n, lambda n=n: build(TINY, n, "fused", device).float()) for n in numbers]
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
        report.write_json(json_file, device, "fusion cost", rows)


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
