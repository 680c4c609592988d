"""The masks that an architecture supports, read once per config class from its code."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType

from hf_integration import mask_analysis

# Model types that need the float mask of eager attention, which their source does not show.
_NEEDS_FLOAT_MASK = {"gemma4_audio", "git"}
# Model types whose modules have is_causal = True, although without a mask they attend everything.
_NOT_CAUSAL = {"blt_global_transformer", "bridgetower", "bridgetower_text_model"}
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
DECLARATION = "_supports_attention_backend"
_FLAGS = (DECLARATION, "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
_LAYERS_WITH_BIAS = ("compressed",)  # layer types whose code concatenates a bias to the mask


@dataclass(frozen=True)
class MaskNeeds:
    """Why an architecture needs a dense bool mask, or a float one; None: a compact mask works."""

    dense: str | None = None
    floating: str | None = None
    computes: bool = False  # the model computes with its masks, which materialises compact ones


UNKNOWN = MaskNeeds(dense="an unknown architecture")
_known: dict[type, MaskNeeds] = {}


def mask_needs(config, may_read_source: bool = True) -> MaskNeeds:
    """The mask needs of a config. Dynamo cannot trace reading source, but can trace a look-up."""
    if config is None:
        return UNKNOWN
    if may_read_source and type(config) not in _known:
        _known[type(config)] = _find(type(config))
    for layer in getattr(config, "layer_types", None) or ():
        if any(word in layer for word in _LAYERS_WITH_BIAS):
            return MaskNeeds(floating=f"layers of type {layer!r} add to their mask")
    return _known.get(type(config), UNKNOWN)


def attends_all(config) -> bool:
    """Whether the `is_causal` attributes of a model are wrong and it attends all keys."""
    return getattr(config, "model_type", "") in _NOT_CAUSAL


def _find(config_class: type) -> MaskNeeds:
    model_type = getattr(config_class, "model_type", "")
    if model_type in _NEEDS_FLOAT_MASK:
        return MaskNeeds(floating=f"{model_type} adds to its mask")
    if not config_class.__module__.startswith("transformers.models."):
        return UNKNOWN
    module = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
    if module is None:
        return UNKNOWN
    if bypasses_interface(module):
        return MaskNeeds(floating=f"{model_type} has its own attention code")
    # Compact masks give right results in all code except code that adds part of a mask to scores
    # and, in graphs, code that writes to a mask.
    try:
        kinds = {use.kind for use in mask_analysis.uses(inspect.getsource(module))}
    except (OSError, SyntaxError):
        return UNKNOWN
    if "add" in kinds:
        return MaskNeeds(floating=f"{model_type} adds its mask to scores in its own code")
    if "write" in kinds:
        return MaskNeeds(dense=f"{model_type} writes to its mask")
    return MaskNeeds(computes=bool(kinds))


def bypasses_interface(module: ModuleType) -> bool:
    """Whether a module defines attention layers and never calls transformers' interface."""
    if hasattr(module, _INTERFACE):
        return False
    return any(
        name.endswith("Attention")
        and isinstance(value, type)
        and value.__module__ == module.__name__
        for name, value in vars(module).items()
    )


def may_call_interface(model_class: type) -> bool:
    """Whether the code of a model class may call transformers' interface.

    Outside transformers, attention may have any name and be in any module, so a sign of support is
    needed: a flag of the class, a base class that calls the interface, or the interface or a model
    of transformers in its module. Where that module defines attention layers, the class itself has
    to set `_supports_attention_backend`.
    """
    module = sys.modules.get(model_class.__module__)
    if module is None:
        return True
    is_foreign = not module.__name__.startswith("transformers.")
    if is_foreign and vars(model_class).get(DECLARATION):
        return True
    if bypasses_interface(module):
        return False
    declares = any(getattr(model_class, flag, False) for flag in _FLAGS)
    if declares or not is_foreign or _INTERFACE in vars(module):
        return True
    return any(map(_is_sign, [*model_class.__mro__, *vars(module).values()]))


def _is_sign(value: object) -> bool:
    home = sys.modules.get(value.__module__) if isinstance(value, type) else value
    if not isinstance(home, ModuleType) or home.__name__ == "transformers.modeling_utils":
        return False
    is_auto = home.__name__.startswith("transformers.models.auto.")
    return home.__name__ == "transformers" or is_auto or _INTERFACE in vars(home)
