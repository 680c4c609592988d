"""`python -m fa_ops bench first`: the latency of the first call of a family of shapes.

Each first call runs in a new process, after imports, the creation of a CUDA context, an unrelated
kernel and the inputs. The first process has an empty kernel cache and compiles; calls of other
lengths follow in it. The second process finds the kernels in the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Annotated, NamedTuple
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.bench import command

COLD_MS, WARM_MS = 1000.0, 50.0  # limits for first calls with an empty and a full cache
TIMEOUT = 120.0  # seconds for a process
console = Console()


class FirstCall(NamedTuple):
    """One synchronised call: its time, the kernels it compiled, and the time compiling took."""

    length: int
    ms: float
    compiled: int
    compile_ms: float


class FamilyRow(NamedTuple):
    """A family's first call with an empty cache, the calls after it, and one with a full cache."""

    family: str
    cold: FirstCall
    others: list[FirstCall]
    warm: FirstCall


@contextlib.contextmanager
def _compilations() -> Iterator[list[tuple[float, float]]]:
    """Record the start and the end of each compilation in a `with` block; they may overlap."""
    spans: list[tuple[float, float]] = []
    compile_source = nvrtc.compile_source

    def timed(*args):
        start = time.perf_counter()
        try:
            return compile_source(*args)
        finally:
            spans.append((start, time.perf_counter()))

    with mock.patch.object(nvrtc, "compile_source", timed):
        yield spans


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of the spans."""
    total, last_end = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return total


def measure(
    family: KernelFamily, lengths: tuple[int, ...], device: str, backend: str
) -> list[FirstCall]:
    """Make calls of these lengths in order in this process, and synchronise after each."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    unrelated = torch.ones(8, device=device, requires_grad=True)
    (unrelated + 1.0).backward(torch.ones_like(unrelated))  # the first gradient imports modules
    calls = []
    for length in lengths:
        call = family.call(length, device, backend)
        synchronize()
        with _compilations() as spans:
            start = time.perf_counter()
            result = call()
            synchronize()
            ms = (time.perf_counter() - start) * 1e3
        del result
        calls.append(FirstCall(length, ms, len(spans), covered(spans) * 1e3))
    return calls


def _serve(pipe: Connection, folder: str, *measurement) -> None:
    os.environ["FA_OPS_CACHE_DIR"] = folder
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # the driver's cache would hide compilations
    pipe.send(measure(*measurement))


