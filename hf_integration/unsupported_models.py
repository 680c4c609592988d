"""Refuse "fa_ops" for models whose code never calls transformers' attention interface.

transformers only checks that the name of an implementation is registered. A model with its own
attention code would then misread our masks. Such a model keeps the implementation that transformers
chooses by default, and a warning names it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from types import ModuleType

from transformers import PreTrainedModel

from hf_integration import architectures, flash_name, hooks, latent

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
            architectures.mask_needs(self.config)  # read now, because Dynamo cannot read them
            module = sys.modules.get(type(self).__module__)
            if not architectures.may_call_interface(type(self)):
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
                latent.install(module, hooks.is_ours)
            if requested_attention in flash_name.NAMES:
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
    return f"; a class that does call it sets {architectures.DECLARATION} = True"
