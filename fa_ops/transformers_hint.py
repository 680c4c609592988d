"""A hint in transformers' error for models that ask for "fa_ops" before it is registered.

transformers reads no entry points, so nothing can register the name for people who import nothing
of this library. Those who import fa_ops, but not hf_integration, get the hint: it is added when
transformers' models are imported, and changes nothing but the text of that error.
"""

from __future__ import annotations

import functools
import sys

from fa_ops.ops.library import after_import

_MODULE, _METHOD = "transformers.modeling_utils", "get_correct_attn_implementation"
_NAMES = ("fa_ops", "paged|fa_ops", "fa_ops_8bit")


def install() -> None:
    """Add the hint once transformers' models are imported."""
    after_import(_MODULE, _wrap)


def _wrap() -> None:
    model = getattr(sys.modules[_MODULE], "PreTrainedModel", None)
    choose = getattr(model, _METHOD, None)
    if choose is None or hasattr(choose, "_fa_ops") or hasattr(choose, "_fa_ops_hint"):
        return

    @functools.wraps(choose)
    def wrapper(self, requested_attention, *args, **kwargs):
        try:
            return choose(self, requested_attention, *args, **kwargs)
        except ValueError as error:
            if requested_attention not in _NAMES:
                raise
            hint = f"`import hf_integration` registers {requested_attention!r}"
            raise ValueError(f"{error} {hint}, and must run before the model is made.") from None

    wrapper._fa_ops_hint = True
    setattr(model, _METHOD, wrapper)
