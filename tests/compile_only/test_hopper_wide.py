"""The Hopper kernels of heads over 256 wide without a GPU: spills, products and shared memory."""

import re

import pytest
import torch

pytest.importorskip(
    "nvidia.cu13", reason="NVRTC (pip install nvidia-cuda-nvrtc) compiles these kernels"
)
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper import configs
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import launch, nvrtc
from tests.compile_only.test_hopper import assert_clean, compiled_entries, steps  # noqa: E402

FEATURES = {
    "full": {},
    "causal": {"window": True},
    "all": dict.fromkeys(("window", "left", "kv_lens", "ranges", "sinks"), True),
}


@pytest.mark.parametrize("dims, name", [((512, 512), x) for x in FEATURES] + [((72, 264), "all")])
def test_forward(dims, name, tmp_path):
    config = configs.forward_config(*dims)
    assert config.shared_bytes() <= configs.SHARED_LIMIT
    defines = macros(config, torch.bfloat16, **FEATURES[name])
    entries = [launch.Entry("forward_wide", 0)]
    sass, log = compiled_entries(tmp_path, "forward_wide", entries, defines)
    assert_clean(log)
    # scores: one product per 16 features; values: one per 16 keys, from registers, and twice from
    # shared memory, in the loop and behind it
    assert sass.count("HGMMA") == steps(config.head_dim) + 3 * (config.block_n // 16)
    # for all columns of scores but the first, all scores, before the sums change hands, and after
    # either product with values
    assert sass.count("WARPGROUP.DEPBAR") == config.head_dim // 64 - 1 + 5


BACKWARD_FEATURES = {
    "full": {},
    "causal": {"window": True},
    "all": dict.fromkeys(("window", "kv_lens", "ranges", "split"), True),
}


@pytest.mark.parametrize("name", BACKWARD_FEATURES)
def test_backward(name, tmp_path):
    config = configs.backward_config(512, 320)
    assert config.shared_bytes == config.query_shared_bytes <= configs.SHARED_LIMIT
    defines = macros(config, torch.bfloat16, **BACKWARD_FEATURES[name])
    for entry in config.products:
        sass, log = compiled_entries(tmp_path, "backward", [launch.Entry(entry, 0)], defines)
        assert_clean(log)
        # ptxas gives up the registers of each warpgroup (C7507) where they are too few
        assert "C7507" not in log
        # scores: one product per 16 features; gradients: one per 16 tokens for a quarter
        assert sass.count("HGMMA") == steps(512) + 2 * 4
        assert sass.count("WARPGROUP.DEPBAR") == 3
        source = nvrtc.program("backward", entry, defines).headers[0][1]
        copies, scores, gradients = map(int, re.findall(r"register_(?:de)?alloc<(\d+)>", source))
        assert copies + scores + 2 * gradients == 512


def test_wide_heads_fit_the_other_kernels_of_the_backward_pass(tmp_path):
    config = configs.backward_config(512, 512)
    defines = macros(config, torch.float16, window=True, ranges=True, split=True)
    entries = [launch.Entry(name, 0) for name in ("preprocess", "clip_ranges", "postprocess")]
    _, log = compiled_entries(tmp_path, "backward", entries, defines)
    assert_clean(log)
