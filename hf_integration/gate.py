"""Models that transformers builds with "fa_ops" although their code never calls it.

transformers checks only that an attention name is registered. A model with attention code of its
own would then receive masks that it misreads. Such a model keeps what transformers chooses by
default, and is named in a warning.
"""

from __future__ import annotations

import functools
import sys
import warnings
from types import ModuleType

from transformers import PreTrainedModel

from hf_integration import architectures, hooks, latent

_METHOD = "get_correct_attn_implementation"


def install(names: tuple[str, ...]) -> None:
    """Wrap the method by which every model chooses its attention implementation. Idempotent.

    Raises RuntimeError if this transformers release has no such method.
    """
    original = getattr(PreTrainedModel, _METHOD, None)
    if original is None:
        raise RuntimeError(
            f"this transformers release has no PreTrainedModel.{_METHOD}; "
            "hf_integration supports 5.17 and later"
        )
    if getattr(original, "_fa_ops", False):
        return

    @functools.wraps(original)
    def choose(self, requested_attention, *args, **kwargs):
        if requested_attention in names:
            architectures.facts(self.config)  # found now: Dynamo cannot look them up
            module = sys.modules.get(type(self).__module__)
            if module is not None and architectures.owns_attention(module):
                chosen = original(self, None, *args, **kwargs)
                warnings.warn(
                    f"{type(self).__name__} has attention code of its own, which never calls "
                    f"transformers' attention interface: {names[0]!r} cannot serve it, "
                    f"{chosen!r} is used",
                    stacklevel=2,
                )
                return chosen
            if module is not None:
                _complete_class_tables(module, requested_attention)
                hooks.install_tower(module)
                latent.install(module, hooks.is_ours)
        return original(self, requested_attention, *args, **kwargs)

    choose._fa_ops = True
    setattr(PreTrainedModel, _METHOD, choose)


def _complete_class_tables(module: ModuleType, name: str) -> None:
    """Where layer classes are listed by implementation, ours gets SDPA's, or else the eager one."""
    for table in vars(module).values():
        if isinstance(table, dict) and isinstance(table.get("eager"), type):
            table.setdefault(name, table.get("sdpa", table["eager"]))
