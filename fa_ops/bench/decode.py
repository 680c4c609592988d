"""`python -m fa_ops bench decode`: one query token against caches that no L2 holds.

Every implementation runs inside one CUDA graph that walks over several caches, so host time does
not count and the L2 never helps. The caches are the same memory for all, read in the layout that
each likes best. Before it is timed, each is held against the float64 oracle on one kv head.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Optional

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ops
from fa_ops.backends import reference
from fa_ops.bench import report, timing
from fa_ops.types import Spec

COLD_BYTES = 320 * 2**20  # what a graph walks over at least: several L2s
ROUNDS = 5
console = Console()


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: B rows of one query token against S cached keys. Dv = 0: as D."""

    B: int
    S: int
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int = 0
    page: int = 0
    fp8: bool = False
    ragged: bool = False  # lengths from 1 to S
    unsplit: bool = False  # ours with a single split
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        words = [f"B{self.B} {self.S}", f"{self.Hq}/{self.Hkv} D{self.D}"]
        words += [f"page {self.page}"] if self.page else []
        words += [word for word in ("fp8", "ragged", "unsplit") if getattr(self, word)]
        return " ".join(words)

    @property
    def cached(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def shared(self) -> bool:
        """Whether the values are a view of the keys, as in MLA."""
        return self.Dv not in (0, self.D)

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.S] * self.B
        return [1 + (self.S - 1) * b // max(self.B - 1, 1) for b in range(self.B)]

    def bytes(self) -> int:
        """What must be read: keys and values that are there."""
        width = self.D if self.shared else 2 * self.D
        return sum(self.lengths()) * self.Hkv * width * self.cached.itemsize


class Data:
    """Queries and several caches on the device."""

    def __init__(self, problem: Problem) -> None:
        p = problem
        g = torch.Generator("cuda").manual_seed(0)
        numbers = p.B * p.S * p.Hkv * p.D
        each = numbers * p.cached.itemsize * (1 if p.shared else 2)
        self.count = max(2, min(64, -(-COLD_BYTES // each))) if each < 2**33 else 1
        self.q = torch.randn(p.B, p.Hq, 1, p.D, device="cuda", dtype=p.dtype, generator=g)
        self.lens = torch.tensor(p.lengths(), dtype=torch.int32, device="cuda")
        self.caches = []
        for _ in range(self.count):
            k = self._draw(numbers, g, p)
            self.caches.append((k, k if p.shared else self._draw(numbers, g, p)))
        self.table = None
        if p.page:
            pages = p.B * (p.S // p.page)
            order = torch.randperm(pages, generator=g, device="cuda", dtype=torch.int32)
            self.table = order.view(p.B, -1)

    @staticmethod
    def _draw(numbers: int, g: torch.Generator, p: Problem) -> Tensor:
        x = torch.empty(numbers, device="cuda", dtype=p.cached)
        for part in x.split(2**28):
            part.copy_(torch.randn(part.shape, device="cuda", generator=g, dtype=p.dtype))
        return x

    def view(self, x: Tensor, p: Problem, layout: str) -> Tensor:
        """The flat memory as (B, Hkv, S, D), in either order, or as pages."""
        if p.page:
            return x.view(-1, p.page, p.Hkv, p.D)
        if layout == "bhsd":
            return x.view(p.B, p.Hkv, p.S, p.D)
        return x.view(p.B, p.S, p.Hkv, p.D).transpose(1, 2)


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """`build` makes the call of a problem, or raises what it cannot do."""

    name: str
    build: Callable[[Problem, Data], Call]
    layout: str = "bhsd"
    ours: bool = False
    context: Callable = contextlib.nullcontext


def _ours(p: Problem, data: Data) -> Call:
    width = p.Dv or p.D
    splits = {"num_splits": 1} if p.unsplit else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa_ops.attention_with_kv_cache(q, k, v[..., :width], data.lens, data.table, **splits)

    return call


def _plain(p: Problem) -> None:
    if p.page or p.fp8 or p.ragged or p.shared or p.unsplit:
        raise NotImplementedError("takes neither pages nor fp8, lengths or shared values")


def _sdpa(name: str, backend: SDPBackend) -> Implementation:
    def build(p: Problem, data: Data) -> Call:
        _plain(p)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=p.Hq != p.Hkv)

    return Implementation(f"sdpa {name}", build, context=lambda: sdpa_kernel(backend))


def _flex(p: Problem, data: Data) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    _plain(p)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, enable_gqa=p.Hq != p.Hkv)


def _flash_attn_3(p: Problem, data: Data) -> Call:
    names = ("flash_attn_interface", "fa3_fwd_interface", "tokenspeed_fa3.flash_attn_interface")
    found = [name for name in names if importlib.util.find_spec(name.split(".")[0])]
    function = importlib.import_module((found or names)[0]).flash_attn_with_kvcache
    if p.fp8 or p.shared or p.unsplit:
        raise NotImplementedError("takes neither fp8 beside half precision nor shared values")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x if p.page else x.transpose(1, 2) for x in (k, v))
        options = {"page_table": data.table} if p.page else {}
        out = function(q.transpose(1, 2), k, v, cache_seqlens=data.lens, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


IMPLEMENTATIONS = [
    Implementation("fa_ops", _ours, ours=True),
    Implementation("fa_ops bshd", _ours, "bshd", ours=True),
    _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    _sdpa("flash", SDPBackend.FLASH_ATTENTION),
    Implementation("flash-attn 3", _flash_attn_3, "bshd"),
    Implementation("flex", _flex),
]

HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 64))


def _grid() -> list[Problem]:
    """Batches times lengths times heads, as far as one cache takes at most 36 GB."""
    cells = [
        Problem(B, S, *heads)
        for heads in HEADS
        for B in (1, 8, 64, 256)
        for S in (1024, 4096, 8192, 32768, 131072)
    ]
    return [p for p in cells if p.bytes() <= 36e9]


PRESETS: dict[str, Callable[[], list[Problem]]] = {
    "issue": _grid,
    "quick": lambda: [Problem(1, 1024), Problem(1, 8192), Problem(8, 8192), Problem(64, 4096)],
    "paged": lambda: [
        Problem(B, S, page=page)
        for B, S in ((8, 8192), (64, 4096))
        for page in (0, 256, 64, 16, 8, 1)
    ],
    "fp8": lambda: [Problem(B, 4096, fp8=fp8) for B in (8, 64) for fp8 in (False, True)],
    "mla": lambda: [
        Problem(B, 8192, Hq, 1, 576, 512, page=64) for B in (1, 32) for Hq in (16, 64, 128)
    ],
    "ragged": lambda: [Problem(64, 32768, ragged=True), Problem(64, 16384)],
    "unsplit": lambda: [Problem(1, 131072), Problem(1, 131072, unsplit=True)],
    "host": list,
}


def _oracle(p: Problem, data: Data, k: Tensor, v: Tensor) -> Tensor:
    """The last row's last kv head in float64: (1, group, 1, Dv)."""
    length = p.lengths()[-1]
    if p.page:
        pages = data.table[-1].long()
        k, v = (x.view(torch.uint8)[pages].view(x.dtype) if p.fp8 else x[pages] for x in (k, v))
        k, v = (x.flatten(0, 1)[:length, -1] for x in (k, v))
    else:
        k, v = (x[-1, -1, :length] for x in (k, v))
    k, v = (x.double()[None, None] for x in (k, v))
    q = data.q[-1:, -(p.Hq // p.Hkv) :].double()
    return reference.dense(q, k, v[..., : p.Dv or p.D], Spec())[0]


def _captured(implementation: Implementation, p: Problem, data: Data):
    """(graph, calls in it), once the result was found right."""
    caches = [tuple(data.view(x, p, implementation.layout) for x in pair) for pair in data.caches]
    with implementation.context():
        call = implementation.build(p, data)
        out = call(data.q, *caches[0])
        expected = _oracle(p, data, *caches[0])
        found = out[-1:, -expected.shape[1] :].double()
        error = ((found - expected).norm() / expected.norm()).item()
        if not error < 2e-2:
            raise AssertionError(f"WRONG: relative error {error:.2e}")
        calls = data.count * max(1, -(-20 // data.count))
        for n in range(min(data.count, 3)):
            call(data.q, *caches[n])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for n in range(calls):
                call(data.q, *caches[n % data.count])
    return graph, calls


def measure(
    p: Problem, implementations: list[Implementation], budget_ms: float
) -> dict[str, float | str]:
    """Microseconds of one call of each implementation, or why there is no such number."""
    data, graphs = Data(p), {}
    results: dict[str, float | str] = {}
    for implementation in implementations:
        if p.page and implementation.name == "fa_ops bshd":
            continue
        try:
            graphs[implementation.name] = _captured(implementation, p, data)
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            results[implementation.name] = f"{type(error).__name__}: {text[0][:140]}"
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, calls) in graphs.items():
            samples[name].append(_time(graph, calls, budget_ms / ROUNDS))
    return results | {name: statistics.median(times) for name, times in samples.items()}


def _time(graph: torch.cuda.CUDAGraph, calls: int, budget_ms: float) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times

    return replay(max(1, math.ceil(budget_ms / replay(1)))) * 1e3 / calls


def _cell(p: Problem, us: float | str | None) -> str:
    return f"{us:.1f} {p.bytes() / us / 1e3:.0f}" if isinstance(us, float) else "-"


def ratio(results: dict[str, float | str]) -> float | None:
    """The best peer's time over ours in the layout of the first implementation."""
    ours = results.get("fa_ops")
    peers = [us for n, us in results.items() if not n.startswith("fa_ops") and type(us) is float]
    return min(peers) / ours if peers and isinstance(ours, float) else None


def _rows(
    problems: list[Problem], implementations: list[Implementation], budget: float
) -> Iterator[tuple[Problem, dict[str, float | str]]]:
    for p in problems:
        results = measure(p, implementations, budget)
        torch.cuda.empty_cache()
        line = ", ".join(f"{n} {_cell(p, us)}" for n, us in results.items())
        Console(stderr=True, width=200).print(f"{p}: {line}", highlight=False)
        yield p, results


def host_microseconds() -> dict[str, float]:
    """Host time of eager calls over small caches, where the GPU cannot be what takes long."""
    p = Problem(4, 512)
    data, paged = Data(p), dataclasses.replace(p, page=16)
    pages = Data(paged)
    k, v = (data.view(x, p, "bshd") for x in data.caches[0])
    kp, vp = (pages.view(x, paged, "") for x in pages.caches[0])
    new = torch.randn(p.B, p.Hkv, 1, p.D, device="cuda", dtype=p.dtype)
    some, q, call = data.lens - 8, data.q, fa_ops.attention_with_kv_cache
    runs = {
        "contiguous": lambda _: call(q, k, v, some),
        "paged": lambda _: call(q, kp, vp, some, pages.table),
        "paged, append": lambda _: call(q, kp, vp, some, pages.table, key=new, value=new),
        "fa_ops.attention": lambda _: fa_ops.attention(q, k, v),
    }
    times = timing.host_times({name: timing.Run(run) for name, run in runs.items()}, "cuda", 100)
    return {name: time.ms * 1e3 for name, time in times.items()}


def main(
    preset: Annotated[str, typer.Option(help=f"the grid: {', '.join(PRESETS)}")] = "quick",
    only: Annotated[Optional[str], typer.Option(help="words in the names to run")] = None,  # noqa: UP045
    heads: Annotated[Optional[str], typer.Option(help="only such heads, as 32/8")] = None,  # noqa: UP045
    json: Annotated[Optional[Path], typer.Option("--json", help="write every number here")] = None,  # noqa: UP045
    budget: Annotated[float, typer.Option(help="timed milliseconds of each cell")] = 60.0,
) -> None:
    """One token against a cache, in a CUDA graph over cold caches: microseconds and GB/s."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("decoding is measured on CUDA, and torch sees no such device")
    if preset not in PRESETS:
        raise typer.BadParameter(f"no grid is called {preset!r}: {', '.join(PRESETS)}")
    if preset == "host":
        for name, us in host_microseconds().items():
            console.print(f"host time of an eager call, {name}: {us:.1f} us")
        return
    words = only.split(",") if only else [""]
    chosen = [i for i in IMPLEMENTATIONS if any(word in i.name for word in words)]
    problems = [p for p in PRESETS[preset]() if heads in (None, f"{p.Hq}/{p.Hkv}")]
    with torch.no_grad():
        rows = list(_rows(problems, chosen, budget))
    table = Table(title=f"decode, {torch.cuda.get_device_name()}: us and GB/s of keys and values")
    for name in ("problem", *(i.name for i in chosen), "vs best peer"):
        table.add_column(escape(name), justify="right", no_wrap=True)
    for p, results in rows:
        share = ratio(results)
        cells = [_cell(p, results.get(i.name)) for i in chosen]
        table.add_row(str(p), *cells, "-" if share is None else f"{share:.2f}x")
    console.width = max(console.width, 160)
    console.print(table)
    shares = [share for _, results in rows if (share := ratio(results)) is not None]
    if shares:
        mean = math.exp(sum(map(math.log, shares)) / len(shares))
        console.print(f"against the best peer: {min(shares):.2f}x to {max(shares):.2f}x, "
                      f"geometric mean {mean:.2f}x over {len(shares)} cells")  # fmt: skip
    if json is not None:
        records = [
            dataclasses.asdict(p) | {"dtype": str(p.dtype), "bytes": p.bytes(), "results": results}
            for p, results in rows
        ]
        report.write_json(json, "cuda", "decode", records)
