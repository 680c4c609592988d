"""Modules of a diffusers model that keep 16-bit products beside "fa_ops_8bit"."""

from __future__ import annotations

from collections.abc import Collection

from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn

from hf_integration.hooks import EIGHT_BIT, NAME
from hf_integration.sixteen_bit import modules_of


def keep_16_bit(model: nn.Module, names: Collection[str]) -> None:
    """Give the attention of some modules the backend "fa_ops", in a model with "fa_ops_8bit".

    The first and last blocks of image and video models are often the most sensitive.
    `set_attention_backend` sets the backend of all modules again.

    Args:
        model: a model after `model.set_attention_backend("fa_ops_8bit")`.
        names: modules as `model.named_modules()` has them, such as ``"blocks.0"``; everything
            inside them is meant.

    Raises:
        TypeError: model is no module, or names is no collection of strings.
        ValueError: the model has no module of a name, or nothing inside has the backend
            "fa_ops_8bit".

    Examples:
        >>> transformer.set_attention_backend("fa_ops_8bit")
        >>> hf_integration.diffusers.keep_16_bit(transformer, ["blocks.0", "blocks.39"])
    """
    chosen = {}
    for name, whole in modules_of(model, names).items():
        processors = [getattr(module, "processor", None) for module in whole.modules()]
        found = [x for x in processors if getattr(x, "_attention_backend", None) == EIGHT_BIT]
        if not found:
            raise ValueError(
                f"names must be modules with the backend {EIGHT_BIT!r}, {name!r} has none: call "
                f"set_attention_backend({EIGHT_BIT!r}) first"
            )
        chosen[name] = found
    for processors in chosen.values():
        for processor in processors:
            processor._attention_backend = AttentionBackendName(NAME)
