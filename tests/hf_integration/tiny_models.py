"""Tiny models of many architectures, with weights large enough that attention matters."""

from __future__ import annotations

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

import hf_integration

assert hf_integration.NAME  # the import registers the implementation

VOCAB = 99
# Every size that a config may name; a config takes those it has.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "hidden_dim": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "d_kv": 8,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "image_size": 16,
    "patch_size": 4,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {"sliding_window": 5}
# What differs from the sizes above, and which tests a family takes part in beyond the common ones.
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
    "gemma3_text": WINDOWED | {"sliding_window_pattern": 2},
    "gpt_oss": WINDOWED,
    "phi": {},
    "phi3": WINDOWED | {"pad_token_id": 0},
    "glm": {},
    "glm4": {},
    "cohere2": WINDOWED,
    "llama4_text": {"attention_chunk_size": 5, "intermediate_size_mlp": 48},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "starcoder2": WINDOWED,
}
ENCODERS = {"bert": {}, "roberta": {}, "electra": {}, "modernbert": {"local_attention": 4}}
SEQ2SEQ = {name: {"decoder_start_token_id": 1} for name in ("t5", "mt5", "bart")}
VISION = {"vit": {}, "dinov2": {}, "siglip_vision_model": {}, "clip_vision_model": {}}


def config(model_type: str, **changes):
    """A tiny config of an architecture."""
    known = CONFIG_MAPPING[model_type]()
    sizes = {name: size for name, size in SIZES.items() if hasattr(known, name)}
    return CONFIG_MAPPING[model_type](**sizes | changes)


def build(model_type: str, auto=None, seed: int = 0, **changes):
    """A model in eval mode with attn_implementation="fa_ops" and random weights of variance one."""
    family = CAUSAL.get(model_type) or ENCODERS.get(model_type) or SEQ2SEQ.get(model_type) or {}
    if auto is None:
        auto = AutoModelForCausalLM if model_type in CAUSAL else AutoModel
        auto = AutoModelForSeq2SeqLM if model_type in SEQ2SEQ else auto
        auto = AutoModelForSpeechSeq2Seq if model_type == "whisper" else auto
    model = auto.from_config(config(model_type, **family | changes), attn_implementation="fa_ops")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                fan_in = parameter.shape[-1]
                parameter.normal_(0, 2 * fan_in**-0.5, generator=generator)
            elif "sinks" in name:
                parameter.normal_(0, 1, generator=generator)
    return model.eval()


def switch(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation, also where this transformers release only warns."""
    model.set_attn_implementation(implementation)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation_internal = implementation


def tokens(B: int = 2, S: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (B, S), generator=torch.Generator().manual_seed(seed))


def padding(B: int = 2, S: int = 12, side: str = "left") -> torch.Tensor:
    mask = torch.ones((B, S), dtype=torch.long)
    mask[0, :4] = 0
    return mask if side == "left" else mask.flip(-1)
