"""diffusers models on a GPU with the backend "fa_ops"."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'fa-ops[diffusers]'")

from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

import hf_integration.diffusers
from tests.hf_integration import tiny_diffusers
from tests.hf_integration.tiny_diffusers import TINY, padding

DTYPE = torch.bfloat16


def moved(value, dtype: torch.dtype):
    """The arguments of a model on the GPU; tensors of positions and times stay float32."""
    if isinstance(value, dict):
        return {
            name: moved(x, torch.float32 if name in ("timestep", "img_ids", "txt_ids") else dtype)
            for name, x in value.items()
        }
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):
        return [moved(x, dtype) for x in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.cuda().to(dtype) if value.is_floating_point() else value.cuda()


@pytest.mark.parametrize("name", TINY)
def test_models_are_within_twice_the_error_of_native_attention(name):
    inputs = TINY[name].inputs()
    with torch.no_grad(), attention_backend("native"):
        model = TINY[name].build().cuda()
        exact = tiny_diffusers.run(model, moved(inputs, torch.float32))
        model.to(DTYPE)
        native = tiny_diffusers.run(model, moved(inputs, DTYPE)).float()
        model.set_attention_backend("fa_ops")
        actual = tiny_diffusers.run(model, moved(inputs, DTYPE)).float()
    assert not torch.equal(actual, exact)
    assert (actual - exact).norm() <= 2 * (native - exact).norm() + 1e-5


def test_masks_of_keys_are_not_read_by_the_host():
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=DTYPE) for _ in range(3))
    mask = padding(77, 300, size=300).cuda()
    expected = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="native").float()
    dispatch_attention_fn(q, k, v, attn_mask=mask, backend="fa_ops")  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="fa_ops").float()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (actual - expected).abs().max() < 2e-2


def test_heads_that_no_kernel_has_run_in_torch():
    TINY["sd3"].build().set_attention_backend("fa_ops")
    attend = attention_processor.F.scaled_dot_product_attention
    with attention_backend("fa_ops"):
        q = torch.randn(1, 1, 64, 512, device="cuda")
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert torch.equal(attend(q, q, q), expected)


def test_a_compiled_model_is_one_graph():
    model = TINY["hunyuan_video"].build().cuda().to(DTYPE)
    inputs = moved(TINY["hunyuan_video"].inputs(), DTYPE)
    model.set_attention_backend("fa_ops")
    with torch.no_grad():
        expected = tiny_diffusers.run(model, inputs)
        compiled = torch.compile(model, fullgraph=True)
        actual = tiny_diffusers.run(compiled, inputs)
    assert (actual - expected).float().norm() < 0.02 * expected.float().norm()
    assert hf_integration.diffusers.mask_counts["keys"]
