"""The checks of a test file, run by several processes at once."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_checks(module: str, world: int, folder: Path, device: str = "cpu") -> None:
    """Every check of `module.CHECKS` in so many processes, one check after the other, since
    starting processes takes longer; `assert_passed` says how one went."""
    mp.spawn(_work, (module, world, device, str(folder)), nprocs=world)


def assert_passed(name: str, world: int, folder: Path) -> None:
    for rank in range(world):
        verdict = (folder / f"{name}.{rank}").read_text()
        assert verdict == "passed", f"rank {rank} of {world}: {verdict}"


def _work(rank: int, module: str, world: int, device: str, folder: str) -> None:
    """Leave a file for each check with its verdict, or the traceback."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(device)
    talk = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(talk, f"file://{folder}/meet", rank=rank, world_size=world)
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
