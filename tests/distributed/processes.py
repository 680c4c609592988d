"""Run the checks of a test file in several processes."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, in the process that the others are forked from.
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "fa_ops.distributed",
    "fa_ops.testing",
    "transformers.models.llama.modeling_llama",
]


class Verdicts(NamedTuple):
    """The folder with the verdict of every process on every check."""

    world: int
    folder: Path

    def assert_passed(self, name: str) -> None:
        """Check that a check has passed in every process."""
        for rank in range(self.world):
            verdict = Path(self.folder, f"{name}.{rank}").read_text()
            assert verdict == "passed", f"rank {rank} of {self.world}: {verdict}"


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory) -> Verdicts:
    """The verdicts of the module's `CHECKS` in `WORLD` processes, on its `DEVICE` if it has one."""
    module = request.module
    folder = tmp_path_factory.mktemp("verdicts")
    return run_checks(module.__name__, module.WORLD, folder, getattr(module, "DEVICE", "cpu"))


def run_checks(module: str, world: int, folder: Path, device: str = "cpu") -> Verdicts:
    """Run every check of `module.CHECKS` in `world` processes, and write the verdicts to a folder.

    The processes run all checks in order, because starting processes takes longer than a check.
    """
    if not dist.is_available():
        pytest.skip("torch was built without distributed")
    multiprocessing.set_forkserver_preload(_PRELOADED)
    arguments = (module, world, device, str(folder))
    start_method = "spawn" if device == "cuda" else "forkserver"
    mp.start_processes(_work, arguments, world, start_method=start_method)
    return Verdicts(world, folder)


def _work(rank: int, module: str, world: int, device: str, folder: str) -> None:
    """Write a file for each check with its verdict: "passed", or the traceback."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", f"file://{folder}/store", rank=rank,
        world_size=world, timeout=timedelta(seconds=120),
        device_id=torch.device(device, rank) if device == "cuda" else None,
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
