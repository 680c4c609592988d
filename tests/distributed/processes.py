"""Run the checks of a test file in several processes."""

from __future__ import annotations

import importlib
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_checks(module: str, world: int, folder: Path, device: str = "cpu") -> None:
    """Run every check of `module.CHECKS` in `world` processes, and write the verdicts to a folder.

    The processes run all checks in order, because starting processes takes longer than a check.
    """
    mp.spawn(_work, (module, world, device, str(folder)), nprocs=world)


def assert_passed(name: str, world: int, folder: Path) -> None:
    """Check that a check has passed in every process."""
    for rank in range(world):
        verdict = (folder / f"{name}.{rank}").read_text()
        assert verdict == "passed", f"rank {rank} of {world}: {verdict}"


def _work(rank: int, module: str, world: int, device: str, folder: str) -> None:
    """Write a file for each check with its verdict: "passed", or the traceback."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(device)
    where = torch.device(device, rank) if device == "cuda" else None
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", f"file://{folder}/store", rank=rank,
        world_size=world, timeout=timedelta(seconds=120), device_id=where,
    )  # fmt: skip
    for name, check in importlib.import_module(module).CHECKS.items():
        torch.manual_seed(0)
        try:
            check()
            verdict = "passed"
        except BaseException:
            verdict = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(verdict)
        dist.barrier()
    dist.destroy_process_group()
