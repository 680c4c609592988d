"""The Hopper kernels that skip tiles of a mask, without a GPU."""

import pytest

pytest.importorskip("nvidia.cu13", reason="NVRTC compiles these kernels")
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper import configs  # noqa: E402
from tests.compile_only.sass import unwritten_uniform_registers  # noqa: E402
from tests.compile_only.test_hopper import (  # noqa: E402
    FEATURES,
    assert_clean,
    compiled,
    kernel_counts,
    steps,
)


@pytest.mark.parametrize(
    "dims, bias_bits, features",
    [
        ((64, 64), 0, FEATURES[1]),
        ((128, 128), 0, {}),
        ((256, 256), 0, {}),
        ((72, 72), 0, FEATURES[3]),
        ((128, 128), 32, {"HAS_KV_LENS": 1}),
        ((256, 256), 16, {"HAS_RANGES": 1, "HAS_LEFT": 1}),
    ],
    ids=str,
)
def test_forward_that_skips_tiles_of_a_mask(dims, bias_bits, features, tmp_path):
    config = configs.forward_config(*dims, bias_bits, few_registers=True, skips_tiles=True)
    assert config.block_m == 128 and config.block_n in (64, 96, 128)
    is_bool = {"HAS_MASK": int(not bias_bits)}
    sass, log = compiled(tmp_path, "forward", config, **features, **is_bool)
    assert_clean(log)
    assert sass.count("HGMMA") == 2 * steps(dims[0]) + 2 * (config.block_n // 16)
    assert sass.count("WARPGROUP.DEPBAR") == 4
    # one thread copies, of each warp that does
    assert sass.count("ELECT") == (2 if bias_bits else 1)
    assert not unwritten_uniform_registers(sass)


@pytest.mark.parametrize(
    "D, deterministic, bias_bits, features",
    [
        (64, False, 0, FEATURES[1]),
        (128, False, 0, {}),
        (128, False, 32, FEATURES[1]),
        (128, True, 0, FEATURES[1]),
        (256, False, 16, {}),
        (256, False, 0, FEATURES[3]),
    ],
    ids=str,
)
def test_backward_that_skips_tiles_of_a_mask(D, deterministic, bias_bits, features, tmp_path):
    config = configs.backward_config(D, D, deterministic, bias_bits, True, skips_tiles=True)
    is_bool = {"HAS_MASK": int(not bias_bits)}
    sass, log = compiled(tmp_path, "backward", config, **features, **is_bool)
    assert_clean(log, spilled_bytes=48)
    assert not unwritten_uniform_registers(sass)
    waits = kernel_counts(sass, "WARPGROUP.DEPBAR")
    expected = {"backward": 5 if config.adds_dq else 3, "backward_queries": 5}
    if config.is_wide:  # a product beside a bias is waited for at once
        expected["backward"] = 7 if bias_bits else 6
    assert waits == {name: expected[name] for name in waits if name in expected}
