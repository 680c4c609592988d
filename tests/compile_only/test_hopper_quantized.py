"""The Hopper kernels with 8-bit products without a GPU: no spills, asynchronous products."""

import re

import pytest
import torch

pytest.importorskip("nvidia.cu13", reason="NVRTC compiles these kernels")
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper import configs, launch, quantize, quantized  # noqa: E402
from tests.compile_only.sass import unwritten_uniform_registers  # noqa: E402
from tests.compile_only.test_hopper import assert_clean, compiled_entries  # noqa: E402

CASES = [
    # the last number: bytes that are spilled
    (64, 64, True, {}, 0),
    (128, 128, True, {"window": True}, 0),
    (128, 128, False, {}, 0),
    (80, 40, False, {"window": True, "left": True, "softcap": 1}, 32),
    (256, 128, True, dict(window=True, kv_lens=True, ranges=True, softcap=1, sinks=True), 120),
]


@pytest.mark.parametrize("D, Dv, is_int8, features, spilled", CASES)
def test_forward(D, Dv, is_int8, features, spilled, tmp_path):
    config = configs.QuantizedConfig(D, Dv)
    defines = quantized.kernel_defines(config, torch.bfloat16, is_int8, **features)
    sass, log = compiled_entries(tmp_path, "quantized", [launch.Entry("quantized", 0)], defines)
    assert_clean(log, spilled)
    # scores: a product for each 32 features and 64 keys, first block and loop; values: one for each
    # 32 keys, loop and last block
    scores, values = 4 * -(-D // 32), 2 * config.block_n // 32
    assert sass.count("IGMMA") == (scores if is_int8 else 0)
    assert sass.count("QGMMA") == values + (0 if is_int8 else scores)
    assert sass.count("WARPGROUP.DEPBAR") == 6
    assert sass.count("UTMALDG") > 0 and sass.count("ELECT") == 1
    assert not unwritten_uniform_registers(sass)
    # two of a thread's 64 weights are rounded at once, and no integer is converted
    assert len(re.findall(r"F2FP\S*E4M3", sass)) == 2 * 32
    assert "I2FP" not in sass


@pytest.mark.parametrize(
    "D, Dv, is_int8, rotate", [(128, 64, True, False), (256, 256, False, True)]
)
def test_quantisation(D, Dv, is_int8, rotate, tmp_path):
    defines = quantize.kernel_defines(torch.float16, D, Dv, is_int8, rotate)
    entries = [launch.Entry(name, 0) for name in ("statistics", "quantize")]
    sass, log = compiled_entries(tmp_path, "quantize", entries, defines)
    assert_clean(log)
    assert sass.count("LDG.E.128") >= 4 and "LDG.E.U16" not in sass
    assert not unwritten_uniform_registers(sass)
