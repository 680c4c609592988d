"""Inputs for a model of any architecture, by the names of the parameters of its forward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.evaluation.hf_sweep.tiny import LAST_TEXT_TOKEN

B, S, S_DECODER = 2, 12, 7


def names(model: PreTrainedModel) -> set[str]:
    """The names of the parameters of forward."""
    return set(inspect.signature(model.forward).parameters)


def tokens(length: int = S, seed: int = 0, rows: int = B) -> Tensor:
    """Random text tokens (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, LAST_TEXT_TOKEN, (rows, length), generator=generator)


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padding(side: str, length: int = S) -> Tensor:
    """A padding mask (B, length) that excludes four tokens of a row."""
    mask = torch.ones((B, length), dtype=torch.long)
    mask[0, :4] = 0
    return mask if side == "left" else mask.flip(-1)


def is_text(model: PreTrainedModel) -> bool:
    """Whether the model runs on tokens alone."""
    return "input_ids" in names(model) and not _wants_images(model) and not _audio(names(model))


def candidates(model: PreTrainedModel) -> Iterator[dict]:
    """Keyword arguments of a forward pass to try in order, the simplest first."""
    images = _wants_images(model)
    yield from _candidates(model, images)
    if not images and names(model) & {"pixel_values", "pixel_values_videos"}:
        yield from _candidates(model, True)


def _candidates(model: PreTrainedModel, images: bool) -> Iterator[dict]:
    known, config = names(model), model.config
    base: dict = {}
    if "input_ids" in known:
        base["input_ids"] = tokens()
    if "decoder_input_ids" in known and getattr(config, "is_encoder_decoder", True):
        base["decoder_input_ids"] = tokens(S_DECODER, seed=1)
    if "grid_thw" in known:
        first = next(n for n in ("hidden_states", "pixel_values") if n in known)
        yield from _grids(config, first)
    choices = [[{}]]
    if images:
        shapes = itertools.product(_sizes(config), _channels(config))
        choices.append([{"pixel_values": noise(B, c, n, n)} for n, c in shapes])
        videos = [{"pixel_values_videos": noise(B, 4, 3, 32, 32)}]
        choices[-1] += videos if "pixel_values_videos" in known else []
        choices[-1] += [{"pixel_values": noise(B, 4, 3, n, n)} for n in _sizes(config)]
    for name in _audio(known):
        mel, length = _mel(config), 2 * (_find(config, "max_source_positions") or 12)
        shapes = [(B, mel, length), (B, 48, mel), (B, 1, 48, mel), (B, mel, 3000), (B, 128, 128)]
        if name in ("input_values", "waveform", "audio_values"):
            shapes = [(B, 3200), (B, 1, 3200), (B, 24, mel), (B, 1, 64, 64)]
        choices.append([{name: noise(*shape)} for shape in shapes])
    for name in known & {"past_values", "inputs_embeds"}:
        if "input_ids" not in known and len(choices) == 1:
            width = _find(config, "hidden_size") or 64
            choices.append([{name: noise(B, S, width)}, {name: noise(B, 64)}])
    for choice in itertools.product(*choices):
        yield base | {name: value for part in choice for name, value in part.items()}
    if not any(len(choice) > 1 or choice[0] for choice in choices) and not base:
        yield {}
    for name in known & {"hidden_states", "inputs_embeds"}:
        yield base | {name: noise(B, S, _find(config, "hidden_size") or 64)}


def _audio(known: set[str]) -> list[str]:
    audio = ("input_features", "input_values", "waveform", "audio_values")
    return [name for name in audio if name in known][:1]


def _wants_images(model: PreTrainedModel) -> bool:
    """Whether a model needs images; models that generate text from images accept text alone."""
    text = [
        getattr(modeling_auto, name, {})
        for name in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")
    ]
    known = names(model)
    if "input_ids" in known and any(type(model.config) in mapping for mapping in text):
        return False
    return bool(known & {"pixel_values", "pixel_values_videos"})


def _grids(config, name: str) -> Iterator[dict]:
    """Two images of different sizes as patches, for towers with packed images."""
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    channels = _find(config, "in_channels") or _find(config, "num_channels") or 3
    patch = _find(config, "patch_size") or 14
    for frames in (_find(config, "temporal_patch_size") or 1, 1, 2):
        yield {name: noise(48, channels * frames * patch**2), "grid_thw": grid}
    yield {name: noise(48, channels, patch, patch), "grid_thw": grid}
    yield {name: noise(48, _find(config, "hidden_size") or 64), "grid_thw": grid}


def _find(config, name: str):
    """The int attribute of that name in a config or one of its parts, or None."""
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ()))]
    values = (getattr(part, name, None) for part in parts if part is not None)
    return next((v for v in values if isinstance(v, int)), None)


def _sizes(config) -> list[int]:
    size = _find(config, "image_size") or 32
    return list(dict.fromkeys([size, 32, 64, 224]))


def _channels(config) -> list[int]:
    return list(dict.fromkeys([_find(config, "num_channels") or 3, 3, 1]))


def _mel(config) -> int:
    for name in ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim"):
        if value := _find(config, name):
            return value
    return 80
