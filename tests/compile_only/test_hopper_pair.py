"""The backward kernel for pairs of CTAs, without a GPU."""

import re

import pytest
import torch

pytest.importorskip(
    "nvidia.cu13", reason="NVRTC (pip install nvidia-cuda-nvrtc) compiles these kernels"
)
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper import (
    configs,
)
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import nvrtc
from tests.compile_only.sass import disassembled, unwritten_uniform_registers  # noqa: E402

FEATURES = {
    "full": {},
    "lengths": {"window": True, "kv_lens": True},
    "ranges and slopes": {"ranges": True, "alibi": True},
    "packed alibi": {"ranges": True, "alibi": 2},
    "parts of groups": {"window": True, "split": True},
}
WARPGROUPS = {"copies": 24, "values": 216, "keys": 208, "queries": 64}


@pytest.mark.parametrize("name", FEATURES)
def test_products_are_asynchronous(name, tmp_path):
    program = nvrtc.program("backward", "backward", _defines(**FEATURES[name]))
    cubin, log = nvrtc.compile_source(program, "--ptxas-options=-v")
    sass = disassembled(cubin, tmp_path)
    # ptxas gives up the registers of each warpgroup (C7507), or runs products one by one (C7510 to
    # C7515), where they are too few
    assert not re.findall(r"C75\d\d", log)
    # S and dP: one product per 16 features; dK and dV: two per 16 queries; dQ: one per 16 keys, for
    # 64 columns at a time
    assert sass.count("HGMMA") == 2 * 16 + 2 * 2 * 4 + 2 * 4
    assert sass.count("WARPGROUP.DEPBAR") == 7
    assert not unwritten_uniform_registers(sass)
    # what the copying warp keeps aside, and up to two words that others read once in a step
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= 56


def test_warpgroups_have_all_registers():
    source = nvrtc.program("backward", "backward", _defines()).headers[0][1]
    found = re.findall(r"register_(?:de)?alloc<(\d+)>", source)
    assert sorted(map(int, found)) == sorted(WARPGROUPS.values())
    assert sum(WARPGROUPS.values()) * 128 == 1 << 16


def paired():
    return configs.backward_config(256, 256, prefers_pairs=True)


def _defines(**features):
    return macros(paired(), torch.bfloat16, **features)


def test_shared_memory_fits():
    config = paired()
    assert config.shared_bytes <= configs.SHARED_LIMIT
    assert (config.threads, config.ctas_of_block, config.is_persistent) == (512, 2, False)
    assert config.sum_features == 256 and not config.alternates


def test_which_calls_it_serves():
    assert paired().is_paired and configs.backward_config(248, 256, prefers_pairs=True) == paired()
    assert not configs.backward_config(256, 256).is_paired
    others = [
        ((256, 256), {"deterministic": True}), ((256, 256), {"bias_bits": 16}),
        ((256, 256), {"few_registers": True}), ((256, 192), {}), ((240, 240), {}), ((128, 128), {}),
    ]  # fmt: skip
    for dims, options in others:
        assert not configs.backward_config(*dims, **options, prefers_pairs=True).is_paired
