"""`python -m compile_passes.bench`: what fusing is worth on a Llama, and what it costs.

`speed` compiles the model four ways and lets them take turns: eager attention with Inductor alone
("inductor"), the same with this pass ("fused"), attn_implementation="sdpa" and "fa_ops". Each round
times every variant once, in another order, and divides by what "fa_ops" took in that round: what
drifts from round to round, such as clocks, drops out, and a few per cent show that would not show
in the milliseconds. `cost` prints how much of the compile time the pass takes. Weights are random;
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import compilation_time_metrics, counters

from compile_passes.backend import fa_ops
from compile_passes.install import TIMER, install

# name: (attn_implementation, whether the pass runs)
VARIANTS = {
    "fused": ("eager", True),
    "inductor": ("eager", False),
    "sdpa": ("sdpa", False),
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
    """A forward pass, or a training step (forward and backward), over `batch` x `length` tokens."""

    name: str
    layers: int
    batch: int
    length: int
    train: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """Milliseconds (median and extremes of the rounds); `ratio` to "fa_ops" (median of the rounds'
    ratios, with the 95 % interval of that median); GiB that torch's allocator held at most, weights
    and gradients of one model included; None on a CPU.
    """

    workload: str
    variant: str
    ms: float
    low: float
    high: float
    ratio: tuple[float, float, float]
    gib: float | None
    fused: int  # attentions that the pass replaced
    difference: float  # of the hidden states, relative to Inductor alone


def build(shape: dict, layers: int, variant: str, device: str, like: object = None):
    """A LlamaModel in bf16 with random weights; `like` shares its weights."""
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
        for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
            mine.data = theirs.data
    return model


def step_of(model: torch.nn.Module, ids: Tensor, workload: Workload, fused: bool) -> Callable:
    """One forward pass, or forward and backward; returns the hidden states."""
    compiled = torch.compile(model, backend=fa_ops if fused else "inductor", dynamic=False)

    def infer() -> Tensor:
        with torch.no_grad():
            return compiled(ids).last_hidden_state

    def train() -> Tensor:
        hidden = compiled(ids).last_hidden_state
        hidden.float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        return hidden.detach()

    model.train(workload.train)
    return train if workload.train else infer


def milliseconds(step: Callable, device: str, repeats: int) -> float:
    """Of one of so many steps in a row, after one that is not counted."""
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
    """The median and its 95 % interval by order statistics, whatever the distribution."""
    ordered = sorted(values)
    n = len(ordered)
    half = 0.98 * n**0.5
    low, high = max(int(n / 2 - half), 0), min(math.ceil(n / 2 + half), n - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def peak(step: Callable, device: str) -> float | None:
    """GiB"""
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
    """Compile every variant, then time them in turns on the same weights."""
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
    for turn in range(rounds):
        random.Random(turn).shuffle(order)
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
    table = Table("workload", "variant", "ms", "of fa_ops", "GiB", "fused", "difference")
    for r in results:
        middle, low, high = r.ratio
        ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        memory = "-" if r.gib is None else f"{r.gib:.2f}"
        rest = (ratio, memory, str(r.fused), f"{r.difference:.1e}")
        table.add_row(r.workload, r.variant, f"{r.ms:.2f}", *rest)
    console.print(table)


def speed(arguments: argparse.Namespace, console: Console) -> dict:
    """The four variants on a prefill and on a training step."""
    device = arguments.device
    shape = TINY if arguments.tiny else LLAMA_3_8B
    prefill = Workload("prefill", arguments.layers, 1, arguments.prefill, False)
    train = Workload("train", max(arguments.layers // 2, 1), 2, arguments.train, True)
    variants = arguments.variants.split(",")
    torch._dynamo.config.recompile_limit = 64  # the variants share LlamaModel.forward
    results = []
    for workload in (prefill, train):
        results += measure(workload, shape, device, arguments.rounds, arguments.repeats, variants)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    show(results, console)
    return {"results": [dataclasses.asdict(r) for r in results]}


def cost(arguments: argparse.Namespace, console: Console) -> dict:
    """Seconds in the pass against the whole first call, without caches, over growing depths."""
    table = Table("layers", "compile s", "pass s", "share", "fused")
    rows = []
    for layers in arguments.depths:
        torch._dynamo.reset()
        counters.clear()
        compilation_time_metrics.clear()
        model = build(TINY, layers, "fused", arguments.device).float()
        ids = torch.zeros(1, 64, dtype=torch.long, device=arguments.device)
        start = time.perf_counter()
        with install(), torch.no_grad():
            torch.compile(model)(ids)
        total = time.perf_counter() - start
        spent = sum(compilation_time_metrics[TIMER])
        rows.append({"layers": layers, "compile_s": total, "pass_s": spent})
        fused = str(counters["fa_ops"]["fused"])
        table.add_row(str(layers), f"{total:.1f}", f"{spent:.3f}", f"{spent / total:.1%}", fused)
    console.print(table)
    return {"cost": rows}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m compile_passes.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    for name, run in (("speed", speed), ("cost", cost)):
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--device", default=default)
        command.add_argument("--json", type=Path, help="write the figures here")
    ours = commands.choices["speed"]
    ours.add_argument("--tiny", action="store_true", help="a small model, to try the command")
    ours.add_argument("--layers", type=int, default=8, help="of the prefill; training has half")
    ours.add_argument("--prefill", type=int, default=8192, help="tokens, in a batch of 1")
    ours.add_argument("--train", type=int, default=4096, help="tokens, in a batch of 2")
    ours.add_argument("--rounds", type=int, default=20)
    ours.add_argument("--repeats", type=int, default=3, help="steps of a variant in each round")
    ours.add_argument("--variants", default=",".join(VARIANTS))
    commands.choices["cost"].add_argument("--depths", type=int, nargs="+", default=[10, 20, 30])
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json: no such folder: {arguments.json.parent}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no such device")
    for name in ("layers", "prefill", "train", "rounds", "repeats"):
        if getattr(arguments, name, 1) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    for name in getattr(arguments, "variants", "fused").split(","):
        if name not in VARIANTS:
            parser.error(f"--variants: {name!r} is none of {', '.join(VARIANTS)}")
    if arguments.device == "cpu" and not getattr(arguments, "tiny", True):
        parser.error("speed runs a model of 8B shape, which needs CUDA; --tiny tries the command")
    gpu = {"gpu": torch.cuda.get_device_name()} if arguments.device == "cuda" else {}
    host = {"torch": torch.__version__, "device": arguments.device} | gpu
    with torch._inductor.config.patch(force_disable_caches=True):  # a cached graph skips the pass
        result = host | arguments.run(arguments, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
