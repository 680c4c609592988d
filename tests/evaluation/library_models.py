"""Small models of libraries of attention, with random weights, without dropout and with the
attention that each library writes out by hand; inputs are random too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]
BATCH, TOKENS = 2, 12
_DROPOUTS = ("Dropout", "DropPath", "StochasticDepth")


def models(library: str) -> dict[str, Callable[[], Built]]:
    """The models of a library by name. Raises ImportError if it is not installed."""
    return LIBRARIES[library]()


def _built(model: nn.Module, *inputs: Any, **named: Any) -> Built:
    """The model without dropout, and its inputs by name."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout"):
            is_rate = isinstance(getattr(module, name, None), float)
            if is_rate and (name == "dropout" or type(module).__name__ in _DROPOUTS):
                setattr(module, name, 0.0)
    return model, dict(zip(inspect.signature(model.forward).parameters, inputs)) | named


def _image(size: int, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def _tokens(below: int = 100, length: int = TOKENS) -> Tensor:
    return torch.randint(1, below, (BATCH, length))


def _lengths(length: int = TOKENS) -> Tensor:
    """A bool mask of the tokens; the first text is shorter."""
    return torch.arange(length) < torch.tensor([[length - 4], [length]])


_TIMM = """
    beit_base_patch16_224 cait_xxs24_224 coatnet_nano_rw_224 convit_tiny levit_128s mobilevit_xxs
    mvitv2_tiny pvt_v2_b0 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tnt_s_patch16_224
    twins_svt_small vit_relpos_small_patch16_224 vit_tiny_patch16_224 xcit_nano_12_p16_224
""".split()


def _timm() -> dict[str, Callable[[], Built]]:
    import timm

    def build(name: str) -> Built:
        timm.layers.set_fused_attn(False)
        model = timm.create_model(name, num_classes=10)
        return _built(model, _image(model.default_cfg["input_size"][-1]))

    return {name: functools.partial(build, name) for name in _TIMM}


_DECODERS = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "relative positions": {"rel_pos_bias": True},
    "one key head": {"attn_one_kv_head": True},
    "normalised": {"attn_qk_norm": True},
    "softcap": {"attn_softclamp_logits": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "memory": {"attn_num_mem_kv": 4},
    "sparse top k": {"attn_sparse_topk": 4},
    "window": {"attn_max_attend_past": 4},
    "learned sink": {"attn_head_learned_sink": True},
}


def _x_transformers() -> dict[str, Callable[[], Built]]:
    from x_transformers import Decoder, Encoder, TransformerWrapper, ViTransformerWrapper

    def text(layers: type, options: dict) -> Built:
        attention = layers(dim=32, depth=1, heads=4, attn_dim_head=8, **options)
        model = TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=attention)
        return _built(model, _tokens(), mask=_lengths())

    def cross(options: dict) -> Built:
        attention = Decoder(dim=32, depth=1, heads=4, attn_dim_head=8, cross_attend=True, **options)
        model = TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=attention)
        return _built(model, _tokens(), context=torch.randn(BATCH, 9, 32))

    def image() -> Built:
        attention = Encoder(dim=32, depth=1, heads=4, attn_dim_head=8)
        model = ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=10, attn_layers=attention
        )
        return _built(model, _image(32))

    found = {f"decoder, {n}": functools.partial(text, Decoder, o) for n, o in _DECODERS.items()}
    for name in ("plain", "memory"):
        found[f"encoder, {name}"] = functools.partial(text, Encoder, _DECODERS[name])
    for name in ("plain",):
        found[f"cross attention, {name}"] = functools.partial(cross, _DECODERS[name])
    return found | {"vision": image}


_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 1, "heads": 4}
_VIT |= {"mlp_dim": 64}
_SIMPLE = """
    simple_vit.SimpleViT simple_vit_with_qk_norm.SimpleViT vit.ViT deepvit.DeepViT
    parallel_vit.ViT vit_for_small_dataset.ViT learnable_memory_vit.ViT
""".split()
_OTHERS = {
    "cait.CaiT": {**_VIT, "cls_depth": 2},
    "pit.PiT": {**_VIT, "image_size": 64, "depth": (1, 1)},
    "cvt.CvT": {"num_classes": 10},
    "max_vit.MaxViT": {"num_classes": 10, "dim_conv_stem": 16, "dim": 16, "dim_head": 8,
                       "depth": (1, 1), "window_size": 7},
    "regionvit.RegionViT": {"dim": (16, 32, 64, 64), "depth": (1, 1, 1, 1), "window_size": 7,
                            "num_classes": 10},
    "cct.CCT": {"img_size": (32, 32), "embedding_dim": 32, "n_conv_layers": 1, "num_layers": 2,
                "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 10,
                "positional_embedding": "learnable"},
    "rvt.RvT": {**_VIT},
}  # fmt: skip
_SIZES = {"max_vit.MaxViT": 112, "regionvit.RegionViT": 224, "cvt.CvT": 64}


