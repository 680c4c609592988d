"""Programs of scores and masks in the Hopper backward kernels: spills, and the loop's length."""

import re

import pytest
import torch

pytest.importorskip(
    "nvidia.cu13", reason="NVRTC (pip install nvidia-cuda-nvrtc) compiles these kernels"
)
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper.backward_programs import backward_program
from fa_ops.backends.hopper.configs import backward_config
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import nvrtc
from tests.compile_only.sass import disassembled, main_loop, unwritten_uniform_registers
from tests.compile_only.test_hopper import SERIALISED

PROGRAMS = {
    "table": "t0 float distance h\nx0 add(score, t0)\nscore x0",
    "table with gradient": "t0 float distance h grad\nx0 add(score, t0)\nscore x0",
    "gates": "t0 float row bh grad\nt1 float column bh grad\nx0 add(score, t0)\nx1 sub(x0, t1)\n"
    "score x1",
    "scale and offset": "t0 float tile h grad\nt1 float tile h grad\nx0 mul(score, t0)\n"
    "x1 add(x0, t1)\nscore x1",
    "softcap": "x0 div(score, 30.0)\nx1 tanh(x0)\nx2 mul(x1, 30.0)\nscore x2",
    "cubic": "x0 mul(score, score)\nx1 mul(x0, score)\nx2 mul(x1, 0.1)\nx3 add(score, x2)\n"
    "score x3",
    "documents": "t0 int row -\nt1 int column -\nx0 eq(t0, t1)\nmask x0",
}
# Bytes of spills, and instructions of the loop with all its branches, of which a step takes a third
# to a half; of the causal kernels they are 1348 and 1123.
BOUNDS = {
    (64, "table"): (0, 1540), (64, "gates"): (32, 2100), (64, "scale and offset"): (0, 1480),
    (128, "table"): (0, 1300), (128, "table with gradient"): (0, 2400), (128, "gates"): (0, 1600),
    (128, "scale and offset"): (40, 1750), (128, "softcap"): (8, 1600), (128, "cubic"): (100, 1700),
    (128, "documents"): (0, 1320),
}  # fmt: skip


@pytest.mark.parametrize("D, name", BOUNDS, ids=str)
def test_loops_of_programs(D, name, tmp_path):
    text = f"fa1\n{PROGRAMS[name]}\n"
    program = backward_program(text)
    config = backward_config(
        D, D, few_registers=program.keeps_registers, skips_tiles=program.has_mask,
        differs_by_row=True, sums_distances=program.distance_sum is not None,
    )  # fmt: skip
    defines = macros(config, torch.bfloat16, window=True) | {"HAS_PROGRAM": text}
    unit = nvrtc.program("backward", "backward", defines)
    cubin, log = nvrtc.compile_source(unit, "--ptxas-options=-v")
    sass = disassembled(cubin, tmp_path)
    assert not [code for code in SERIALISED if code in log]
    assert not unwritten_uniform_registers(sass)
    spills, instructions = BOUNDS[D, name]
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log)
    assert int(spilled) <= spills
    assert len(main_loop(sass)) <= instructions


@pytest.mark.parametrize("entry", ["preprocess", "backward_queries", "distance_gradient"])
def test_other_kernels_do_not_spill(entry):
    text = f"fa1\n{PROGRAMS['table with gradient']}\n".replace(
        "score x0", "x1 mul(x0, 2.0)\nscore x1"
    )
    config = backward_config(128, 128, True, few_registers=True, sums_distances=True)
    defines = macros(config, torch.bfloat16, window=True) | {"HAS_PROGRAM": text}
    _, log = nvrtc.compile_source(nvrtc.program("backward", entry, defines), "--ptxas-options=-v")
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
