"""Tiny random diffusers pipelines. Embeddings of prompts take the place of text encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import diffusers
import numpy as np
import torch
from tiny_diffusers import TINY, padding, randn

Arguments = dict[str, object]


class TinyPipeline(NamedTuple):
    """A pipeline class with its scheduler, VAE and config, and what makes a call's arguments."""

    kind: str
    scheduler: str
    vae: tuple[str, Arguments]
    arguments: Callable[[], Arguments]
    options: Arguments = {}  # of the pipeline

    def build(self, model: str) -> diffusers.DiffusionPipeline:
        """The pipeline of one of the models in tiny_diffusers."""
        kind = getattr(diffusers, self.kind)
        denoiser = TINY[model].build()
        torch.manual_seed(0)
        vae = getattr(diffusers, self.vae[0])(**self.vae[1]).eval()
        scheduler = getattr(diffusers, self.scheduler)()
        parts = {"vae": vae, "scheduler": scheduler, denoiser_name(model): denoiser}
        given = dict.fromkeys(required(kind)) | self.options | parts
        pipeline = kind(**given)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def required(kind: type) -> list[str]:
    """The components that a pipeline class wants, None of which but three are needed."""
    expected, _ = kind._get_signature_keys(kind)
    return sorted(expected)


def denoiser_name(model: str) -> str:
    """What a pipeline calls its model."""
    return "unet" if model == "sdxl" else "transformer"


def image(pipeline: diffusers.DiffusionPipeline, arguments: Arguments) -> np.ndarray:
    """The image or video of a call with two steps."""
    generator = torch.Generator().manual_seed(5)
    call = {"num_inference_steps": 2, "output_type": "np"} | arguments
    return np.asarray(pipeline(generator=generator, **call)[0])


def kl(channels: int, **options: object) -> tuple[str, Arguments]:
    """A VAE of images with two resolutions, and attention in the middle."""
    blocks = {
        "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
        "block_out_channels": [8, 16], "norm_num_groups": 4, "latent_channels": channels,
        "layers_per_block": 1, "sample_size": 32,
    }  # fmt: skip
    return "AutoencoderKL", blocks | options


def embeds(tokens: int, features: int, pooled: int = 0, **options: object) -> Arguments:
    """Embeddings of a prompt and of its negative."""
    found = {"prompt_embeds": randn(1, tokens, features)}
    if pooled:
        found["pooled_prompt_embeds"] = randn(1, pooled)
    return found | {f"negative_{name}": -x for name, x in found.items()} | options


PIPELINES = {
    "flux": TinyPipeline(
        "FluxPipeline", "FlowMatchEulerDiscreteScheduler",
        kl(1, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        lambda: embeds(6, 32, 32, height=16, width=16, true_cfg_scale=2.0),
    ),
    "qwen_image": TinyPipeline(
        "QwenImagePipeline", "FlowMatchEulerDiscreteScheduler",
        (
            "AutoencoderKLQwenImage",
            {
                "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4], "num_res_blocks": 1,
                "temperal_downsample": [False, True], "latents_mean": [0.0] * 4,
                "latents_std": [1.0] * 4,
            },
        ),
        lambda: embeds(
            8, 16, height=32, width=32, true_cfg_scale=2.0, prompt_embeds_mask=padding(6, size=8),
            negative_prompt_embeds_mask=padding(3, size=8),
        ),
    ),
    "wan": TinyPipeline(
        "WanPipeline", "FlowMatchEulerDiscreteScheduler",
        (
            "AutoencoderKLWan",
            {
                "base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
                "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 4,
                "latents_std": [1.0] * 4,
            },
        ),
        lambda: embeds(6, 16, height=16, width=16, num_frames=5),
    ),
    "sd3": TinyPipeline(
        "StableDiffusion3Pipeline", "FlowMatchEulerDiscreteScheduler", kl(4, shift_factor=0.06),
        lambda: embeds(6, 32, 64, height=16, width=16),
    ),
    "sdxl": TinyPipeline(
        "StableDiffusionXLPipeline", "EulerDiscreteScheduler", kl(4),
        lambda: embeds(5, 32, 32, height=16, width=16),
        {"add_watermarker": False},
    ),
    "z_image": TinyPipeline(
        "ZImagePipeline", "FlowMatchEulerDiscreteScheduler", kl(4, shift_factor=0.06),
        lambda: {
            "prompt_embeds": [randn(5, 16)], "negative_prompt_embeds": [randn(9, 16)],
            "height": 32, "width": 32,
        },
    ),
    "hunyuan_video": TinyPipeline(
        "HunyuanVideoPipeline", "FlowMatchEulerDiscreteScheduler",
        (
            "AutoencoderKLHunyuanVideo",
            {
                "latent_channels": 4, "down_block_types": ["HunyuanVideoDownBlock3D"] * 4,
                "up_block_types": ["HunyuanVideoUpBlock3D"] * 4, "block_out_channels": [8] * 4,
                "layers_per_block": 1, "norm_num_groups": 4, "mid_block_add_attention": True,
            },
        ),
        lambda: embeds(
            6, 16, 8, height=16, width=16, num_frames=5, true_cfg_scale=2.0,
            prompt_attention_mask=padding(4, size=6),
            negative_prompt_attention_mask=padding(2, size=6),
        ),
    ),
    "cogvideox": TinyPipeline(
        "CogVideoXPipeline", "CogVideoXDDIMScheduler",
        (
            "AutoencoderKLCogVideoX",
            {
                "latent_channels": 4, "down_block_types": ["CogVideoXDownBlock3D"] * 4,
                "up_block_types": ["CogVideoXUpBlock3D"] * 4, "block_out_channels": [8] * 4,
                "layers_per_block": 1, "norm_num_groups": 2,
            },
        ),
        lambda: embeds(6, 8, height=64, width=64, num_frames=9),
    ),
}  # fmt: skip
