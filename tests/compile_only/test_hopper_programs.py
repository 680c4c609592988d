"""Programs of scores and masks in the Hopper kernels: registers and instructions."""

import re

import pytest
import torch

pytest.importorskip(
    "nvidia.cu13", reason="NVRTC (pip install nvidia-cuda-nvrtc) compiles these kernels"
)
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper.configs import forward_config
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import nvrtc
from tests.compile_only.sass import disassembled, shortest_turn, unwritten_uniform_registers
from tests.compile_only.test_hopper import SERIALISED

PROGRAMS = {
    "table": "t0 float distance h\nx0 add(score, t0)\nscore x0",
    "bias of keys": "t0 float column b\nx0 add(score, t0)\nscore x0",
    "gates": ("t0 float column bh\nt1 float row bh\nx0 add(score, t1)\nx1 sub(x0, t0)\nscore x1"),
    "scale and offset": (
        "t0 float tile h\nt1 float tile h\nx0 mul(score, t0)\nx1 add(x0, t1)\nscore x1"
    ),
    "softcap": "x0 div(score, 30.0)\nx1 tanh(x0)\nx2 mul(x1, 30.0)\nscore x2",
    "cubic": (
        "x0 mul(score, 0.1)\nx1 mul(x0, score)\nx2 mul(x1, score)\nx3 add(score, x2)\nscore x3"
    ),
    "documents": "t0 int row -\nt1 int column -\nx0 eq(t0, t1)\nmask x0",
}
# instructions for each score, beyond those of the causal kernel, and bytes of spills
BOUNDS = {
    (64, "table"): (2.05, 0), (64, "gates"): (2.8, 0), (64, "softcap"): (5.4, 24),
    (128, "table"): (1.8, 0), (128, "bias of keys"): (1.5, 0), (128, "gates"): (2.5, 0),
    (128, "scale and offset"): (1.1, 0), (128, "softcap"): (5.1, 0), (128, "cubic"): (4.1, 0),
    (128, "documents"): (0.3, 0), (256, "table"): (1.9, 0), (256, "gates"): (2.6, 0),
}  # fmt: skip


def turn_of(D, text, folder):
    """(instructions of a turn of the main loop for each score, bytes of spills)."""
    config = forward_config(D, D, skips_tiles="mask" in text)
    defines = macros(config, torch.bfloat16, window=True, program=text or 0)
    program = nvrtc.program("forward", "forward", defines)
    cubin, log = nvrtc.compile_source(program, "--ptxas-options=-v")
    sass = disassembled(cubin, folder)
    assert not [code for code in SERIALISED if code in log]
    assert not unwritten_uniform_registers(sass)
    turn = shortest_turn(sass, D // 16 + config.block_n // 16)
    assert sum(name.startswith(("LDL", "STL")) for name in turn) <= 1
    (spills,) = re.findall(r"(\d+) bytes spill stores", log)
    return len(turn) / (config.block_n // 2), int(spills)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The instructions of the causal kernel for each score, by head dimension."""
    return {D: turn_of(D, "", tmp_path_factory.mktemp(str(D)))[0] for D in (64, 128, 256)}


@pytest.mark.parametrize("D, name", BOUNDS, ids=lambda x: str(x))
def test_instructions_for_each_score(D, name, plain, tmp_path):
    more, spills = BOUNDS[D, name]
    found, spilled = turn_of(D, f"fa1\n{PROGRAMS[name]}\n", tmp_path)
    assert found - plain[D] <= more and spilled <= spills
