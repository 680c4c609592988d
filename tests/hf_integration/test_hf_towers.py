"""Vision towers: one packed call per layer for all images and windows."""

import pytest
import torch

import hf_integration  # noqa: F401 - registers "fa_ops"
from tests.evaluation.hf_sweep import run, tiny

TOWERS = ["qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "glm4v_vision"]


@pytest.mark.parametrize("model_type", TOWERS)
def test_two_images_are_one_packed_call_per_layer(model_type, packed_calls):
    if model_type not in tiny.CONFIG_MAPPING:
        pytest.skip("this transformers release does not have it")
    base = run.Base(model_type)
    ours = tiny.build(base.config, "fa_ops")
    with torch.no_grad():
        with run.calls("fa_ops") as count:
            out = ours(**base.inputs)[0]
        expected = base.model(**base.inputs)[0]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert len(packed_calls) == count["fa_ops"] == len(ours.blocks)
    assert min(packed_calls) >= 2
