"""Time context-parallel attention against one device's own rate, and against torch's.

    python -m tests.evaluation.context_parallel_bench --processes 2

The share is the time that one device needs for the whole sequence, over the number of processes
times the time that they need together. Times are medians over rounds, of the slowest process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import fa_ops
from fa_ops.distributed import (
    balanced_layout,
    context_parallel_attention,
    explain_context_parallel,
    measure_link_rate,
    shard,
)
from tests.evaluation.context_parallel_peers import of_ring_flash_attn, of_torch

SCHEMES = ("ring", "ulysses", "all_gather", "auto")
KINDS = ("causal 16k", "causal 64k", "causal 128k", "window 64k", "documents 64k")


class BenchProblem(NamedTuple):
    """One kind of call: tokens of the whole sequence and its mask."""

    kind: str
    tokens: int
    mask: dict
    borders: Tensor | None = None

    @classmethod
    def of(cls, kind: str, unit: int) -> BenchProblem:
        """The problem that a word names; `unit` tokens are 1k."""
        name, length = kind.split()
        tokens = int(length.removesuffix("k")) * unit
        mask = {"is_causal": True}
        if name == "window":
            mask["window"] = (tokens // 16 - 1, 0)
        if name != "documents":
            return cls(kind, tokens, mask)
        g = torch.Generator().manual_seed(0)
        inner = torch.randperm(tokens - 1, generator=g)[:15].sort().values + 1
        borders = torch.tensor([0, *inner.tolist(), tokens], dtype=torch.int32)
        return cls(kind, tokens, mask, borders)


def one_device(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole sequence on one device."""
    if problem.borders is None:
        return fa_ops.attention(q, k, v, **problem.mask)
    ends = problem.borders.to(q.device)
    longest = int(problem.borders.diff().max())
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    return fa_ops.attention_varlen(*packed, ends, ends, longest, longest, **problem.mask)


