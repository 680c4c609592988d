"""Operands and options of calls in groups, as tests write them: by position, a few at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call.call import Call, Saved, attention_call
from fa_ops.call.options import is_default


class Spec(NamedTuple):
    """What calls of every kind have."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    kv_lens: Tensor | None = None
    key_ranges: Tensor | None = None
    dropout_seed: Tensor | None = None
    deterministic: bool = False
    backend: str | None = None
    mask_blocks: Tensor | None = None


class Packing(NamedTuple):
    """What packed calls have besides."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


class Cache(NamedTuple):
    """What calls over a cache have besides; `key` and `value` are new ones."""

    page_table: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    unified_max: Tensor | None = None


class Quantization(NamedTuple):
    """What calls with 8-bit products have besides."""

    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    qk_dtype: torch.dtype | None = None
    smooth_key: bool = True
    rotate: bool = False


def call_of(
    query: Tensor | None, key: Tensor | None, value: Tensor | None,
    spec: Spec = Spec(),  # noqa: B008 - a tuple
    packing: Packing | None = None, cache: Cache | None = None, saved: Saved | None = None,
    backend: str | None = None, quantization: Quantization | None = None,
) -> Call:  # fmt: skip
    """The call with these groups of arguments."""
    arguments = spec._asdict() | (packing._asdict() if packing else {})
    if cache is not None:
        more = cache._asdict()
        more |= {"new_key": more.pop("key"), "new_value": more.pop("value")}
        arguments |= more | {"over_cache": packing is None}
    if quantization is not None:
        arguments |= quantization._asdict() | {"eight_bits": True}
    call = attention_call(query, key, value, saved=saved, **arguments)
    return call._replace(backend=backend or "auto")


def keywords(spec: Spec) -> dict:
    """An operator's keyword arguments: the options that are not at their default."""
    return {
        name: value
        for name, value in list(zip(Spec._fields, spec))[3:]
        if not is_default(value, Spec._field_defaults[name])
    }


def groups(call: Call) -> tuple:
    """query, key, value, the Cache or Quantization of calls that have one, and the Spec."""
    given = call.operands._asdict() | call.options._asdict()
    special = Cache if call.is_cached else Quantization if call.is_quantized else None
    names = {"key": "new_key", "value": "new_value"}
    more = [special(*(given[names.get(n, n)] for n in special._fields))] if special else []
    return *call[:3], *more, Spec(*(given[n] for n in Spec._fields))
