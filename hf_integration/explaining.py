"""`explain(model)`: which attention runs in each layer, and why."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from fa_ops import dispatch
from hf_integration import architectures, hooks, latent, masks


class Layers(NamedTuple):
    """Layers that run the same attention for the same reasons."""

    names: list[str]
    kind: str  # the class
    runs: str
    why: str

    def __str__(self) -> str:
        first, count = self.names[0], len(self.names)
        where = first if count == 1 else f"{first} and {count - 1} more"
        return f"{where} ({self.kind}): {self.runs}\n    {self.why}"


class Explanation(NamedTuple):
    """What runs in every attention layer, and how often each encoding of masks was made so far."""

    layers: list[Layers]
    masks: dict[str, int]
    hooks: dict[str, str]

    def __str__(self) -> str:
        lines = [str(layers) for layers in self.layers] or ["no attention layers"]
        counted = [f"  {name}: {count}" for name, count in sorted(self.masks.items())]
        lines += ["masks made so far in this process:", *(counted or ["  none"])]
        return "\n".join([*lines, *(f"{name}: {text}" for name, text in self.hooks.items())])


def explain(model: nn.Module) -> Explanation:
    """Which attention runs in each layer of a transformers model, and why. Computes nothing.

    Example:
        >>> print(hf_integration.explain(model))
        model.layers.0.self_attn and 29 more (LlamaAttention): fa_ops, backend cpu
            triton: needs an NVIDIA GPU; masks stay compact
    """
    groups: dict[tuple, list[str]] = {}
    for name, layer, owner in _attention_layers(model):
        groups.setdefault((type(layer).__name__, *_about(layer, owner)), []).append(name)
    layers = [Layers(names, *key) for key, names in groups.items()]
    return Explanation(layers, dict(Counter(masks.counts)), dict(hooks.state))


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """The innermost modules named attention, each with the model that holds its config."""
    owners = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    for name, module in model.named_modules():
        inner = (type(part).__name__ for part in module.modules() if part is not module)
        if "Attention" not in type(module).__name__ or any("Attention" in n for n in inner):
            continue
        above = (owner for owner in owners if not owner or name.startswith(owner + "."))
        owner = max(above, key=len, default=None)
        if owner is not None:
            yield name, module, owners[owner]


def _about(layer: nn.Module, owner: PreTrainedModel) -> tuple[str, str]:
    """What runs and why."""
    config = getattr(layer, "config", None) or owner.config
    module = sys.modules[type(layer).__module__]
    if architectures.owns_attention(module):
        return "its own attention code", "the model never calls transformers' attention interface"
    if not hooks.is_ours(config):
        chosen = getattr(config, "_attn_implementation", None)
        return str(chosen), "the config says so; model.set_attn_implementation('fa_ops') changes it"
    notes = [*_features(layer), _masks(config)]
    tensors = _example(layer, config)
    if tensors is None:
        return "fa_ops", "; ".join(["its sizes are not known", *notes])
    found = dispatch.explain(*tensors)
    refused = [f"{name}: {why}" for name, why in found.reasons.items() if why]
    order = list(dispatch.BACKENDS)
    if found.backend is not None:
        before = order[: order.index(found.backend)]
        refused = [line for line in refused if line.split(":")[0] in before]
    return f"fa_ops, backend {found.backend or 'none'}", "; ".join([*refused, *notes])


def _features(layer: nn.Module) -> Iterator[str]:
    for name in ("sliding_window", "attn_logit_softcapping"):
        if value := getattr(layer, name, None):
            yield f"{name} {value}"
    if any("sink" in name for name, _ in layer.named_parameters(recurse=False)):
        yield "sinks"
    if hasattr(getattr(type(layer), "expand_kv", None), "_fa_ops_original"):
        yield f"latent: up to {latent.MAX_ABSORBED_QUERIES} queries attend the latents themselves"


def _masks(config) -> str:
    facts = architectures.facts(config)
    if facts.floating:
        return f"float masks, because {facts.floating}"
    if facts.dense:
        return f"dense masks, because of {facts.dense}"
    return "masks stay compact" + (" until the model computes with them" if facts.computes else "")


def _example(layer: nn.Module, config) -> tuple[torch.Tensor, ...] | None:
    """Small query, key and value of the layer's head dimensions, dtype and device.

    None where its head dimension is not known.
    """
    D = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    D = D or getattr(config, "head_dim", None) or getattr(layer, "attention_head_size", None)
    weight = next(layer.parameters(), None)
    if not isinstance(D, int) or weight is None:
        return None
    Dv = getattr(layer, "v_head_dim", None) or D
    device = weight.device
    if device.type == "meta":  # where such a model will most likely be loaded
        device = "cuda" if torch.cuda.is_available() else "cpu"
    make = {"dtype": weight.dtype, "device": device}
    q, v = torch.empty((1, 1, 1, D), **make), torch.empty((1, 1, 1, Dv), **make)
    return q, q, v
