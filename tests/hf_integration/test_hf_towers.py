"""Vision and audio towers: one call per layer for all images and windows."""

import pytest
import torch
from torch import Tensor

import fa_ops
from hf_integration.sweep import run, tiny

TOWERS = ["qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "glm4v_vision"]


def calls(monkeypatch) -> list[int]:
    """Sequences of every packed call."""
    found = []
    varlen = fa_ops.attention_varlen

    def counted(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *args, **options):
        found.append(ends.numel() - 1)
        return varlen(q, k, v, ends, *args, **options)

    monkeypatch.setattr(fa_ops, "attention_varlen", counted)
    return found


@pytest.mark.parametrize("model_type", TOWERS)
def test_two_images_are_one_call_per_layer(model_type, monkeypatch):
    if model_type not in tiny.CONFIG_MAPPING:
        pytest.skip("this transformers release does not have it")
    base = run.Base(model_type)
    found = calls(monkeypatch)
    ours = tiny.build(base.config, "fa_ops")
    with torch.no_grad():
        with run.calls("fa_ops") as count:
            out = ours(**base.inputs)[0]
        expected = base.model(**base.inputs)[0]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert len(found) == count["fa_ops"] == len(ours.blocks)
    assert min(found) >= 2
