"""`python -m fa_ops bench cpu`: the CPU backend against aten's flash kernel.

Time is CPU time of this process on one thread, which other processes hardly affect. Memory is the
growth of the resident set over a forward and a backward pass, results included.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.bench import report
from fa_ops.bench.options import Only, matching
from fa_ops.bench.timing import peak_memory
from fa_ops.call.call import attention_call
from fa_ops.testing import naive

B, H, D = 1, 8, 64
BASELINE = "SDPA, aten flash"


@dataclasses.dataclass(frozen=True)
class ContenderRow:
    """Milliseconds and MiB of one contender, and its times relative to aten's."""

    name: str
    forward_ms: float
    training_ms: float
    forward_ratio: float
    training_ratio: float
    peak_mib: float


class _Contender:
    """An attention function with its inputs; `leaves` are differentiated in addition to q, k, v."""

    def __init__(
        self, call: Callable, q: Tensor, k: Tensor, v: Tensor, *leaves: Tensor, lse: bool = False
    ) -> None:
        self.call, self.inputs, self.leaves = call, (q, k, v), (q, k, v, *leaves)
        out = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype)
        self.cotangents = [out, torch.randn(q.shape[:3])] if lse else [out]

    def forward(self) -> None:
        with torch.no_grad():
            self.call(*self.inputs)

    def training(self) -> None:
        result = self.call(*self.inputs)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        torch.autograd.grad(outputs, self.leaves, self.cotangents)


def contenders(S: int) -> dict[str, _Contender]:
    """All contenders by name; q, k and v are (1, 8, S, 64) unless the name states otherwise."""
    g = torch.Generator().manual_seed(0)

    def draw(heads: int = H, length: int = S, dim: int = D, dtype=torch.float32) -> Tensor:
        x = torch.randn(B, heads, length, dim, generator=g)
        return x.to(dtype).requires_grad_()

    q, k, v = draw(), draw(), draw()
    causal = partial(fa_ops.attention, is_causal=True, backend="cpu")
    documents = torch.arange(S) // 512 * 512
    ranges = torch.stack([documents, documents + 512], -1).int().view(1, 1, S, 2)
    keep = torch.rand(S, S, generator=g) < 0.9
    bias = torch.randn(S, S, generator=g)
    learned = bias.clone().requires_grad_()
    features = {
        "causal": {},
        "causal, lse differentiated": {"return_lse": True},
        "causal, window of 512": {"window": (511, 0)},
        "causal, documents of 512": {"key_ranges": ranges},
        "causal, softcap": {"softcap": 30.0},
        "causal, ALiBi": {"alibi_slopes": torch.rand(H, generator=g)},
        "causal, sinks": {"sinks": torch.randn(H, generator=g)},
        "causal, dropout": {"dropout_p": 0.1},
        "causal, bool mask": {"attn_mask": keep},
        "causal, float mask": {"attn_mask": bias},
        "causal, float mask with gradient": {"attn_mask": learned},
    }
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    contenders = {BASELINE: _Contender(sdpa, q, k, v)}
    for name, options in features.items():
        leaves = [learned] if options.get("attn_mask") is learned else []
        call = partial(causal, **options)
        contenders[name] = _Contender(call, q, k, v, *leaves, lse="return_lse" in options)
    contenders["causal, 2 kv heads"] = _Contender(causal, q, draw(2), draw(2))
    contenders["causal, values of 32"] = _Contender(causal, q, k, draw(dim=32))
    contenders["causal, last half of the queries"] = _Contender(causal, draw(length=S // 2), k, v)
    for dtype in (torch.bfloat16, torch.float16):
        half = (draw(dtype=dtype) for _ in range(3))
        contenders[f"causal, {str(dtype).removeprefix('torch.')}"] = _Contender(causal, *half)
    contenders["naive"] = _Contender(
        lambda *qkv: naive(attention_call(*qkv, is_causal=True))[0], q, k, v
    )
    return contenders


def run(
    length: int = 4096, rounds: int = 3, threads: int = 1, only: str | None = None
) -> list[ContenderRow]:
    """Measure contenders for causal attention over (1, 8, length, 64) in fp32.

    Args:
        rounds: rounds over all contenders; the fastest time of each counts.
        threads: CPU threads; with more than one, wall time is measured.
        only: comma-separated; only contenders whose name contains one of the words, and aten's.
    """
    known = contenders(length)
    names = (BASELINE, *matching(only, known, "contender"))
    chosen = {name: x for name, x in known.items() if name in names}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best = _fastest(chosen, rounds, time.process_time if threads == 1 else time.perf_counter)
        peaks = {name: _peak_mib(contender.training) for name, contender in chosen.items()}
    finally:
        torch.set_num_threads(before)
    times = {key: 1e3 * seconds for key, seconds in best.items()}
    return [
        ContenderRow(
            name,
            times[name, "forward"],
            times[name, "training"],
            times[name, "forward"] / times[BASELINE, "forward"],
            times[name, "training"] / times[BASELINE, "training"],
            peaks[name],
        )
        for name in chosen
    ]


def _fastest(
    chosen: dict[str, _Contender], rounds: int, clock: Callable[[], float]
) -> dict[tuple[str, str], float]:
    """The fewest seconds, by the contender's name and "forward" or "training"."""
    best: dict[tuple[str, str], float] = {}
    steps = report.watched(range(rounds), "timing", "cpu", chosen, "rounds", lambda n: f"round {n}")
    for step in steps:
        for name, contender in chosen.items():
            if name == "naive" and step > 0:
                continue
            for part in ("forward", "training"):
                seconds = _seconds(getattr(contender, part), clock)
                best[name, part] = min(seconds, best.get((name, part), seconds))
    return best


def _peak_mib(call: Callable[[], None]) -> float:
    call()  # warm up: one-time allocations are not counted
    peak = peak_memory(call, "cpu")
    return float("nan") if peak is None else peak / 2**20


def _seconds(call: Callable[[], None], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def main(
    length: Annotated[int, typer.Option(min=2)] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    only: Only = None,
) -> None:
    """Compare time and memory of the CPU backend's features with aten's causal flash kernel."""
    rows = run(length, rounds, threads, only)
    facts = report.environment("cpu")
    clock = "CPU time" if threads == 1 else "wall time"
    title = f"({B}, {H}, {length}, {D}), {threads} thread(s), {clock}, {facts['device']}"
    table = Table("", "forward ms", "x aten", "fwd + bwd ms", "x aten", "peak MiB", title=title)
    for row in rows:
        ratios = (f"{x:.2f}" for x in (row.forward_ratio, row.training_ratio))
        forward, training = f"{row.forward_ms:.0f}", f"{row.training_ms:.0f}"
        first, second = ratios
        table.add_row(row.name, forward, first, training, second, f"{row.peak_mib:.0f}")
    Console(width=None if Console().is_terminal else 120).print(table)