def measure_in_new_process(
    folder: str,
    family: KernelFamily,
    lengths: tuple[int, ...],
    device: str = "cuda",
    backend: str = "hopper",
) -> list[FirstCall]:
    """`measure` in a process that has imported this module and done nothing else.

    Raises:
        RuntimeError: the process ended without a result, or did not respond in time.
    """
    # The server has imported this module, as importing torch dominates the start of a process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    args = (sender, folder, family, lengths, device, backend)
    process = context.Process(target=_serve, args=args, daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT):
            raise RuntimeError(f"{family.name}: no result after {TIMEOUT:.0f} s")
        return receiver.recv()
    except EOFError:
        process.join(10)
        raise RuntimeError(f"{family.name}: its process ended, {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def row(family: KernelFamily) -> FamilyRow:
    """Measure a family in two processes, and print a line of progress to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        cold, *others = measure_in_new_process(folder, family, (family.length, *family.others))
        (warm,) = measure_in_new_process(folder, family, (family.length,))
    then = ", ".join(_cell(other) for other in others)
    line = f"{family.name}: cold {_cell(cold)} ms, then {then}, warm {_cell(warm)}"
    Console(stderr=True, width=200).print(line, highlight=False)
    return FamilyRow(family.name, cold, others, warm)


def _median(rows: list[FamilyRow]) -> FamilyRow:
    """The row with the median cold call, with the median warm call."""
    by = lambda name: sorted(rows, key=lambda r: getattr(r, name).ms)  # noqa: E731
    middle = (len(rows) - 1) // 2
    return by("cold")[middle]._replace(warm=by("warm")[middle].warm)


def table(title: str, rows: list[FamilyRow]) -> Table:
    """A line for each family: milliseconds, and the number of kernels that were compiled."""
    table = Table(title=title, caption="ms of a synchronised call; +1: it compiled a kernel")
    table.add_column("family", no_wrap=True)
    then = [f"then {other.length}" for other in rows[0].others]
    for name in ("cold", "of it NVRTC", *then, "warm"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        others = [_cell(other) for other in r.others]
        table.add_row(r.family, _cell(r.cold), f"{r.cold.compile_ms:.0f}", *others, _cell(r.warm))
    return table


def _cell(first: FirstCall) -> str:
    return f"{first.ms:.1f}" + (f" +{first.compiled}" if first.compiled else "")


def verdicts(rows: list[FamilyRow]) -> Iterator[str]:
    """Yield every call that exceeds its limit or compiles unexpectedly, or that none does."""
    slow = [
        f"{r.family}: {kind} {first.ms:.0f} ms, more than {limit:.0f}"
        for r in rows
        for kind, first, limit in (("cold", r.cold, COLD_MS), ("warm", r.warm, WARM_MS))
        if first.ms > limit
    ]
    missed = [f"{r.family}: compiled with a full cache" for r in rows if r.warm.compiled]
    recompiled = [
        f"{r.family}: {other.length} after {r.cold.length} compiled {other.compiled} more"
        for r in rows
        for other in r.others
        if other.compiled
    ]
    yield from slow + missed + recompiled or [
        f"all cold within {COLD_MS:.0f} ms and warm within {WARM_MS:.0f} ms; "
        "no other length compiled"
    ]


def records(rows: list[FamilyRow]) -> list[dict]:
    """The results for the JSON file."""
    return [
        {
            "family": r.family,
            "cold": r.cold._asdict(),
            "others": [other._asdict() for other in r.others],
            "warm": r.warm._asdict(),
        }
        for r in rows
    ]


def main(
    only: command.Only = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which the median counts")] = 1,
    json: command.Json = None,
) -> None:
    """Measure first calls on a Hopper GPU with an empty and with a full kernel cache."""
    names = command.matching(only, [family.name for family in FAMILIES], "family")
    chosen = [family for family in FAMILIES if family.name in names]
    if reason := hopper.available_error():
        raise typer.BadParameter(f"first calls are measured on the Hopper backend, which {reason}")
    try:
        steps = command.watched(chosen, "first", "cuda", ["hopper"], "families", lambda f: f.name)
        measured = [[row(family) for _ in range(rounds)] for family in steps]
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    rows = [_median(family_rows) for family_rows in measured]
    console.width = max(console.width, 120)
    console.print(table(f"first calls, {torch.cuda.get_device_name()}", rows))
    for line in verdicts(rows):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if json is not None:
        command.write_json(json, "cuda", "first", records(sum(measured, [])))


# Families of shapes whose first calls are measured; calls of a family differ in length only.

DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class KernelFamily:
    """Calls that differ in length only: `length` tokens or keys first, then each of `others`.

    With the last length there are fewer tiles than multiprocessors.
    """

    name: str
    kind: str  # a key of CALLS
    D: int
    page: int = 0  # keys of a cache's page; 0: contiguous
    append: bool = False  # one new key of each row is written
    length: int = 4096
    others: tuple[int, ...] = (6001, 2050, 200)

    def call(self, length: int, device: str, backend: str) -> Callable[[], object]:
        """Create the inputs for one length; return the call."""
        draw = functools.partial(torch.randn, device=device, dtype=DTYPE)
        return CALLS[self.kind](self, length, draw, backend)


Draw = Callable[..., Tensor]


def _dense(f: KernelFamily, S: int, draw: Draw, backend: str, grad: bool = False):
    q, k, v = (draw(1, 16, S, f.D, requires_grad=grad) for _ in range(3))
    return lambda: fa_ops.attention(q, k, v, is_causal=True, backend=backend)


def _backward(f: KernelFamily, S: int, draw: Draw, backend: str):
    """The backward pass alone: the forward pass is one of the inputs."""
    out = _dense(f, S, draw, backend, grad=True)()
    grad = torch.randn_like(out)
    return lambda: out.backward(grad)


def _varlen(f: KernelFamily, S: int, draw: Draw, backend: str):
    q, k, v = (draw(S, 16, f.D) for _ in range(3))
    ends = torch.tensor([0, S // 8, S // 2, S], dtype=torch.int32, device=q.device)
    return lambda: fa_ops.attention_varlen(q, k, v, ends, ends, is_causal=True, backend=backend)


def _quantized(f: KernelFamily, S: int, draw: Draw, backend: str):
    q, k, v = (draw(1, 16, S, f.D) for _ in range(3))
    return lambda: fa_ops.quantized_attention(q, k, v, is_causal=True, backend=backend)


def _quantized_varlen(f: KernelFamily, S: int, draw: Draw, backend: str):
    q, k, v = (draw(S, 16, f.D).to(torch.float8_e4m3fn) for _ in range(3))
    ends = torch.tensor([0, S // 8, S // 2, S], dtype=torch.int32, device=q.device)
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), torch.ones(1, device=q.device))
    return lambda: fa_ops.attention_varlen(
        q, k, v, ends, ends, is_causal=True, backend=backend, **scales
    )


def _decode(f: KernelFamily, S: int, draw: Draw, backend: str, B: int = 8):
    q = draw(B, 32, 1, f.D)
    table, shape = _pages(f, S, B, q.device)
    k, v = (draw(*shape(8), f.D) for _ in range(2))
    new = {"key": draw(B, 8, 1, f.D), "value": draw(B, 8, 1, f.D)} if f.append else {}
    return _cached(q, k, v, S, table, backend, new)


def _mla(f: KernelFamily, S: int, draw: Draw, backend: str, B: int = 8):
    q = draw(B, 64, 1, f.D)
    table, shape = _pages(f, S, B, q.device)
    k = draw(*shape(1), f.D)
    key = draw(B, 1, 1, f.D)
    new = {"key": key, "value": key[..., :512]} if f.append else {}
    return _cached(q, k, k[..., :512], S, table, backend, new)


def _pages(f: KernelFamily, S: int, B: int, device: torch.device):
    """A page table or None, and a function from heads to a cache's shape without features."""
    if not f.page:
        return None, lambda heads: (B, heads, S)
    each = -(-S // f.page)
    table = torch.arange(B * each, dtype=torch.int32, device=device).view(B, each)
    return table, lambda heads: (B * each, f.page, heads)


def _cached(
    q: Tensor, k: Tensor, v: Tensor, S: int, table: Tensor | None, backend: str,
    new: dict[str, Tensor],
):  # fmt: skip
    lens = torch.full((len(q),), S - bool(new), dtype=torch.int32, device=q.device)
    return lambda: fa_ops.attention_with_kv_cache(q, k, v, lens, table, backend=backend, **new)


CALLS = {
    "forward": _dense, "backward": _backward, "varlen": _varlen, "decode": _decode, "mla": _mla,
    "quantized": _quantized, "quantized varlen": _quantized_varlen,
}  # fmt: skip
FAMILIES = (
    *(KernelFamily(f"forward causal D{D}", "forward", D) for D in (64, 128, 256)),
    *(KernelFamily(f"backward causal D{D}", "backward", D) for D in (64, 128, 256)),
    KernelFamily("varlen causal D128", "varlen", 128),
    KernelFamily("8-bit forward causal D128", "quantized", 128),
    KernelFamily("8-bit varlen causal D128", "quantized varlen", 128),
    KernelFamily("decode D128", "decode", 128),
    KernelFamily("decode D128, pages of 64", "decode", 128, page=64),
    KernelFamily("MLA", "mla", 576),
    KernelFamily("MLA, pages of 64", "mla", 576, page=64),
    KernelFamily("decode D128, append", "decode", 128, append=True),
    KernelFamily("decode D128, pages of 64, append", "decode", 128, page=64, append=True),
    KernelFamily("MLA, pages of 64, append", "mla", 576, page=64, append=True),
)
