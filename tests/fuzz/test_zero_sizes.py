"""Sizes of 0 in every dimension, in a child process, as a division by zero would end it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fa_ops.plans import dispatch


@pytest.mark.parametrize("backend", ["cpu", "triton", "hopper"])
def test_zero_sizes_in_every_dimension(backend):
    device = "cpu" if backend == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if reason := dispatch.available_error(backend):
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.fuzz.zero_sizes", backend, device]
    child = subprocess.run(command, capture_output=True, text=True)
    wrong = [line for line in child.stdout.splitlines() if line.startswith("WRONG")]
    last = child.stdout[-1000:] + child.stderr[-1000:]
    assert child.returncode == 0, f"{wrong[:9]}; ended with {child.returncode} after: {last}"
    count, _ = child.stdout.splitlines()[-1].split()
    assert int(count) > 2700
