"""The Hopper kernels with ALiBi, of batch rows and of packed sequences, without a GPU."""

import pytest

from fa_ops.backends.hopper import configs
from tests.compile_only import test_hopper as hopper
from tests.compile_only.sass import unwritten_uniform_registers

PACKED = {"HAS_RANGES": 1, "HAS_ALIBI": 2}


@pytest.mark.parametrize("alibi", [1, 2], ids=["batch rows", "packed"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80), (96, 72), (256, 256)], ids=str)
def test_forward(dims, alibi, tmp_path):
    config = configs.forward_config(*dims, differs_by_row=True)
    features = {"HAS_RANGES": 1, "HAS_LEFT": 1, "HAS_ALIBI": alibi}
    sass, log = hopper.compiled(tmp_path, "forward", config, **features)
    # distances that steps shared with the recomputation of their scores would be kept aside
    hopper.assert_clean(log, spilled_bytes=16)
    # a conversion for each row, in three places; and where a row is computed exactly
    assert sass.count("I2FP.F32.S32") <= 3 * alibi + 1
    products = 2 * hopper.steps(config.head_features) + 2 * (config.block_n // 16)
    assert sass.count("HGMMA") == products
    assert sass.count("WARPGROUP.DEPBAR") == 4 and not unwritten_uniform_registers(sass)


@pytest.mark.parametrize("head_dim", [64, 128, 96])
def test_backward_of_packed_sequences_in_one_pass(head_dim, tmp_path):
    hopper.assert_one_pass(head_dim, PACKED, tmp_path, differs_by_row=True)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_backward_of_packed_sequences_in_two_passes(dims, tmp_path):
    hopper.assert_two_passes(dims, PACKED, tmp_path)
