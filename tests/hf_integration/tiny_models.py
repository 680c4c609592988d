"""Tiny models of the sweep, with config values that make the features of families matter."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

import hf_integration
from tests.evaluation.hf_sweep import inputs, tiny

assert hf_integration.NAME  # the import registers the implementation

VOCAB = tiny.VOCAB
WINDOWED = {"sliding_window": 5}
# Families, with values that differ from those of the sweep.
CAUSAL = {
    "llama": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mistral": WINDOWED,
    "mixtral": WINDOWED,
    "gemma": {"num_key_value_heads": 1},
    "gemma2": WINDOWED | {"attn_logit_softcapping": 2.0},
    "gemma3_text": WINDOWED,
    "gpt_oss": WINDOWED,
    "phi": {},
    "phi3": WINDOWED,
    "glm": {},
    "glm4": {},
    "cohere2": WINDOWED,
    "llama4_text": {"attention_chunk_size": 5},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "starcoder2": WINDOWED,
}
ENCODERS = {"bert": {}, "roberta": {}, "electra": {}, "modernbert": {"local_attention": 4}}
SEQ2SEQ = ("t5", "mt5", "bart")
VISION = ("vit", "dinov2", "siglip_vision_model", "clip_vision_model")


def config(model_type: str, **changes):
    """A tiny config of an architecture."""
    family = (CAUSAL | ENCODERS).get(model_type, {})
    return next(tiny.configs(model_type, **family | changes))


def build(model_type: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A model in eval mode with attn_implementation="fa_ops"."""
    model = tiny.build(config(model_type, **changes), "fa_ops", seed)
    if model_type in SEQ2SEQ:
        model.generation_config.decoder_start_token_id = 1
    return model


def switch(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation, even if this transformers release would only warn."""
    model.set_attn_implementation(implementation)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation_internal = implementation


def tokens(B: int = 2, S: int = 12, seed: int = 0) -> torch.Tensor:
    return inputs.tokens(S, seed, B)


def padding(S: int = 12, side: str = "left") -> torch.Tensor:
    return inputs.padding(side, S)