def timed(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median of the seconds of a call, over rounds, on the slowest process."""
    seconds = []
    for _ in range(rounds + 2):
        dist.barrier()
        wait_for(device)
        begin = time.perf_counter()
        function()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(seconds[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def repeated(function: Callable[[], Tensor], tensors: list[Tensor], backward: bool, times: int):
    """A function that runs forward passes, or training steps, one after the other."""

    def run() -> None:
        for _ in range(times):
            if not backward:
                with torch.no_grad():
                    function()
                continue
            out = function()
            torch.autograd.grad(out, tensors, torch.ones_like(out))

    return run


def measure(
    function: Callable[[], Tensor], tensors: list[Tensor], device: torch.device, given
) -> dict[str, float]:
    """Seconds of a forward pass and of a step, and the bytes that it needs with its tensors."""
    found = {}
    for name, backward in (("forward", False), ("step", True)):
        if device.type == "cuda":
            others = torch.cuda.memory_allocated() - sum(x.nbytes for x in tensors)
            torch.cuda.reset_peak_memory_stats()
        run = repeated(function, tensors, backward, given.repeats)
        found[name] = timed(run, device, given.rounds) / given.repeats
        if device.type == "cuda":
            found[f"{name} bytes"] = torch.cuda.max_memory_allocated() - others
    return found


def ways(given) -> list[tuple[str, str]]:
    """The schemes, those that exchange keys with each transport."""
    transports = given.transports.split(",")
    return [
        (scheme, transport)
        for scheme in given.schemes.split(",")
        for transport in (transports if scheme in ("ring", "all_gather") else ("auto",))
    ]


def compare(problem: BenchProblem, device: torch.device, given) -> dict[str, dict]:
    """The times of one device and of all schemes."""
    g = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole = [
        torch.randn(1, H, problem.tokens, given.head_dim, generator=g, device=device, dtype=dtype)
        for H in (given.heads, given.kv_heads, given.kv_heads)
    ]
    options = dict(problem.mask)
    layout: object = "zigzag"
    if problem.borders is not None:
        options["cu_seqlens"] = problem.borders
        layout = balanced_layout(problem.tokens, **options)
    elif "window" in options:
        layout = "contiguous"
    leaves = [x.clone().requires_grad_() for x in whole]
    attend = lambda: one_device(problem, *leaves)  # noqa: E731
    found = {"one device": measure(attend, leaves, device, given)}
    parts = [shard(x, layout=layout).requires_grad_() for x in whole]
    for scheme, transport in ways(given):
        attend = lambda way=(scheme, transport): context_parallel_attention(  # noqa: E731
            *parts, None, way[0], layout=layout, check=given.check, transport=way[1], **options
        )
        name = scheme if transport == "auto" else f"{scheme} {transport}"
        found[name] = measure(attend, parts, device, given)
    if "auto" in found:
        found["auto"]["chosen"] = explain_context_parallel(*parts, layout=layout, **options).scheme
    if given.peers:
        is_plain = problem.borders is None and "window" not in problem.mask
        timing = lambda attend, tensors: measure(attend, tensors, device, given)  # noqa: E731
        found["torch"] = of_torch(whole, is_plain, timing)
        found["ring-flash-attn"] = of_ring_flash_attn(parts, is_plain, timing)
    return found


def report(problem: BenchProblem, found: dict[str, dict]) -> None:
    """Print a table."""
    alone, world = found["one device"], dist.get_world_size()
    print(f"\n{problem.kind}: {problem.tokens} tokens on {world} processes")
    for name, times in found.items():
        if "error" in times:
            print(f"  {name:16s} {times['error']}")
            continue
        words = [f"  {name:16s}"]
        for what in ("forward", "step"):
            share = (
                "" if name == "one device" else f" share {alone[what] / world / times[what]:.3f}"
            )
            words.append(f"{what} {times[what] * 1e3:9.3f} ms{share}")
            if f"{what} bytes" in times:
                words.append(f"{times[f'{what} bytes'] / 2**30:.2f} GiB")
        print("  ".join(words), times.get("chosen", ""))


def report_memory(records: dict[str, dict], unit: int) -> None:
    """Print the memory of a step for 1k tokens of a process: equal where it grows linearly."""
    print("\nMiB of a training step for 1k tokens of a process")
    for kind, found in records.items():
        thousands = BenchProblem.of(kind, unit).tokens / unit / dist.get_world_size()
        words = [
            f"{name} {times['step bytes'] / thousands / 2**20:.1f}"
            for name, times in found.items()
            if "step bytes" in times and name != "one device"
        ]
        print(f"  {kind}: " + ", ".join(words))


def _work(rank: int, store: str, given) -> None:
    device = torch.device("cuda", rank) if given.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)  # as torchrun does: threads of all processes would wait for cores
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"rank": rank, "world_size": given.processes, "timeout": timedelta(seconds=120)}
    if device.type == "cuda":
        options["device_id"] = device
    dist.init_process_group(backend, f"file://{store}", **options)
    rate, records = measure_link_rate(device=device), {}
    if rank == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        print(f"{given.processes} x {name}, torch {torch.__version__}, link {rate / 1e9:.0f} GB/s")
    for kind in given.kinds.split(","):
        problem = BenchProblem.of(kind.strip(), given.unit)
        found = records[kind] = compare(problem, device, given)
        if rank == 0:
            report(problem, found)
            sys.stdout.flush()
    if rank == 0 and device.type == "cuda":
        report_memory(records, given.unit)
    if rank == 0 and given.json:
        with open(given.json, "w") as file:
            json.dump({"link": rate, "kinds": records}, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the arguments and start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated")
    parser.add_argument(
        "--transports", default="auto", help="of keys: auto, peer, nccl, comma-separated"
    )
    parser.add_argument("--unit", type=int, default=1024, help="tokens of 1k, fewer on a CPU")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5, help="calls in a row in each round")
    parser.add_argument("--check", action="store_true", help="compare arguments in every call")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--json", help="write the times to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (f"{folder}/store", given), nprocs=given.processes)


if __name__ == "__main__":
    main()
