"""Explain which attention runs in each layer of a model, and why."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

import fa_ops
from fa_ops.call import backend_option
from hf_integration import call_rewrites, hooks, indexers, masks, unsupported_models


class Layers(NamedTuple):
    """Layers of one class that run the same attention for the same reasons."""

    names: list[str]
    kind: str  # the name of the class
    runs: str  # the attention that runs
    why: str

    def __str__(self) -> str:
        first, count = self.names[0], len(self.names)
        where = first if count == 1 else f"{first} and {count - 1} more"
        return f"{where} ({self.kind}): {self.runs}\n    {self.why}"


class Explanation(NamedTuple):
    """The attention that runs in each layer of a model; print it to see all.

    Attributes:
        layers: groups of layers that run the same attention for the same reasons.
        masks: how often each mask encoding was made so far in this process.
        hooks: for each hook of transformers, whether it is installed, or why not.
    """

    layers: list[Layers]
    masks: dict[str, int]
    hooks: dict[str, str]

    def __str__(self) -> str:
        lines = [str(layers) for layers in self.layers] or ["no attention layers"]
        counted = [f"  {name}: {count}" for name, count in sorted(self.masks.items())]
        lines += ["masks made so far in this process:", *(counted or ["  none"])]
        return "\n".join([*lines, *(f"{name}: {text}" for name, text in self.hooks.items())])


def explain(model: nn.Module) -> Explanation:
    """Explain which attention runs in each layer of a transformers model, without running it.

    Args:
        model: a model, or any module that contains some.

    Returns:
        The attention of every layer with the reasons. Print it, or read its fields.

    Raises:
        TypeError: the model is no module.

    Examples:
        >>> print(hf_integration.explain(model))
        model.layers.0.self_attn and 29 more (LlamaAttention): fa_ops, backend cpu
            triton: needs an NVIDIA GPU; masks stay compact
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    groups: dict[tuple, list[str]] = {}
    for name, layer, owner in _attention_layers(model):
        groups.setdefault((type(layer).__name__, *_explain_layer(layer, owner)), []).append(name)
    layers = [Layers(names, *key) for key, names in groups.items()]
    return Explanation(layers, dict(Counter(masks.counts)), dict(hooks.states))


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """The innermost modules whose class is named Attention, each with the model that owns it."""
    owners = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    for name, module in model.named_modules():
        inner = (type(part).__name__ for part in module.modules() if part is not module)
        if "Attention" not in type(module).__name__ or any("Attention" in n for n in inner):
            continue
        above = (owner for owner in owners if not owner or name.startswith(owner + "."))
        owner = max(above, key=len, default=None)
        if owner is not None:
            yield name, module, owners[owner]


def _explain_layer(layer: nn.Module, owner: PreTrainedModel) -> tuple[str, str]:
    """The attention that runs in a layer, and why."""
    config = getattr(layer, "config", None) or owner.config
    module = sys.modules[type(layer).__module__]
    if unsupported_models.bypasses_interface(module):
        return "its own attention code", "the model never calls transformers' attention interface"
    if not hooks.is_ours(config):
        chosen = getattr(config, "_attn_implementation", None)
        return str(chosen), "set in the config; model.set_attn_implementation('fa_ops') changes it"
    selection = indexers.indexer_note(layer, module)
    notes = [*_features(layer), *([selection] if selection else []), _masks(config)]
    if config._attn_implementation == hooks.EIGHT_BIT:
        kept = "16-bit products, as keep_16_bit chose"
        notes.append(
            kept if is_kept(layer) else "8-bit products for prompts and more than 16 queries"
        )
    tensors = _example(layer, config)
    if tensors is None:
        return "fa_ops", "; ".join(["its head dimension is unknown", *notes])
    runs, refused = backend_of(*tensors)
    return runs, "; ".join([*refused, *notes])


def backend_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[str, list[str]]:
    """The backend of a call, and the reasons why backends before it do not run it."""
    found = fa_ops.explain(query, key, value)
    order = list(backend_option.BACKENDS)
    before = order[: order.index(found.backend)] if found.backend else order
    refused = [f"{name}: {found.reasons[name]}" for name in before if found.reasons[name]]
    return f"fa_ops, backend {found.backend or 'none'}", refused


def _features(layer: nn.Module) -> Iterator[str]:
    for name in ("sliding_window", "attn_logit_softcapping"):
        if value := getattr(layer, name, None):
            yield f"{name} {value}"
    if any("sink" in name for name, _ in layer.named_parameters(recurse=False)):
        yield "sinks"
    if hasattr(getattr(type(layer), "expand_kv", None), "_fa_ops_original"):
        few = call_rewrites.MAX_ABSORBED_QUERIES
        yield f"latent: up to {few} queries attend the latents themselves"


