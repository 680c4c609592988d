"""What the context-parallel settings of accelerate and of Trainer do not pass on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.hf_integration import tiny_models

pytest.importorskip("accelerate")

from accelerate import big_modeling  # noqa: E402
from transformers import Trainer  # noqa: E402

HOOK = getattr(big_modeling, "_attach_context_parallel_hooks", None)
IDS = torch.arange(12).view(2, 6) % tiny_models.VOCAB
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


@pytest.mark.skipif(HOOK is None, reason="this accelerate removes no masks")
@torch.no_grad()
def test_masks_that_accelerate_removes_are_missed():
    """SDPA attends the padding then."""
    model = tiny_models.build("llama")
    expected = model(IDS, attention_mask=PADDED).logits
    HOOK(model)
    with pytest.raises(NotImplementedError, match="cp_size has removed the mask of LlamaAttention"):
        model(IDS, attention_mask=PADDED)
    tiny_models.switch(model, "sdpa")
    found = model(IDS, attention_mask=PADDED, position_ids=torch.arange(6)[None]).logits
    assert not torch.allclose(found[0, 2:], expected[0, 2:], atol=1e-3)


def test_trainer_refuses_other_attention_than_sdpa():
    parallelism = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallelism))
    with pytest.raises(ValueError, match="supported only with SDPA attention, you are using fa_op"):
        Trainer._prepare_context_parallel_inputs(
            trainer, tiny_models.build("llama"), {"input_ids": IDS}
        )
