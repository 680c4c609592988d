"""`python -m fa_ops bench decode`: one query token against caches larger than the L2 cache.

Every implementation runs inside a CUDA graph that cycles through several caches, so that neither
host time nor data in L2 affects the result. All read the same memory, each in the layout that it
prefers. Each is compared with the float64 oracle on one kv head before it is timed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.backends import reference
from fa_ops.bench import command, host, timing
from fa_ops.bench.peers import DECODE_PEERS, Call, Implementation, decoders, failure
from fa_ops.bench.problems import DECODE_PRESETS, DecodeData, DecodeProblem
from fa_ops.call.call import attention_call

ROUNDS = 5
GRAPH_BYTES = 4e9  # calls are added to a graph until it reads this much
console = Console()


def _oracle(p: DecodeProblem, data: DecodeData, k: Tensor, v: Tensor) -> Tensor:
    """The last row's last kv head in float64: (1, group, queries, Dv)."""
    length = p.lengths()[-1]
    if p.page:
        pages = data.table[-1].long()
        k, v = (x.view(torch.uint8)[pages].view(x.dtype) if p.fp8 else x[pages] for x in (k, v))
        k, v = (x.flatten(0, 1)[:length, -1] for x in (k, v))
    else:
        k, v = (x[-1, -1, p.padding : length] for x in (k, v))
    k, v = (x.double()[None, None] for x in (k, v))
    if p.scales:
        at = (data.table[-1].long(), 0, -1) if p.page else (slice(-1, None), -1)
        each = p.page or p.S
        factors = (
            s[at].repeat_interleave(each)[: k.shape[2], None] for s in (data.k_scale, data.v_scale)
        )
        k, v = (x * factor for x, factor in zip((k, v), factors))
    q = data.q[-1:, -(p.Hq // p.Hkv) :].double()
    values = v[..., : p.Dv or p.D]
    return reference.dense(attention_call(q, k, values, is_causal=p.queries > 1))[0]


class CapturedCalls(NamedTuple):
    """Calls in a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    calls: int
    call: Call  # holds the memory that the graph reads, such as a peer's plan


def _captured(implementation: Implementation, p: DecodeProblem, data: DecodeData) -> CapturedCalls:
    """Check the result, then capture calls into a CUDA graph."""
    caches = [tuple(data.view(x, p, implementation.layout) for x in pair) for pair in data.caches]
    with implementation.context():
        call = implementation.build(p, data)
        out = call(data.q, *caches[0])
        expected = _oracle(p, data, *caches[0])
        actual = out[-1:, -expected.shape[1] :].double()
        error = ((actual - expected).norm() / expected.norm()).item()
        if not error < 2e-2:
            raise AssertionError(f"WRONG: relative error {error:.2e}")
        calls = data.count * max(1, -(-min(20, int(GRAPH_BYTES / p.bytes())) // data.count))
        calls = calls if p.queries == 1 else data.count
        for n in range(min(data.count, 3)):
            call(data.q, *caches[n])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for n in range(calls):
                call(data.q, *caches[n % data.count])
    return CapturedCalls(graph, calls, call)


def measure(
    p: DecodeProblem, implementations: list[Implementation], budget_ms: float
) -> dict[str, float | str]:
    """Microseconds of one call of each implementation, or the reason why it could not run."""
    data, graphs = DecodeData(p), {}
    results: dict[str, float | str] = {}
    for implementation in implementations:
        if p.page and implementation.ours and implementation.layout == "bshd":
            continue
        try:
            graphs[implementation.name] = _captured(implementation, p, data)
        except Exception as error:
            results[implementation.name] = failure(error)
    budget_ms /= ROUNDS
    replays = {n: max(1, math.ceil(budget_ms / _replay(c.graph, 1))) for n, c in graphs.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, captured in graphs.items():
            samples[name].append(_replay(captured.graph, replays[name]) * 1e3 / captured.calls)
    return results | {name: statistics.median(us) for name, us in samples.items()}


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Mean milliseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def _cell(p: DecodeProblem, us: float | str | None) -> str:
    if not isinstance(us, float):
        return "-"
    return f"{us:.1f} {p.flops() / us / 1e6 if p.queries > 1 else p.bytes() / us / 1e3:.0f}"


def ratio(results: dict[str, float | str], ours: str = "fa_ops") -> float | None:
    """The time of the fastest peer divided by ours."""
    us = results.get(ours)
    peers = [us for n, us in results.items() if not n.startswith("fa_ops") and type(us) is float]
    return min(peers) / us if peers and isinstance(us, float) else None


Rows = list[tuple[DecodeProblem, dict[str, float | str]]]


def summaries(rows: Rows, ours: list[str]) -> Iterator[str]:
    """Yield a line for each combination of heads, and one for all of them."""
    kinds = list(dict.fromkeys(p.heads for p, _ in rows))
    for kind in [*kinds, None] if len(kinds) > 1 else kinds:
        for name in ours:
            shares = [
                share
                for p, results in rows
                if kind in (None, p.heads) and (share := ratio(results, name)) is not None
            ]
            if shares:
                mean = statistics.geometric_mean(shares)
                yield (
                    f"{kind or 'all heads'}: {name} is {min(shares):.2f}x to {max(shares):.2f}x of "
                    f"the best peer, geometric mean {mean:.2f}x over {len(shares)} cells"
                )


def costs(rows: Rows, ours: list[str]) -> Iterator[str]:
    """Yield a line for each call of ours with options that was measured without them too."""
    measured = dict(rows)
    for p, results in rows:
        plain = dataclasses.replace(p, unsplit=False, invariant=False, unified=False)
        for name in ours if plain != p and plain in measured else ():
            us, base = results.get(name), measured[plain].get(name)
            if isinstance(us, float) and isinstance(base, float):
                yield f"{p}: {name} takes {us / base:.2f}x its time without the option"


def failures(rows: Rows) -> Iterator[str]:
    """Yield a line for each reason why an implementation did not run, with its problems."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for p, results in rows:
        for name, reason in results.items():
            if isinstance(reason, str):
                reasons.setdefault((name, reason), []).append(str(p))
    for (name, reason), problems in reasons.items():
        yield f"{name} did not run {len(problems)} cells, as {problems[0]}: {reason}"


def _rows(
    problems: list[DecodeProblem],
    implementations: list[Implementation],
    budget: float,
    seconds: float,
) -> Rows:
    """Measure the problems in order, and stop once the time in seconds (0: unlimited) is up."""
    rows, start = [], time.monotonic()
    names = [i.name for i in implementations]
    for n, p in enumerate(command.watched(problems, "decode", "cuda", names)):
        if seconds and time.monotonic() - start > seconds:
            console.print(f"{len(problems) - n} cells were not started within {seconds:.0f} s")
            break
        results = measure(p, implementations, budget)
        torch.cuda.empty_cache()
        line = ", ".join(f"{n} {_cell(p, us)}" for n, us in results.items())
        Console(stderr=True, width=200).print(f"{p}: {line}", highlight=False)
        rows.append((p, results))
    return rows


def host_times() -> dict[str, timing.Time]:
    """Host time of eager calls over caches so small that GPU time is negligible."""
    p = DecodeProblem(4, 512)
    data, paged = DecodeData(p), dataclasses.replace(p, page=16)
    pages = DecodeData(paged)
    k, v = (data.view(x, p, "bshd") for x in data.caches[0])
    kp, vp = (pages.view(x, paged, "") for x in pages.caches[0])
    new = torch.randn(p.B, p.Hkv, 1, p.D, device="cuda", dtype=p.dtype)
    lens, q, call = data.lens - 8, data.q, fa_ops.attention_with_kv_cache
    ranges = torch.stack([lens // 2, lens], -1)[:, None, None]
    runs = {
        "contiguous": lambda _: call(q, k, v, lens),
        "paged": lambda _: call(q, kp, vp, lens, pages.table),
        "paged, append": lambda _: call(q, kp, vp, lens, pages.table, key=new, value=new),
        "fa_ops.attention": lambda _: fa_ops.attention(q, k, v),
        "fa_ops.attention, kv_lens": lambda _: fa_ops.attention(q, k, v, kv_lens=lens),
        "fa_ops.attention, key_ranges": lambda _: fa_ops.attention(q, k, v, key_ranges=ranges),
    }
    return timing.host_times({name: timing.Run(run) for name, run in runs.items()}, "cuda", 100)


def main(
    preset: Annotated[
        Literal[tuple(DECODE_PRESETS)], typer.Option(help="the grid of problems")
    ] = "quick",
    only: command.Only = None,
    heads: Annotated[str | None, typer.Option(help="only these heads: 32/8,64/8")] = None,
    backend: Annotated[str | None, typer.Option(help="compare these: triton,hopper")] = None,
    json: command.Json = None,
    budget: Annotated[
        float, typer.Option(min=0.1, help="milliseconds to time each cell for")
    ] = 60.0,
    seconds: Annotated[float, typer.Option(help="start no cell after this time; 0: all")] = 0.0,
) -> None:
    """Measure decoding and prefill over caches in a CUDA graph, with a cold L2 cache."""
    problems, known = _chosen(preset, heads), [*decoders(backend), *DECODE_PEERS]
    names = command.matching(only, [i.name for i in known], "implementation")
    if not torch.cuda.is_available():
        raise typer.BadParameter("decoding is measured on a GPU, but torch finds no CUDA device")
    if preset == "host":
        command.header("decode host", "cuda", ["fa_ops"])
        times = host_times()
        console.print(host.table(times))
        if json is not None:
            command.write_json(json, "cuda", "decode host", host.records(times))
        return
    chosen = [i for i in known if i.name in names]
    with torch.no_grad():
        rows = _rows(problems, chosen, budget, seconds)
    compared = [i.name for i in chosen if i.ours and i.layout == "bhsd"]
    _print(rows, [i.name for i in chosen], compared)
    if json is not None:
        records = [
            dataclasses.asdict(p)
            | {"dtype": str(p.dtype), "bytes": p.bytes(), "flops": p.flops(), "results": results}
            for p, results in rows
        ]
        command.write_json(json, "cuda", "decode", records)


def _chosen(preset: str, heads: str | None) -> list[DecodeProblem]:
    """The preset's problems with the requested heads."""
    problems = DECODE_PRESETS[preset]()
    known = dict.fromkeys(f"{p.Hq}/{p.Hkv}" for p in problems)
    wanted = command.words(heads) or known
    for pair in wanted:
        if pair not in known:
            raise typer.BadParameter(f"no heads of {preset!r} are {pair!r}: {', '.join(known)}")
    return [p for p in problems if f"{p.Hq}/{p.Hkv}" in wanted]


def _print(rows: Rows, names: list[str], compared: list[str]) -> None:
    speed = "TFLOP/s" if rows[0][0].queries > 1 else "GB/s of keys and values"
    table = Table(title=f"decode, {torch.cuda.get_device_name()}: us and {speed}")
    ratios = [f"best peer / {name}" for name in compared]
    for name in ("problem", *names, *ratios):
        table.add_column(escape(name), justify="right", no_wrap=True)
    for p, results in rows:
        shares = [ratio(results, name) for name in compared]
        cells = [_cell(p, results.get(name)) for name in names]
        table.add_row(str(p), *cells, *("-" if s is None else f"{s:.2f}x" for s in shares))
    console.width = max(console.width, 160)
    console.print(table)
    for line in (*failures(rows), *costs(rows, compared), *summaries(rows, compared)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
