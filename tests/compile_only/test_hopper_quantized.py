"""The Hopper kernels with 8-bit products without a GPU: no spills, asynchronous products."""

import re

import pytest
import torch

pytest.importorskip("nvidia.cu13", reason="NVRTC compiles these kernels")
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper import configs, eight_bit
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import launch
from tests.compile_only.sass import innermost_loop, unwritten_uniform_registers  # noqa: E402
from tests.compile_only.test_hopper import assert_clean, compiled_entries  # noqa: E402

CASES = [
    # the last number: bytes that are spilled, outside the loop over keys
    (64, 64, True, {}, 0),
    (128, 128, True, {"window": True}, 16),
    (128, 128, False, {"signs": True}, 12),
    (128, 128, False, {"window": True, "signs": True, "head_scales": True}, 0),
    (128, 128, True, dict(window=True, left=True, ranges=True, softcap=1, sinks=True), 48),
    (256, 256, False, {"window": True, "kv_lens": True}, 4),
    (64, 136, True, {}, 0),
    (80, 40, False, {"window": True, "left": True, "softcap": 1}, 0),
    (256, 128, True, dict(window=True, kv_lens=True, ranges=True, softcap=1, sinks=True), 52),
]


@pytest.mark.parametrize("D, Dv, is_int8, features, spilled", CASES)
def test_forward(D, Dv, is_int8, features, spilled, tmp_path):
    config = configs.quantized_config(D, Dv, has_16_bits="signs" not in features)
    defines = macros(config, torch.bfloat16, is_int8=is_int8, **features)
    sass, log = compiled_entries(tmp_path, "quantized", [launch.Entry("quantized", 0)], defines)
    assert_clean(log, spilled)
    # scores: a product for each 32 features, first block and loop; values: one for each
    # 32 keys, loop and last block
    scores, values = 2 * -(-D // 32), 2 * config.block_n // 32
    assert sass.count("IGMMA") == (scores if is_int8 else 0)
    assert sass.count("QGMMA") == values + (0 if is_int8 else scores)
    waits = re.split(r"WARPGROUP.DEPBAR.LE gsb0, ", sass)
    assert len(waits) == 5
    # three consumers take turns; two find maxima before they wait for the product with values
    assert ("BAR.ARV" in sass) == (config.block_m == 192)
    assert config.block_m == 192 or waits[2].count("MNMX") >= 32
    assert sass.count("UTMALDG") > 0 and sass.count("ELECT") == 1
    assert not unwritten_uniform_registers(sass)
    # two of a thread's weights are rounded at once, and of its queries, and no integer is converted
    weights, queries = config.block_n // 2, 16 * -(-D // 64)
    in_kernel = config.quantises_queries and not is_int8
    assert sass.count("F2FP.SATFINITE.E4M3") == weights + queries * in_kernel
    assert sass.count("F2FP.F16.E4M3") == (0 if config.sums_by_product else weights)
    assert "I2FP" not in sass
    # what is spilled is read once for a tile
    assert "softcap" in features or "LDL" not in innermost_loop(sass)


# What looks up sequences keeps some registers in memory, and reads them once for a tile or a block.
PACKED = [
    (64, 64, 0, {}, 56),
    (128, 128, 16, {"window": True}, 168),
    (128, 128, 64, {"window": True, "sinks": True}, 152),
    (256, 256, 0, {"window": True}, 184),
    (256, 256, 64, {}, 208),
]


@pytest.mark.parametrize("D, Dv, page, features, spilled", PACKED)
def test_packed_forward(D, Dv, page, features, spilled, tmp_path):
    config = eight_bit.packed_config(D, Dv, page)
    defines = macros(config, torch.bfloat16, **eight_bit.PACKED_FEATURES, **features)
    sass, log = compiled_entries(tmp_path, "quantized", [launch.Entry("quantized", 0)], defines)
    assert_clean(log, spilled)
    # one thread copies: where lanes have parted, no other issues its copies again
    assert sass.count("ELECT") == 1 and "BRA.U.ANY" not in sass
    assert "STL" not in innermost_loop(sass)
    assert sass.count("QGMMA") == 2 * -(-D // 32) + 2 * config.block_n // 32
    assert not unwritten_uniform_registers(sass)


@pytest.mark.parametrize("Dv, is_paged", [(64, True), (256, False)])
def test_preparation_of_packed_tensors(Dv, is_paged, tmp_path):
    defines = eight_bit.packed_e4m3_defines(Dv, is_paged)
    entries = [launch.Entry("scaled_packed", 0)]
    sass, log = compiled_entries(tmp_path, "scaled_packed", entries, defines)
    assert_clean(log)
    assert "LDG.E.64" in sass and not unwritten_uniform_registers(sass)


@pytest.mark.parametrize(
    "D, Dv, is_int8, rotate, spilled", [(128, 64, True, False, 0), (256, 256, False, True, 80)]
)
def test_quantisation(D, Dv, is_int8, rotate, spilled, tmp_path):
    defines = eight_bit.quantize_defines(torch.float16, D, Dv, is_int8, rotate)
    sass, log = compiled_entries(tmp_path, "quantize", [launch.Entry("quantize", 0)], defines)
    assert_clean(log, spilled)
    assert sass.count("LDG.E.128") >= 4 and "LDG.E.U16" not in sass
    assert not unwritten_uniform_registers(sass)
