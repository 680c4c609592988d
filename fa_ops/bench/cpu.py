"""`python -m fa_ops bench cpu`: the CPU backend against aten's flash kernel and SDPA.

Time is CPU time of this process on one thread, which other processes hardly affect. Memory is the
growth of the resident set over a forward and a backward pass, results included.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.bench import command
from fa_ops.bench.command import Only, matching
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
    steps = command.watched(
        range(rounds), "timing", "cpu", chosen, "rounds", lambda n: f"round {n}"
    )
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


# Small calls beside SDPA: bursts of half a millisecond, which other processes seldom interrupt.

_BURST = 5e-4


@dataclasses.dataclass(frozen=True)
class SmallRow:
    """The fewest microseconds of a call and of SDPA's; of training None where there is none."""

    name: str
    forward_us: float
    sdpa_forward_us: float
    training_us: float | None
    sdpa_training_us: float | None


def small_problems() -> dict[str, tuple[_Contender, _Contender]]:
    """The call of fa_ops and that of SDPA, by name; over caches there is no training."""
    g = torch.Generator().manual_seed(0)
    causal = {"is_causal": True}
    pairs = {}

    def add(name: str, shape: tuple, ours, theirs, dtype: torch.dtype = torch.float32) -> None:
        B, Hq, Hkv, Sq, Sk, D = shape
        sizes = (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, D)
        q, k, v = (torch.randn(size, generator=g).to(dtype).requires_grad_() for size in sizes)
        if isinstance(ours, dict):
            ours = partial(fa_ops.attention, backend="cpu", **ours)
        sdpa = partial(F.scaled_dot_product_attention, enable_gqa=Hq != Hkv, **theirs)
        pairs[name] = _Contender(ours, q, k, v), _Contender(sdpa, q, k, v)

    def padding(lens: Tensor, keys: int) -> Tensor:
        return (torch.arange(keys) < lens[:, None])[:, None, None]

    def cached(lens: Tensor) -> Callable:
        return lambda q, k, v: fa_ops.attention_with_kv_cache(q, k, v, lens, backend="cpu")

    tiny, encoder, layer = (1, 4, 4, 32, 32, 16), (8, 12, 12, 64, 64, 64), (1, 8, 8, 256, 256, 64)
    heads, tril = (1, 9, 3, 1, 512, 64), torch.ones(256, 256, dtype=torch.bool).tril()
    rows = torch.tensor([64, 40, 64, 13, 50, 64, 7, 33], dtype=torch.int32)
    lens = torch.tensor([500, 512, 300, 20], dtype=torch.int32)
    bias, keep = torch.randn(32, 32, generator=g), padding(rows, 64)
    hidden = torch.ones(1, 1, 1, 512, dtype=torch.bool)
    hidden[..., :40] = False
    add("1 x 4 x 32 x 16, causal", tiny, causal, causal)
    add("1 x 4 x 32 x 16", tiny, {}, {})
    add("1 x 4 x 32 x 16, float mask", tiny, {"attn_mask": bias}, {"attn_mask": bias})
    mask = {"attn_mask": tril[:32, :32].clone()}
    add("1 x 4 x 32 x 16, bool mask", tiny, mask, mask)
    add("1 x 4 x 32 x 16, causal, bfloat16", tiny, causal, causal, torch.bfloat16)
    add("8 x 12 x 64 x 64", encoder, {}, {})
    add("8 x 12 x 64 x 64, kv_lens", encoder, {"kv_lens": rows}, {"attn_mask": keep})
    add("8 x 12 x 64 x 64, bool mask", encoder, {"attn_mask": keep}, {"attn_mask": keep})
    add("1 x 8 x 256 x 64, causal", layer, causal, causal)
    add("1 x 8 x 256 x 64, bool mask", layer, {"attn_mask": tril}, {"attn_mask": tril})
    add("1 x 8 x 256 x 64, causal, bfloat16", layer, causal, causal, torch.bfloat16)
    add("1 x 8 x 256 x 64, causal, float16", layer, causal, causal, torch.float16)
    add("9 / 3 heads, 128 x 64, causal", (1, 9, 3, 128, 128, 64), causal, causal)
    add("2 x 8 heads, 16 of 77, D 40", (2, 8, 8, 16, 77, 40), {}, {})
    add("9 / 3 heads, 1 of 512", heads, causal, {})
    add("9 / 3 heads, 1 of 512, bool mask", heads, {"attn_mask": hidden}, {"attn_mask": hidden})
    add(
        "9 / 3 heads, 1 of 500 in a cache",
        heads,
        cached(lens[:1]),
        {"attn_mask": padding(lens[:1], 512)},
    )
    add(
        "4 x 9 / 3 heads, 1 of 20 to 512 in a cache",
        (4, *heads[1:]),
        cached(lens),
        {"attn_mask": padding(lens, 512)},
    )
    return pairs


