"""Tiny random diffusers models, and inputs whose masks and lengths matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import diffusers
import torch
from torch import Tensor, nn


class Tiny(NamedTuple):
    """A model class with its config, and a function that makes the model's arguments."""

    kind: str
    config: dict
    inputs: Callable[[], dict]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return getattr(diffusers, self.kind)(**self.config).eval()


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def steps(batch: int = 2) -> Tensor:
    return torch.tensor([7.0, 3.0][:batch])


def padding(*lengths: int, size: int) -> Tensor:
    """A mask (B, size) that keeps the first tokens of each row."""
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def flux() -> dict:
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": randn(2, 16, 4),
        "encoder_hidden_states": randn(2, 6, 32),
        "pooled_projections": randn(2, 32),
        "timestep": steps(),
        "img_ids": ids,
        "txt_ids": torch.zeros(6, 3),
    }


def qwen_image() -> dict:
    return {
        "hidden_states": randn(2, 16, 16),
        "encoder_hidden_states": randn(2, 8, 16),
        "encoder_hidden_states_mask": padding(4, 8, size=8),
        "timestep": steps(),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


def wan() -> dict:
    return {
        "hidden_states": randn(1, 4, 2, 8, 8),
        "timestep": steps(1),
        "encoder_hidden_states": randn(1, 6, 16),
    }


def sd3() -> dict:
    return {
        "hidden_states": randn(2, 4, 8, 8),
        "encoder_hidden_states": randn(2, 6, 32),
        "pooled_projections": randn(2, 64),
        "timestep": steps(),
    }


def sdxl() -> dict:
    return {
        "sample": randn(2, 4, 8, 8),
        "timestep": steps(),
        "encoder_hidden_states": randn(2, 5, 32),
        "encoder_attention_mask": padding(3, 5, size=5),
        "added_cond_kwargs": {"text_embeds": randn(2, 32), "time_ids": torch.ones(2, 6)},
    }


def z_image() -> dict:
    return {
        "x": [randn(4, 1, 16, 16), randn(4, 1, 8, 8)],
        "t": steps() / 10,
        "cap_feats": [randn(5, 16), randn(9, 16)],
    }


def hunyuan_video() -> dict:
    return {
        "hidden_states": randn(2, 4, 2, 8, 8),
        "timestep": steps(),
        "encoder_hidden_states": randn(2, 6, 16),
        "encoder_attention_mask": padding(4, 6, size=6),
        "pooled_projections": randn(2, 8),
        "guidance": torch.tensor([6.0, 2.0]),
    }


def cogvideox() -> dict:
    return {
        "hidden_states": randn(2, 3, 4, 8, 8),
        "encoder_hidden_states": randn(2, 6, 8),
        "timestep": steps(),
    }


TINY = {
    "flux": Tiny(
        "FluxTransformer2DModel",
        {
            "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
            "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8],
        },
        flux,
    ),
    "qwen_image": Tiny(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16,
            "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
        },
        qwen_image,
    ),
    "wan": Tiny(
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12,
            "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32,
            "num_layers": 2, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        wan,
    ),
    "sd3": Tiny(
        "SD3Transformer2DModel",
        {
            "sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 2,
            "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32,
            "joint_attention_dim": 32, "pooled_projection_dim": 64, "out_channels": 4,
            "qk_norm": "rms_norm", "dual_attention_layers": (0,), "pos_embed_max_size": 96,
        },
        sd3,
    ),
    "sdxl": Tiny(
        "UNet2DConditionModel",
        {
            "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8,
            "in_channels": 4, "out_channels": 4, "norm_num_groups": 16,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": (2, 4), "use_linear_projection": True,
            "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "transformer_layers_per_block": (1, 2),
            "projection_class_embeddings_input_dim": 80, "cross_attention_dim": 32,
        },
        sdxl,
    ),
    "z_image": Tiny(
        "ZImageTransformer2DModel",
        {
            "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 32,
            "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32],
        },
        z_image,
    ),
    "hunyuan_video": Tiny(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10,
            "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1,
            "patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 16,
            "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4),
        },
        hunyuan_video,
    ),
    "cogvideox": Tiny(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
            "time_embed_dim": 2, "text_embed_dim": 8, "num_layers": 2, "sample_width": 8,
            "sample_height": 8, "sample_frames": 9, "patch_size": 2, "max_text_seq_length": 6,
            "temporal_compression_ratio": 4, "use_rotary_positional_embeddings": False,
        },
        cogvideox,
    ),
}  # fmt: skip


def run(model: nn.Module, inputs: dict) -> Tensor:
    """The output of a model, flat."""
    found = model(**inputs, return_dict=False)[0]
    return torch.cat([x.flatten() for x in found]) if isinstance(found, list) else found.flatten()
