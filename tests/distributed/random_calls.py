"""Compare random calls of context_parallel_attention with one process.

    python -m tests.distributed.random_calls --cases 500 --processes 4
    python -m tests.distributed.random_calls --cases 40 --processes 8 --inner 4

float64 must agree to 1e-10, and bfloat16 be within the error budget. Prints failing cases, and how
many cases had each feature; fails if a case does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections import Counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.context_cases import (
    ContextCase,
    assert_case_right,
    random_context_case,
)


def run_cases(seeds: range, mesh=None) -> tuple[list[str], Counter]:
    """Run cases in all processes; returns the errors of all, and the number of each feature."""
    world, errors, features = dist.get_world_size(), [], Counter()
    inner = 2 if mesh is None else mesh.size(1)
    for seed in seeds:
        case, error = random_context_case(seed, world, inner), None
        try:
            assert_case_right(case, mesh if case.inner > 1 else None, world)
        except Exception:
            error = f"{case}: {traceback.format_exc()}"
        everywhere = [None] * world
        dist.all_gather_object(everywhere, error)
        errors += [error for error in everywhere if error][:1]
        features.update(features_of(case))
    return errors, features


def features_of(case: ContextCase) -> list[str]:
    """Words for what differs from the default case."""
    words = [case.scheme, f"{case.layout} layout", str(case.dtype).removeprefix("torch.")]
    names = (
        "is_causal", "window", "softcap", "scale", "alibi", "sinks", "kv_lens", "key_ranges",
        "documents", "dropout_p", "deterministic", "lse_grad", "Sk",
    )  # fmt: skip
    words += [name for name in names if getattr(case, name)]
    return words + ["heads exchanged on a second mesh dimension"] * (case.inner > 1)


def mesh_of(world: int, inner: int):
    """A mesh of two dimensions, or None where the processes form none."""
    has_two = world % inner == 0 and world > inner
    return init_device_mesh("cpu", (world // inner, inner)) if has_two else None


def _work(rank: int, world: int, store: str, first: int, count: int, inner: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    begin = time.monotonic()
    errors, features = run_cases(range(first, first + count), mesh_of(world, inner))
    if rank == 0:
        for word, number in sorted(features.items()):
            print(f"{number:6d}  {word}")
        print(*errors, sep="\n")
        seconds = time.monotonic() - begin
        print(f"{count} cases on {world} processes in {seconds:.0f} s: {len(errors)} failed")
    dist.barrier()
    dist.destroy_process_group()
    if errors:
        raise SystemExit(1)


def main() -> None:
    """Parse the arguments and start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500, help="cases for each number of processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument(
        "--inner", type=int, default=2, help="processes that exchange heads on a mesh"
    )
    given = parser.parse_args()
    for world in given.processes:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, f"{folder}/store", given.seed, given.cases, given.inner)
            mp.spawn(_work, arguments, nprocs=world)


if __name__ == "__main__":
    main()
