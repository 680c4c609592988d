"""The Hopper kernel of heads over 256 wide without a GPU: spills, products and shared memory."""

import pytest
import torch

pytest.importorskip(
    "nvidia.cu13", reason="NVRTC (pip install nvidia-cuda-nvrtc) compiles these kernels"
)
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper import configs, dense_forward, launch  # noqa: E402
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
    defines = dense_forward.kernel_defines(config, torch.bfloat16, **FEATURES[name])
    entries = [launch.Entry("forward_wide", 0)]
    sass, log = compiled_entries(tmp_path, "forward_wide", entries, defines)
    assert_clean(log)
    # scores: one product per 16 features; values: one per 16 keys, from registers, and twice from
    # shared memory, in the loop and behind it
    assert sass.count("HGMMA") == steps(config.head_dim) + 3 * (config.block_n // 16)
    # for all columns of scores but the first, all scores, before the sums change hands, and after
    # either product with values
    assert sass.count("WARPGROUP.DEPBAR") == config.head_dim // 64 - 1 + 5