def run_small(rounds: int = 200, threads: int = 1, only: str | None = None) -> list[SmallRow]:
    """Measure small calls, and the same of SDPA, in bursts that alternate; the fastest counts."""
    known = small_problems()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        names = matching(only, known, "problem")
        steps = command.watched(names, "small", "cpu", ["fa_ops cpu", "SDPA"])
        return [_small_row(name, *known[name], rounds) for name in steps]
    finally:
        torch.set_num_threads(before)


def _small_row(name: str, ours: _Contender, sdpa: _Contender, rounds: int) -> SmallRow:
    forward = _alternated(rounds, ours.forward, sdpa.forward)
    is_trained = "cache" not in name
    training = _alternated(rounds, ours.training, sdpa.training) if is_trained else (None, None)
    return SmallRow(name, *forward, *training)


def _alternated(rounds: int, *calls: Callable[[], None]) -> list[float]:
    """The fewest microseconds of each of the calls."""
    counts, best = [], [math.inf] * len(calls)
    for call in calls:
        _seconds(call, time.perf_counter)  # plans are prepared
        counts.append(max(1, round(_BURST / _seconds(call, time.perf_counter))))
    for step in range(rounds):
        order = range(len(calls)) if step % 2 else reversed(range(len(calls)))
        for at in order:
            start = time.perf_counter()
            for _ in range(counts[at]):
                calls[at]()
            best[at] = min(best[at], 1e6 * (time.perf_counter() - start) / counts[at])
    return best


def _small_table(rows: list[SmallRow], threads: int) -> Table:
    title = f"B x H x S x D, float32, {threads} thread(s), {command.environment('cpu')['device']}"
    columns = "", "forward us", "SDPA", "ratio", "fwd + bwd us", "SDPA", "ratio"
    table = Table(*columns, title=title)
    for row in rows:
        cells = []
        for ours, theirs in (
            (row.forward_us, row.sdpa_forward_us),
            (row.training_us, row.sdpa_training_us),
        ):
            shown = ("", "", "")
            if ours is not None and theirs is not None:
                shown = f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"
            cells += shown
        table.add_row(row.name, *cells)
    return table


def main(
    preset: Annotated[
        Literal["features", "small"], typer.Option(help="features of long calls, or small calls")
    ] = "features",
    length: Annotated[int, typer.Option(min=2, help="keys of the features")] = 4096,
    rounds: Annotated[int | None, typer.Option(min=1, help="default: 3; 200 of small")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    only: Only = None,
) -> None:
    """Compare the CPU backend with aten's causal flash kernel; `small`: small calls with SDPA."""
    console = Console(width=None if Console().is_terminal else 120)
    if preset == "small":
        console.print(_small_table(run_small(rounds or 200, threads, only), threads))
        return
    rows = run(length, rounds or 3, threads, only)
    clock = "CPU time" if threads == 1 else "wall time"
    device = command.environment("cpu")["device"]
    title = f"({B}, {H}, {length}, {D}), {threads} thread(s), {clock}, {device}"
    table = Table("", "forward ms", "x aten", "fwd + bwd ms", "x aten", "peak MiB", title=title)
    for row in rows:
        ratios = (f"{x:.2f}" for x in (row.forward_ratio, row.training_ratio))
        forward, training = f"{row.forward_ms:.0f}", f"{row.training_ms:.0f}"
        first, second = ratios
        table.add_row(row.name, forward, first, training, second, f"{row.peak_mib:.0f}")
    console.print(table)
