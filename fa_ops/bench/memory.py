"""`python -m fa_ops bench memory`: peak memory of attention by sequence length.

Attention written by hand, SDPA and fa_ops compute the same causal attention, forward and backward.
The peak is that of one step above the memory held before it: query, key, value and the gradient of
the output are not counted, the output, its gradients and everything in between are. On a GPU it is
read from torch's allocator, on a CPU from the resident set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.bench import options, peers, report
from fa_ops.bench.problems import Problem
from fa_ops.bench.timing import peak_memory

GPU_LENGTHS = "1024,2048,4096,8192,16384,32768,65536"
CPU_LENGTHS = "512,1024,2048,4096"


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, H, S, D) tensors as models write it, with a softmax in float32."""
    S, D = q.shape[-2:]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "eager": eager,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "fa_ops": lambda q, k, v: fa_ops.attention(q, k, v, is_causal=True),
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of one implementation on one problem in MiB, or the reason why there is none."""

    problem: Problem
    implementation: str
    mib: float | None = None
    reason: str | None = None


def measure(problem: Problem, name: str, device: str) -> Peak:
    """Measure a forward and a backward pass, after one that compiles what is missing."""
    q, k, v = problem.inputs(device, "bhsd", requires_grad=True)
    grad_out = torch.ones_like(q)

    def step() -> None:
        torch.autograd.grad(CALLS[name](q, k, v), (q, k, v), grad_out)

    try:
        step()
        peak = peak_memory(step, device)
    except torch.OutOfMemoryError as error:
        return Peak(problem, name, reason=peers.failure(error))
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    if peak is None:
        return Peak(problem, name, reason="the system reports no peak of the resident set")
    return Peak(problem, name, peak / 2**20)


def table(title: str, peaks: list[Peak]) -> Table:
    """A row for each length: MiB of each implementation."""
    result = Table(title=title, caption="peak MiB of a forward and a backward pass")
    result.add_column("tokens", justify="right")
    for name in CALLS:
        result.add_column(name, justify="right")
    for S in dict.fromkeys(peak.problem.S for peak in peaks):
        row = {peak.implementation: peak.mib for peak in peaks if peak.problem.S == S}
        result.add_row(str(S), *("-" if row[n] is None else f"{row[n]:.1f}" for n in CALLS))
    return result


def records(peaks: list[Peak]) -> Iterator[dict]:
    """The results for the JSON file."""
    for peak in peaks:
        shape = {name: getattr(peak.problem, name) for name in ("B", "Hq", "Hkv", "S", "D")}
        record = shape | {"causal": True, "dtype": str(peak.problem.dtype).removeprefix("torch.")}
        record["implementation"] = peak.implementation
        yield record | ({"not_measured": peak.reason} if peak.mib is None else {"mib": peak.mib})


def main(
    device: options.Device = "auto",
    lengths: Annotated[
        str | None,
        typer.Option(help=f"default: {GPU_LENGTHS} on a GPU, {CPU_LENGTHS} on a CPU"),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="query and key heads")] = 16,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    json: options.Json = None,
) -> None:
    """Compare the peak memory of eager attention, SDPA and fa_ops by sequence length."""
    device = options.device(device)
    chosen = options.words(lengths or (GPU_LENGTHS if device == "cuda" else CPU_LENGTHS))
    for word in chosen:
        if not word.isdecimal() or int(word) == 0:
            raise typer.BadParameter(f"--lengths must be positive integers, got {word!r}")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    problems = [Problem(1, heads, heads, int(word), head_dim, True, dtype) for word in chosen]
    peaks = [measure(problem, name, device) for problem in problems for name in CALLS]
    facts, console = report.environment(device), Console()
    title = f"1 x {heads} heads of {head_dim}, causal, {facts['device']}, torch {facts['torch']}"
    console.print(table(title, peaks))
    for peak in peaks:
        if peak.reason is not None:
            where = f"{peak.implementation}, {peak.problem.S} tokens"
            console.print(f"not measured: {where}: {peak.reason}", markup=False)
    if json is not None:
        report.write_json(json, device, "memory", list(records(peaks)))
