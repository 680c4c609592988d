"""fa_ops for diffusers: importing this package registers the attention backend "fa_ops".

"fa_ops_8bit" is the same with 8-bit products, for inference.

    import hf_integration.diffusers
    hf_integration.diffusers.register()  # the import has done it, which a linter does not know
    pipeline.transformer.set_attention_backend("fa_ops")

With `DIFFUSERS_ATTN_BACKEND=fa_ops` it is the default of all models; this import must then come
before the first model of diffusers is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from hf_integration.hooks import EIGHT_BIT, NAME, failed_import

try:
    from diffusers.utils import constants
except ImportError as error:
    raise failed_import("hf_integration.diffusers", "diffusers", "0.42", error) from error

# Registration with diffusers, whose list of names is closed.

# The default backend that DIFFUSERS_ATTN_BACKEND names, if it is ours. diffusers looks it up in its
# list of names when attention_dispatch is imported, before our names can be in the list. It is
# given "native" instead, and `register` sets the one that was requested.
requested: str | None = None
if constants.DIFFUSERS_ATTN_BACKEND in (NAME, EIGHT_BIT):
    requested = constants.DIFFUSERS_ATTN_BACKEND
    constants.DIFFUSERS_ATTN_BACKEND = "native"

# ruff: noqa: E402 - these import attention_dispatch
from diffusers import ModelMixin
from diffusers.models import attention_dispatch, attention_processor
from diffusers.models.attention_dispatch import AttentionBackendName

from hf_integration.diffusers.attention import (
    answer_sdpa,
    explain,
    fa_ops_8bit_attention,
    fa_ops_attention,
    keep_16_bit,
    mask_counts,
    processor_modules,
)

__all__ = ["EIGHT_BIT", "NAME", "explain", "keep_16_bit", "mask_counts", "register"]

_registry = attention_dispatch._AttentionBackendRegistry


def register() -> None:
    """Register "fa_ops" and "fa_ops_8bit" with diffusers; called on import. Idempotent.

    Raises RuntimeError if this diffusers release lacks a method that must be wrapped.
    """
    _add(NAME, fa_ops_attention, supports_context_parallel=True)
    _add(EIGHT_BIT, fa_ops_8bit_attention, supports_context_parallel=False)
    set_backend = getattr(ModelMixin, "set_attention_backend", None)
    if set_backend is None:
        raise RuntimeError(
            "this diffusers release has no ModelMixin.set_attention_backend; "
            "hf_integration.diffusers supports 0.42 and later"
        )
    if not hasattr(set_backend, "_fa_ops"):
        ModelMixin.set_attention_backend = _answering_sdpa(set_backend)


def _add(name: str, function: Callable, supports_context_parallel: bool) -> None:
    if name in AttentionBackendName._value2member_map_:
        return
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__, member._sort_order_ = AttentionBackendName, len(AttentionBackendName)
    AttentionBackendName._member_names_.append(member.name)
    AttentionBackendName._member_map_[member.name] = member
    AttentionBackendName._value2member_map_[name] = member
    type.__setattr__(AttentionBackendName, member.name, member)
    _registry.register(member, supports_context_parallel=supports_context_parallel)(function)
    if name == requested:
        _registry.set_active_backend(member)
        answer_sdpa(attention_processor)


def _answering_sdpa(set_backend: Callable) -> Callable:
    """`set_attention_backend` that also concerns processors which call SDPA themselves."""

    @functools.wraps(set_backend)
    def wrapper(self, backend: str) -> None:
        set_backend(self, backend)
        if backend.lower() in (NAME, EIGHT_BIT):
            for module in processor_modules(self):
                answer_sdpa(module)

    wrapper._fa_ops = True
    return wrapper


register()
