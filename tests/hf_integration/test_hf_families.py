"""Model families in every scenario of the sweep that applies: outputs, gradients, tokens."""

import pytest
from transformers import CONFIG_MAPPING

import hf_integration  # noqa: F401  registers the name
from tests.evaluation.hf_sweep import run
from tests.evaluation.hf_sweep.scenarios import SCENARIOS

# The scenarios that must apply; test_hf_models.py covers common decoders and encoders.
FAMILIES = {
    "clip": {"nopad", "grad"},
    "siglip": {"nopad", "grad"},
    "siglip_text_model": {"nopad", "leftpad", "rightpad", "grad"},
    "vit": {"nopad", "grad"},
    "whisper": {"nopad", "decode", "static", "grad"},
    "t5": {"nopad", "leftpad", "rightpad", "decode", "static_leftpad", "grad"},
    "glm4_moe": {"nopad", "leftpad", "decode", "static", "chunked", "grad", "packed"},
    "qwen2_5_vl": {"nopad", "leftpad", "decode", "static", "chunked", "grad"},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_scenario_matches_eager_attention(model_type):
    assert model_type in CONFIG_MAPPING
    results = run.compare(run.Base(model_type), "fa_ops", list(SCENARIOS))
    passed = {scenario for scenario, (status, _) in results.items() if status == "pass"}
    failures = {s: r for s, r in results.items() if r[0] not in ("pass", "skip", "base_error")}
    assert not failures
    assert passed >= FAMILIES[model_type]
