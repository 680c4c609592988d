"""What may be skipped of a dense mask is found once for the layers that share the mask."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build, switch, tokens

import fa_ops
from hf_integration import operators

LENGTH = 150  # more than a tile of the mask


@pytest.fixture
def made(monkeypatch):
    """The masks that were read, one after the other."""
    masks, make = [], fa_ops.mask_blocks
    monkeypatch.setattr(fa_ops, "mask_blocks", lambda mask: masks.append(mask) or make(mask))
    monkeypatch.setattr(operators, "_blocks_cache", operators.PerTensorCache())
    return masks


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_layers_share_the_blocks_of_a_mask(dtype, made):
    model, ids = build("llama"), tokens(1, LENGTH)
    mask = torch.rand(1, 1, LENGTH, LENGTH) < 0.5
    mask[..., 0] = True
    mask[:, :, :128, 128:] = False
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    assert model.config.num_hidden_layers > 1
    with torch.no_grad():
        for passes in (1, 2):
            found = model(ids, attention_mask=mask).logits
            assert len(made) == 1, f"after {passes}"
        switch(model, "sdpa")
        torch.testing.assert_close(found, model(ids, attention_mask=mask).logits)
        switch(model, "fa_ops")
        mask[:, :, :128, 128:] = mask[:, :, :1, :1]
        changed = model(ids, attention_mask=mask).logits
        assert len(made) == 2
        switch(model, "sdpa")
        torch.testing.assert_close(changed, model(ids, attention_mask=mask).logits)


def test_short_prompts_and_compact_masks_have_none(made):
    model = build("llama")
    with torch.no_grad():
        model(tokens(1, 40), attention_mask=torch.ones(1, 1, 40, 40, dtype=torch.bool))
        model(tokens(1, LENGTH))
    assert not made
