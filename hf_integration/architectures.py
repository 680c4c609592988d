"""Which masks a model can take, found once per config class from the source of its module."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType

from hf_integration import mask_uses

# Modeling code that expects the float mask of eager attention, where the source does not show it.
_FLOAT = {"gemma4_audio", "git"}
# Modules whose is_causal is True, and that with eager attention attend everything without a mask.
_UNMASKED = {"blt_global_transformer", "bridgetower", "bridgetower_text_model"}
_ADDING_LAYERS = ("compressed",)  # layer types whose code concatenates a bias to the mask


@dataclass(frozen=True)
class Facts:
    """Why a dense bool mask, or an additive float one, is needed; None: a compact one will do."""

    dense: str | None = None
    floating: str | None = None
    computes: bool = False  # the model computes with its masks, which materialises compact ones


UNKNOWN = Facts(dense="an architecture that is not known")
_found: dict[type, Facts] = {}


def facts(config, look: bool = True) -> Facts:
    """The facts for a config; `look=False` only recalls them: Dynamo cannot trace the look-up."""
    if config is None:
        return UNKNOWN
    if look and type(config) not in _found:
        _found[type(config)] = _find(type(config))
    for layer in getattr(config, "layer_types", None) or ():
        if any(word in layer for word in _ADDING_LAYERS):
            return Facts(floating=f"layers of type {layer!r} add to their mask")
    return _found.get(type(config), UNKNOWN)


def attends_all(config) -> bool:
    """Whether the modules of a model are wrong about being causal."""
    return getattr(config, "model_type", "") in _UNMASKED


def _find(config_class: type) -> Facts:
    model_type = getattr(config_class, "model_type", "")
    if model_type in _FLOAT:
        return Facts(floating=f"{model_type} adds to its mask")
    if not config_class.__module__.startswith("transformers.models."):
        return UNKNOWN
    module = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
    if module is None:
        return UNKNOWN
    if owns_attention(module):
        return Facts(floating=f"{model_type} has attention code of its own")
    return _by_source(module, model_type)


def _by_source(module: ModuleType, model_type: str) -> Facts:
    """What the module's code does with its masks: a compact mask gives right results in all code
    but that which adds a part of it to scores, and in graphs, that which writes to it."""
    try:
        kinds = {use.kind for use in mask_uses.uses(inspect.getsource(module))}
    except (OSError, SyntaxError):
        return UNKNOWN
    if "add" in kinds:
        return Facts(floating=f"{model_type} adds its mask to scores of its own")
    if "write" in kinds:
        return Facts(dense=f"{model_type} writes to its mask")
    return Facts(computes=bool(kinds))


def owns_attention(module: ModuleType) -> bool:
    """Whether a modeling module defines attention layers and never calls the interface."""
    if hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return any(
        name.endswith("Attention")
        and isinstance(value, type)
        and value.__module__ == module.__name__
        for name, value in vars(module).items()
    )
