"""What models support: the masks of an architecture, read from its code, and refusals of "fa_ops".

transformers only checks that the name of an implementation is registered. A model with its own
attention code, which never calls transformers' attention interface, would misread our masks. Such a
model keeps the implementation that transformers chooses by default, and a warning names it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType

from transformers import PreTrainedModel

from hf_integration import call_rewrites, hooks, indexers, mask_analysis

_METHOD = "get_correct_attn_implementation"


def install() -> None:
    """Wrap the method with which every model chooses its attention implementation. Idempotent.

    Raises RuntimeError if this transformers release has no such method.
    """
    original = hooks.original_of(getattr(PreTrainedModel, _METHOD, None))
    if original is None:
        raise RuntimeError(
            f"this transformers release has no PreTrainedModel.{_METHOD}; "
            "hf_integration supports 5.17 and later"
        )
    if getattr(original, "_fa_ops", False):
        return

    @functools.wraps(original)
    def choose(self, requested_attention, *args, **kwargs):
        if requested_attention in hooks.names:
            mask_needs(self.config)  # read now, because Dynamo cannot read them
            module = sys.modules.get(type(self).__module__)
            if not may_call_interface(type(self)):
                chosen = original(self, None, *args, **kwargs)
                warnings.warn(
                    f"{type(self).__name__} has its own attention code, which never calls "
                    f"transformers' attention interface: {chosen!r} is used instead of "
                    f"{requested_attention!r}{_remedy(module)}",
                    stacklevel=2,
                )
                return chosen
            if module is not None:
                _complete_class_tables(type(self), requested_attention)
                hooks.install_cu_seqlens(module)
                call_rewrites.install_latents(module, hooks.is_ours)
                indexers.install(module, hooks.is_ours)
            if requested_attention in hooks.FLASH_NAMES:
                return requested_attention  # transformers would ask for the package flash_attn
        return original(self, requested_attention, *args, **kwargs)

    choose._fa_ops = True
    setattr(PreTrainedModel, _METHOD, choose)


def _complete_class_tables(model: type, name: str) -> None:
    """Add our name to transformers' tables of layer classes, with SDPA's or eager's class.

    A table is a plain dict from names of implementations to classes, in the module of transformers
    that defines the class of the model or a base of it. Modules outside transformers are not read.
    """
    modules = {base.__module__ for base in model.__mro__}
    for module in modules:
        if not module.startswith("transformers.models."):
            continue
        for table in vars(sys.modules[module]).values():
            if type(table) is dict and _is_class_table(table):
                table.setdefault(name, table.get("sdpa", table["eager"]))


def _is_class_table(table: dict) -> bool:
    named = all(type(key) is str and isinstance(value, type) for key, value in table.items())
    return named and "eager" in table


def _remedy(module: ModuleType) -> str:
    """How a class outside transformers contradicts, as the end of a warning."""
    if module.__name__.startswith("transformers."):
        return ""
    return f"; a class that does call it sets {DECLARATION} = True"


# What the code of an architecture says: the masks that it supports, read once per config class, and
# whether it calls transformers' attention interface.


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
