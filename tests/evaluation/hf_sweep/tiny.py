"""Tiny random models of all architectures of transformers, built offline."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCAB = 99
LAST_TEXT_TOKEN = 80  # higher tokens are special, for instance of images
MAX_PARAMETERS = 80_000_000

_NARROW = dict.fromkeys("hidden_size n_embd d_model dim word_embed_proj_dim embedding_size".split())
_NARROW |= dict.fromkeys("embed_dim encoder_hidden_size decoder_hidden_size emb_dim".split())
_NARROW = dict.fromkeys(_NARROW, 64)
_WIDE = "intermediate_size moe_intermediate_size shared_expert_intermediate_size hidden_dim ffn_dim"
_WIDE += " d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size n_inner mlp_dim dim_ff dff d_inner"
_WIDE += " shared_intermediate_size intermediate_size_mlp moe_shared_expert_intermediate_size"
_HEADS = "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads"
_HEADS += " decoder_attention_heads swa_num_attention_heads"
_LAYERS = "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers depth"
_LAYERS += " decoder_layers num_encoder_layers"
# Tiny values for attributes; a config gets those that it has.
SIZES = {
    "vocab_size": VOCAB,
    **_NARROW,
    **dict.fromkeys(_WIDE.split(), 48),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_LAYERS.split(), 2),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_topk": 6,
    "index_n_heads": 16,  # with few, scores are often 0, and equal ones in any order
    "index_head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "projection_dim": 64,
    "out_hidden_size": 64,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_KEPT = {"vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"}
_KEPT |= {*_LAYERS.split(), "image_size", "decoder_start_token_id"}
# For architectures without grouped heads or independent head dimensions.
_PLAIN = {"num_key_value_heads": None, "head_dim": None}
_TYPE_LISTS = ("layer_types", "layers_block_type", "block_types")


def configs(model_type: str, **changes) -> Iterator[PreTrainedConfig]:
    """Configs to try in order, the smallest first; `changes` apply to all parts with the name."""
    config_class = CONFIG_MAPPING[model_type]
    few = {name: size for name, size in SIZES.items() if name in _KEPT}
    for recipe, kinds in itertools.product((SIZES, SIZES | _PLAIN, few), (True, False)):
        try:
            yield _config(config_class, recipe, kinds, changes)
        except Exception:  # configs raise many kinds of errors when they validate themselves
            continue


def _config(config_class: type, recipe: dict, kinds: bool, changes: dict) -> PreTrainedConfig:
    known = config_class()
    values = {}
    for name, size in recipe.items():
        if hasattr(known, name) and isinstance(getattr(known, name), int | type(None)):
            values[name] = size
    values |= _layers(known) if kinds else {}
    if "hidden_size" in recipe:
        values |= _latent(known) | _rope(known)
    values |= {name: value for name, value in changes.items() if hasattr(known, name)}
    for name in getattr(config_class, "sub_configs", None) or ():
        part = getattr(known, name, None)
        if isinstance(part, PreTrainedConfig):
            values[name] = _config(type(part), recipe, kinds, changes)
    config = config_class(**{k: v for k, v in values.items() if v is not None})
    _lower_tokens(config)
    return config


def _layers(known: PreTrainedConfig) -> dict:
    """One layer of each kind, at least two, and the values of these layers in all lists."""
    count = getattr(known, "num_hidden_layers", None)
    lists = {
        name: list(value)
        for name, value in vars(known).items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    named = next((lists[name] for name in _TYPE_LISTS if name in lists), None)
    if named is None:
        indices = {"attn_layer_indices": [1]} if hasattr(known, "attn_layer_indices") else {}
        return indices | {name: value[:2] for name, value in lists.items()}
    chosen = sorted({kind: i for i, kind in reversed(list(enumerate(named)))}.values())
    if len(chosen) == 1:
        chosen = [0, 1]
    return {
        **{name: [value[i] for i in chosen] for name, value in lists.items()},
        "num_hidden_layers": len(chosen),
    }


def _latent(known: PreTrainedConfig) -> dict:
    """Values for latent attention, which has a key head for every query head, partly rotated."""
    if getattr(known, "kv_lora_rank", None) is None:
        return {"num_kv_shared_layers": 0} if hasattr(known, "num_kv_shared_layers") else {}
    heads = {name: 4 for name in ("num_key_value_heads",) if hasattr(known, name)}
    return heads | {name: 8 for name in ("head_dim",) if hasattr(known, name)}


def _rope(known: PreTrainedConfig) -> dict:
    """Rotary sections for images, if the modeling code splits them, for head dimension 16."""
    rope = getattr(known, "rope_parameters", None)
    modeling = type(known).__module__.replace(".configuration_", ".modeling_")
    try:
        source = inspect.getsource(sys.modules.get(modeling) or importlib.import_module(modeling))
    except ImportError:
        return {}
    if "mrope_section" not in source or not hasattr(known, "rope_parameters"):
        return {}
    rope = dict(rope or {"rope_type": "default", "rope_theta": 10000.0})
    rotated = int(16 * rope.get("partial_rotary_factor", 1.0)) // 2
    return {
        "rope_parameters": rope
        | {"mrope_section": [rotated - rotated // 4 * 2, *[rotated // 4] * 2]}
    }


def _lower_tokens(config: PreTrainedConfig) -> None:
    """Move special tokens beyond the vocabulary to different tokens above those of text."""
    free = iter(range(VOCAB - 1, LAST_TEXT_TOKEN, -1))
    for name, value in list(vars(config).items()):
        is_token = name.endswith(("_token_id", "_token_index", "_token_idx"))
        if is_token and isinstance(value, int) and value >= LAST_TEXT_TOKEN:
            setattr(config, name, next(free))
        elif is_token and isinstance(value, list | tuple) and max(value, default=0) >= VOCAB:
            setattr(config, name, 2)


_MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_MAPPING",
)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The most specific model class for a config: a language model if there is one.

    Raises LookupError if there is no class for it.
    """
    for name in _MAPPINGS:
        mapping = getattr(modeling_auto, name, {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    module_name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = importlib.import_module(module_name)
    for value in vars(module).values():
        if (
            inspect.isclass(value)
            and issubclass(value, PreTrainedModel)
            and getattr(value, "config_class", None) is type(config)
            and not value.__name__.endswith("PreTrainedModel")
        ):
            return value
    raise LookupError(f"no model class for {type(config).__name__}")


def build(config: PreTrainedConfig, implementation: str, seed: int = 0) -> PreTrainedModel:
    """A model in eval mode whose weights depend only on the seed, their names and their shapes.

    Raises MemoryError for a model of more than `MAX_PARAMETERS`.
    """
    chosen = model_class(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in chosen._from_config(_copy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise MemoryError(f"{size} parameters, even from a tiny config")
    torch.manual_seed(seed)
    model = chosen._from_config(_copy(config), attn_implementation=implementation)
    fill(model, seed)
    return model.float().eval()


def _copy(config: PreTrainedConfig) -> PreTrainedConfig:
    return type(config).from_dict(config.to_dict())


def fill(model: nn.Module, seed: int = 0) -> None:
    """Fill in weights large enough that attention is not uniform, and that sinks matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel()
                parameter.normal_(0, 1.5 * fan_in**-0.5, generator=generator)
            elif "sink" in name:
                parameter.normal_(0, 1, generator=generator)
            elif not torch.isfinite(parameter).all():
                parameter.normal_(0, 0.1, generator=generator)
