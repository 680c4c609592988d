"""Pipelines of diffusers from prompt embeddings to images, with the backend "fa_ops"."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'fa-ops[diffusers]'")

import tiny_pipelines
from diffusers.models.attention_dispatch import attention_backend
from tiny_pipelines import PIPELINES

import fa_ops
import hf_integration.diffusers  # noqa: F401


@pytest.fixture(autouse=True)
def native():
    """diffusers' own backend before and after each test."""
    with attention_backend("native"):
        yield


@pytest.mark.parametrize("name", PIPELINES)
def test_images_are_those_of_native_attention(name, monkeypatch):
    pipeline, calls, attend = PIPELINES[name].build(name), [], fa_ops.attention
    monkeypatch.setattr(fa_ops, "attention", lambda *a, **o: calls.append(1) or attend(*a, **o))
    model = getattr(pipeline, tiny_pipelines.denoiser_name(name))
    arguments = PIPELINES[name].arguments()
    model.set_attention_backend("native")
    expected = tiny_pipelines.image(pipeline, arguments)
    assert not calls and expected.std() > 0.01
    model.set_attention_backend("fa_ops")
    with fa_ops.use_backend("reference"):  # in float64: not what native attention computes
        found = tiny_pipelines.image(pipeline, arguments)
    assert calls and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