def _vit_pytorch() -> dict[str, Callable[[], Built]]:
    importlib.import_module("vit_pytorch")

    def build(name: str, options: dict) -> Built:
        module, made = name.split(".")
        made = getattr(importlib.import_module(f"vit_pytorch.{module}"), made)
        size = _SIZES.get(name, options.get("image_size", options.get("img_size", 32)))
        model = made(**options)
        return _built(model, _image(size if isinstance(size, int) else size[0]))

    listed = dict.fromkeys(_SIMPLE, _VIT) | _OTHERS
    return {name: functools.partial(build, name, options) for name, options in listed.items()}


def _torchvision() -> dict[str, Callable[[], Built]]:
    import torchvision

    def build(name: str) -> Built:
        if name == "vit":
            model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)
            return _built(model, _image(32))
        if name == "maxvit":
            model = torchvision.models.MaxVit(
                (64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=10
            )
            return _built(model, _image(64))
        version = torchvision.models.swin_transformer
        block, merge = {
            "swin": (version.SwinTransformerBlock, version.PatchMerging),
            "swin_v2": (version.SwinTransformerBlockV2, version.PatchMergingV2),
        }[name]
        model = torchvision.models.SwinTransformer(
            [4, 4], 16, [2, 2], [2, 4], [4, 4], block=block, downsample_layer=merge,
            stochastic_depth_prob=0.0, num_classes=10,
        )  # fmt: skip
        return _built(model, _image(64))

    return {name: functools.partial(build, name) for name in ("vit", "maxvit", "swin", "swin_v2")}


def _open_clip() -> dict[str, Callable[[], Built]]:
    import open_clip

    def build(name: str) -> Built:
        vision = {"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32}
        text = {"context_length": TOKENS, "vocab_size": 100, "width": 64, "heads": 4, "layers": 2}
        if name == "attention pooling":
            vision |= {"attentional_pool": True, "attn_pooler_heads": 4}
        if name == "resnet":
            vision = {"layers": [1, 1, 1, 1], "width": 16, "patch_size": None, "image_size": 64}
        model = open_clip.CLIP(64, vision, text)
        return _built(model, _image(vision["image_size"]), _tokens())

    return {n: functools.partial(build, n) for n in ("vit", "attention pooling", "resnet")}


def _diffusers() -> dict[str, Callable[[], Built]]:
    import diffusers
    from diffusers.models.attention_processor import AttnProcessor

    step = torch.tensor([3, 7])
    blocks = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
    crossing = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "attention_head_dim": 4,
    }
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}

    def plain(made: type, options: dict, *inputs: Any, **named: Any) -> Built:
        model = made(**options)
        for module in model.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(AttnProcessor())
        return _built(model, *inputs, **named, return_dict=False)

    text = torch.randn(BATCH, 7, 24)
    return {
        "UNet2DConditionModel": lambda: plain(
            diffusers.UNet2DConditionModel, {"sample_size": 8, **blocks, **crossing},
            _image(8, 4), step, text,
        ),
        "UNet2DConditionModel, padded": lambda: plain(
            diffusers.UNet2DConditionModel, {"sample_size": 8, **blocks, **crossing},
            _image(8, 4), step, text, encoder_attention_mask=_lengths(7).float(),
        ),
        "UNet2DModel": lambda: plain(
            diffusers.UNet2DModel,
            {"sample_size": 8, "attention_head_dim": 4, **blocks,
             "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
             "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
            _image(8), step,
        ),
        "AutoencoderKL": lambda: plain(
            diffusers.AutoencoderKL,
            {"sample_size": 16, **blocks, "down_block_types": ("DownEncoderBlock2D",) * 2,
             "up_block_types": ("UpDecoderBlock2D",) * 2},
            _image(16),
        ),
        "PixArtTransformer2DModel": lambda: plain(
            diffusers.PixArtTransformer2DModel,
            {**heads, "sample_size": 8, "in_channels": 4, "out_channels": 4, "caption_channels": 24,
             "cross_attention_dim": 16, "norm_num_groups": 4, "use_additional_conditions": False},
            _image(8, 4), text, step, {"resolution": None, "aspect_ratio": None},
            encoder_attention_mask=_lengths(7).float(),
        ),
        "DiTTransformer2DModel": lambda: plain(
            diffusers.DiTTransformer2DModel,
            {**heads, "in_channels": 4, "sample_size": 8, "norm_num_groups": 4},
            _image(8, 4), step, torch.tensor([1, 2]),
        ),
        "PriorTransformer": lambda: plain(
            diffusers.PriorTransformer,
            {**heads, "embedding_dim": 16, "num_embeddings": 7, "additional_embeddings": 4},
            torch.randn(BATCH, 16), step, torch.randn(BATCH, 16), torch.randn(BATCH, 7, 16),
            attention_mask=_lengths(7),
        ),
    }  # fmt: skip


LIBRARIES: dict[str, Callable[[], dict[str, Callable[[], Built]]]] = {
    "timm": _timm,
    "x-transformers": _x_transformers,
    "vit-pytorch": _vit_pytorch,
    "torchvision": _torchvision,
    "open_clip": _open_clip,
    "diffusers": _diffusers,
}
