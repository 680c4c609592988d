"""Explain which attention runs in each layer of a diffusers model, and why."""

from __future__ import annotations

import inspect
import sys

from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from hf_integration.diffusers import key_masks, sdpa_calls
from hf_integration.explaining import Explanation, Layers, backend_of, example
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
    return Explanation(layers, dict(key_masks.counts), {})


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
    if notes and not sdpa_calls.is_installed(module):
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
