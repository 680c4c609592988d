"""Layers that keep 16-bit products under attn_implementation="fa_ops_8bit"."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

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