def _masks(config) -> str:
    needs = unsupported_models.mask_needs(config)
    if needs.floating:
        return f"float masks, because {needs.floating}"
    if needs.dense:
        return f"dense masks, because of {needs.dense}"
    return "masks stay compact" + (" until the model computes with them" if needs.computes else "")


def _example(layer: nn.Module, config) -> tuple[torch.Tensor, ...] | None:
    """A small query, key and value with the head dimensions, dtype and device of a layer.

    None if its head dimension is unknown.
    """
    D = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    D = D or getattr(config, "head_dim", None) or getattr(layer, "attention_head_size", None)
    return example(layer, D, getattr(layer, "v_head_dim", None) or D)


def example(layer: nn.Module, D: int | None, Dv: int | None) -> tuple[torch.Tensor, ...] | None:
    """A query, key and value of one token, with the dtype and device of a layer's weights.

    None if the head dimension is None, or the layer has no weights.
    """
    weight = next(layer.parameters(), None)
    if not isinstance(D, int) or weight is None:
        return None
    device = weight.device
    if device.type == "meta":  # explain the device where the model will most likely be loaded
        device = "cuda" if torch.cuda.is_available() else "cpu"
    factory = {"dtype": weight.dtype, "device": device}
    q, v = torch.empty((1, 1, 1, D), **factory), torch.empty((1, 1, 1, Dv), **factory)
    return q, q, v


# The report of `python -m fa_ops doctor --model`: which attention runs in each layer, and why.

Rows = list[tuple[str, str]]


def sections(model: str) -> Iterator[tuple[str, Rows]]:
    """Yield titles with rows (name, text) for a model type, or a folder with a config.json.

    The model is built without memory for its weights. Raises LookupError if none can be built.
    """
    config = _config(model)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with warnings.catch_warnings(record=True) as raised, torch.device("meta"):
        warnings.simplefilter("always")
        try:
            built = AutoModel.from_config(config, attn_implementation="fa_ops", dtype=dtype)
        except Exception as error:  # modeling code can raise anything
            raise _cannot_build(model, error) from None
    rows = [
        (layers.kind, f"{len(layers.names)} x {layers.runs}; {layers.why}")
        for layers in explain(built).layers
    ]
    yield f"model {config.model_type}", rows or [("attention", "none")]
    refusals = dict.fromkeys(str(w.message) for w in raised if "attention code" in str(w.message))
    if refusals:
        yield "refused", [("because", text) for text in refusals]


def _config(model: str) -> PreTrainedConfig:
    if Path(model).is_dir():
        try:
            return AutoConfig.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise LookupError(f"no model's config can be read from {model}: {error}") from None
    if model not in CONFIG_MAPPING:
        raise LookupError(f"{model!r} is neither a folder nor a model type of transformers")
    try:
        return CONFIG_MAPPING[model]()
    except Exception as error:  # "encoder-decoder" has no default config in some releases
        raise _cannot_build(model, error) from None


def _cannot_build(model: str, error: Exception) -> LookupError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return LookupError(f"no model can be built from {model!r}: {reason}")


# Layers that keep 16-bit products under attn_implementation="fa_ops_8bit".

_KEPT = "_fa_ops_keeps_16_bit"


def keep_16_bit(model: nn.Module, names: Collection[str]) -> None:
    """Let the attention of some modules keep 16-bit products under "fa_ops_8bit".

    The first and last layers are often the most sensitive. A later call replaces what an earlier
    one chose; the choice is not part of a model's config, and not saved with it.

    Args:
        model: a model of transformers, or a part of one.
        names: modules as `model.named_modules()` has them, such as ``"model.layers.0"``; everything
            inside them is meant. Empty: none.

    Raises:
        TypeError: model is no module, or names is no collection of strings.
        ValueError: the model has no module of a name.

    Examples:
        >>> model.set_attn_implementation("fa_ops_8bit")
        >>> hf_integration.keep_16_bit(model, ["model.layers.0", "model.layers.29"])
    """
    named = modules_of(model, names)
    for module in model.modules():
        vars(module).pop(_KEPT, None)
    for whole in named.values():
        for module in whole.modules():
            setattr(module, _KEPT, True)


def modules_of(model: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    """The modules with these names; raises as `keep_16_bit` does."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    if not is_collection or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must hold names of modules, got {names!r}")
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise ValueError(f"names must be modules of the model, it has no {name!r}")
    return {name: modules[name] for name in names}


def is_kept(layer: nn.Module) -> bool:
    """Whether a layer was named."""
    return getattr(layer, _KEPT, False)
