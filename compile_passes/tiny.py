"""Tiny transformers models of any architecture, and inputs that they run on, for the sweep."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 99
LENGTH = 12
IMAGE = 32
MELS = 8
# Every size that a config may name. Attention is 4 heads of 8 wide, two of them sharing a key.
SIZES = {
    **dict.fromkeys("vocab_size text_vocab_size".split(), VOCAB),
    **dict.fromkeys(
        "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim embedding_size "
        "projection_dim encoder_hidden_size decoder_hidden_size d_embed emb_dim".split(),
        32,
    ),
    **dict.fromkeys(
        "intermediate_size intermediate_size_mlp hidden_dim ffn_dim d_ff encoder_ffn_dim "
        "decoder_ffn_dim n_inner d_inner ffn_hidden_size".split(),
        48,
    ),
    **dict.fromkeys(
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size".split(), 24
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers "
        "decoder_layers num_encoder_layers depth num_hidden_groups num_layers_per_stack".split(),
        2,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts".split(),
        4,
    ),
    **dict.fromkeys("num_key_value_heads num_kv_heads num_experts_per_tok top_k".split(), 2),
    **dict.fromkeys("head_dim d_kv attention_head_dim kv_channels".split(), 8),
    **dict.fromkeys("q_lora_rank kv_lora_rank".split(), 16),
    **dict.fromkeys("qk_nope_head_dim qk_rope_head_dim v_head_dim".split(), 8),
    **dict.fromkeys("n_group topk_group first_k_dense_replace".split(), 1),
    "rotary_dim": 4,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "sliding_window": 5,
    "attention_window": 4,
    "local_attention": 4,
    "attention_chunk_size": 5,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_mel_bins": MELS,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Where these sizes do not go together.
OVERRIDES: dict[str, dict] = {
    "swin": {"patch_size": 4, "window_size": 4, "embed_dim": 16},
    "swinv2": {"patch_size": 4, "window_size": 4, "embed_dim": 16},
    "donut-swin": {"patch_size": 4, "window_size": 4, "embed_dim": 16},
    "maskformer-swin": {"patch_size": 4, "window_size": 4, "embed_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4, "hidden_size": 32},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_bigcode": {"multi_query": True},
    "layoutlmv2": {"image_feature_pool_shape": [2, 2, 256]},
    "deberta": {"relative_attention": True, "pos_att_type": "c2p|p2c"},
    "deberta-v2": {"relative_attention": True, "pos_att_type": "c2p|p2c"},
    "mllama_text_model": {"cross_attention_layers": []},
    "xlnet": {"d_head": 8},
    # its last stage would see one patch, and a softmax over one key is no attention
    "mobilevit": {"image_size": 128, "patch_size": 2},
    "funnel": {"block_sizes": [1, 1], "d_head": 8, "n_head": 4},
}
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "attention_layers", "layers_block_type")
# Dropout of one kind or another.
_DROPOUTS = (
    *("dropout", "pdrop", "drop_rate", "drop_path", "layerdrop"),
    *("mask_time_prob", "mask_feature_prob"),
)
_STAGES = ("out_features", "out_indices", "stage_names")  # derived from the depths


def config(model_type: str) -> Any:
    """A config of the architecture, small everywhere, without dropout."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[model_type]()
    settings = _shrunk(known.to_dict())
    settings |= OVERRIDES.get(model_type, {})
    for name in ("model_type", "transformers_version", "architectures", "auto_map"):
        settings.pop(name, None)
    return CONFIG_MAPPING[model_type].from_dict(settings)


def _shrunk(settings: dict) -> dict:
    result = {}
    for name, value in settings.items():
        if name in _STAGES:
            continue
        if isinstance(value, dict) and "rope" not in name and name != "id2label":
            value = _shrunk(value)
        elif name in _LAYER_LISTS and isinstance(value, list) and len(value) > 2:
            value = [value[0], value[-1]]
        elif name in ("depths", "num_heads") and isinstance(value, list):
            value = [1, 1] if name == "depths" else [2, 4]
        elif name in SIZES and isinstance(value, (int, type(None))) and value is not True:
            keep = value is None and name in ("sliding_window", "q_lora_rank", "head_dim")
            value = value if keep else SIZES[name]
        elif name in SIZES and isinstance(value, list) and name in ("image_size", "patch_size"):
            value = [SIZES[name]] * len(value)
        elif isinstance(value, float) and any(word in name for word in _DROPOUTS):
            value = 0.0
        elif name == "use_cache":
            value = False
        result[name] = value
    return result


def build(model_type: str) -> nn.Module:
    """The base model, or the causal one, with random weights large enough that attention
    matters.
    """
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto import modeling_auto

    small = config(model_type)
    causal = model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if causal else AutoModel
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(small).parameters())
    if size > 2e7:
        raise ValueError(f"the tiny config still has {size / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = auto.from_config(small, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            elif "sinks" in name:
                parameter.normal_(0, 1, generator=generator)
    return model


def inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments that the model may run on, likely ones first. Texts are padded, one of
    them on the left.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    channels = getattr(model.config, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    size = OVERRIDES.get(model.config.model_type, {}).get("image_size", IMAGE)
    images = {"pixel_values": torch.randn(2, channels, size, size, generator=generator)}
    later = {"decoder_input_ids": ids[:, :7]}
    features = {"input_features": torch.randn(2, MELS, 32, generator=generator)}
    frames = {"input_features": torch.randn(2, 32, MELS, generator=generator)}
    wave = {"input_values": torch.randn(2, 2000, generator=generator)}
    spectrum = {"input_values": torch.randn(2, 32, MELS, generator=generator)}
    boxes = {"bbox": torch.zeros(2, LENGTH, 4, dtype=torch.long)}
    accepted = inspect.signature(model.forward).parameters
    tries = [
        text, text | later, text | images, images, features, frames, features | later,
        frames | later, wave, spectrum, text | boxes, {"input_ids": ids}, images | later,
        wave | later,
    ]  # fmt: skip
    for one in tries:
        if set(one) <= set(accepted):
            yield one
