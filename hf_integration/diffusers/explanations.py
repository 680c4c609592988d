"""Explain which attention runs in each layer of a diffusers model, and why."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn

from hf_integration.diffusers.attention import answers_sdpa, mask_counts
from hf_integration.explanations import Explanation, Layers, backend_of, example, modules_of
from hf_integration.hooks import EIGHT_BIT, NAME


def explain(model: nn.Module) -> Explanation:
    """Explain which attention runs in each layer of a diffusers model, without running it.

    Args:
        model: a transformer or UNet; of a pipeline, pass ``pipeline.transformer`` or
            ``pipeline.unet``.

    Raises:
        TypeError: the model is no module, such as a pipeline.

    Examples:
        >>> print(hf_integration.diffusers.explain(pipeline.transformer))
        transformer_blocks.0.attn and 18 more (FluxAttnProcessor): fa_ops, backend hopper
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; of a pipeline, pass "
            "pipeline.transformer or pipeline.unet"
        )
    groups: dict[tuple, list[str]] = {}
    for name, layer in model.named_modules():
        if getattr(layer, "processor", None) is not None:
            groups.setdefault((type(layer.processor).__name__, *_of_layer(layer)), []).append(name)
    layers = [Layers(names, *key) for key, names in groups.items()]
    return Explanation(layers, dict(mask_counts), {})


def _of_layer(layer: nn.Module) -> tuple[str, str]:
    """The attention that runs in a layer, and why."""
    module = sys.modules[type(layer.processor).__module__]
    active = _AttentionBackendRegistry._active_backend
    chosen = getattr(layer.processor, "_attention_backend", None) or active
    chosen = getattr(chosen, "value", chosen)
    notes = []
    if not hasattr(layer.processor, "_attention_backend"):
        if "scaled_dot_product_attention(" not in inspect.getsource(type(layer.processor)):
            return "its own attention code", "it neither asks for a backend nor calls SDPA"
        chosen, notes = active.value, ["it calls SDPA itself"]
    set_it = "model.set_attention_backend('fa_ops') changes it"
    if chosen not in (NAME, EIGHT_BIT):
        return chosen, "; ".join([*notes, set_it])
    if notes and not answers_sdpa(module):
        return "torch's scaled_dot_product_attention", "; ".join([*notes, set_it])
    if chosen == EIGHT_BIT:
        notes.append("8-bit products")
    D = _head_dim(layer)
    tensors = example(layer, D, D)
    if tensors is None:
        return NAME, "; ".join(["its head dimension is unknown", *notes])
    runs, refused = backend_of(*tensors)
    return runs, "; ".join([*refused, *notes])


def _head_dim(layer: nn.Module) -> int | None:
    heads, width = getattr(layer, "heads", None), getattr(layer, "inner_dim", None)
    return getattr(layer, "head_dim", None) or (width // heads if heads and width else None)


# Modules of a diffusers model that keep 16-bit products beside "fa_ops_8bit".


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
