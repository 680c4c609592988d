"""hf_integration.context_parallel on gloo processes, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import hf_integration
from tests.hf_integration import tiny_models

WORLD = 2
TOKENS = 16
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3")


def batches() -> dict[str, dict]:
    """Batches without padding, padded on the left, and of packed documents."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(tiny_models.VOCAB, (2, TOKENS), generator=g)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    packed = torch.cat([torch.arange(7), torch.arange(9)])[None]
    labels = ids.masked_fill(padding == 0, -100)
    return {
        "plain": {"input_ids": ids, "labels": ids},
        "padded": {"input_ids": ids, "attention_mask": padding, "labels": labels},
        "packed": {"input_ids": ids[:1], "position_ids": packed, "labels": ids[:1]},
    }


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def one_process(model, batch: dict) -> tuple[float, dict]:
    """The loss and gradients, which other tests compare with eager attention."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: x.clone() for n, x in gradients(model).items()}


def check(
    model_type: str, kind: str, mesh=None, checkpoint: bool = False, dropout: float = 0.0, **options
) -> None:
    batch = batches()[kind]
    model = tiny_models.build(model_type)
    if dropout:
        model.train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
    torch.manual_seed(3)
    loss, expected = one_process(model, batch)
    model.zero_grad()
    torch.manual_seed(3)
    if checkpoint:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with hf_integration.context_parallel(batch, mesh, **options) as part:
        assert part["input_ids"].shape[1] == TOKENS // WORLD
        found = model(**part).loss
        found.backward()
    total = found.detach()
    dist.all_reduce(total)
    assert abs(total.item() - loss) < 1e-5 * max(1.0, abs(loss)), (total.item(), loss)
    for name, parameter in model.named_parameters():
        grad = expected.get(name, torch.zeros_like(parameter))
        mine = torch.zeros_like(grad) if parameter.grad is None else parameter.grad
        dist.all_reduce(mine)
        assert torch.allclose(mine, grad, atol=2e-5, rtol=1e-4), (name, (mine - grad).abs().max())


def enter(batch: dict, **options) -> None:
    with hf_integration.context_parallel(batch, **options):
        pass


def check_errors() -> None:
    batch, model = batches()["plain"], tiny_models.build("llama")
    ids, packed = batch["input_ids"], batches()["packed"]["position_ids"]
    with pytest.raises(ValueError, match="batch must have a multiple of 4 tokens, .* zigzag order"):
        enter({"input_ids": ids[:, :14]})
    enter({"input_ids": ids[:, :14]}, layout="contiguous")
    with pytest.raises(ValueError, match="a multiple of 2 tokens, .* packed documents, got 15"):
        enter({"input_ids": ids[:1, :15], "position_ids": packed[:, :15]})
    with pytest.raises(ValueError, match="batch holds 'pixels', which cannot be distributed"):
        enter(batch | {"pixels": torch.ones(2)})
    with pytest.raises(ValueError, match="labels must have 16 tokens"):
        enter(batch | {"labels": torch.ones(2, 3).long()})
    with pytest.raises(ValueError, match=f"labels must have {len(ids)} rows"):
        enter(batch | {"labels": torch.ones(len(ids) + 1, 16).long()})
    with pytest.raises(TypeError, match="attention_mask must be a Tensor, got list"):
        enter(batch | {"attention_mask": [1] * 16})
    with pytest.raises(TypeError, match="batch must be a mapping of a model's arguments, got list"):
        enter([ids])
    with pytest.raises(ValueError, match="layout must be 'auto', .* got 'stripes'"):
        enter(batch, layout="stripes")
    with pytest.raises(NotImplementedError, match="packed documents in a single row"):
        enter(batch | {"position_ids": packed.repeat(2, 1)})
    with hf_integration.context_parallel(batch) as part:
        with pytest.raises(ValueError, match="must not be entered again"):
            enter(batch)
        with pytest.raises(NotImplementedError, match="does not support output_attentions"):
            model(**part, output_attentions=True)
    assert model(**batch).loss.isfinite()
    refused(tiny_models.build("t5").encoder, {"input_ids": ids}, "does not support position_bias")
    chunked = tiny_models.build("llama4_text")
    for kind in ("padded", "packed"):
        refused(chunked, batches()[kind], "chunked attention without padding and packed documents")


def check_torch_context_parallel() -> None:
    """Inside torch's context_parallel, which accelerate and Trainer enter, a call raises."""
    model, ids = tiny_models.build("llama"), batches()["plain"]["input_ids"]
    shards = {"buffers": [ids], "buffer_seq_dims": [1]}
    refused = pytest.raises(NotImplementedError, match="does not support torch's context_parallel")
    with context_parallel(init_device_mesh("cpu", (WORLD,)), **shards), refused:
        model(input_ids=ids)
    assert model(input_ids=ids).logits.isfinite().all()


def refused(model, batch: dict, match: str) -> None:
    with hf_integration.context_parallel(batch) as part:
        allowed = {n: x for n, x in part.items() if n != "position_ids" or "labels" in batch}
        with pytest.raises(NotImplementedError, match=match):
            model(**allowed)


CHECKS = {f"{m}, {k}": lambda m=m, k=k: check(m, k) for m in MODELS for k in batches()}
CHECKS |= {
    "dropout": lambda: check("llama", "packed", checkpoint=True, dropout=0.3),
    "chunked": lambda: check("llama4_text", "plain"),
    "checkpointed": lambda: check("llama", "padded", checkpoint=True),
    "all-to-all": lambda: check("mistral", "packed", scheme="ulysses", layout="contiguous"),
    "a mesh": lambda: check("llama", "plain", init_device_mesh("cpu", (2,))),
    "errors": check_errors,
    "torch's context_parallel": check_torch_context_parallel,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
