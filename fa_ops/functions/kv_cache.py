"""The public function of attention over a key-value cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from fa_ops.call import cache_checks
from fa_ops.call.call import CACHED, Call
from fa_ops.call.options import Operands, new_operands
from fa_ops.call.python_types import (
    Window,
    need_bool,
    need_tensor,
    read_scale,
    refuse_unknown,
    sides,
)
from fa_ops.ops import autocast, kv_cache
from fa_ops.ops.eager import PublicFunction, run
from fa_ops.ops.schemas import Schema
from fa_ops.tracing import can_read

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fa_ops.call.python_types import CachedOptions


def _schema(call: Call, with_lse: bool) -> Schema:
    return kv_cache.READING if call.operands.new_key is None else kv_cache.APPENDING


_CACHED = PublicFunction(CACHED, _schema, autocast.cast_cached)


@overload
def attention_with_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, kv_lens: Tensor,
    page_table: Tensor | None = None, is_causal: bool = False,
    *, return_lse: Literal[False] = False, **options: Unpack[CachedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_with_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, kv_lens: Tensor,
    page_table: Tensor | None = None, is_causal: bool = False,
    *, return_lse: Literal[True], **options: Unpack[CachedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, kv_lens: Tensor,
    page_table: Tensor | None = None, is_causal: bool = False,
    *, return_lse: bool, **options: Unpack[CachedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_lens: Tensor,
    page_table: Tensor | None = None,
    is_causal: bool = False,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    scale: float | Tensor | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    key_ranges: Tensor | None = None,
    unified_max: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of one query token, a few, or a whole prompt over a key-value cache. No gradient.

    ``key`` and ``value``, if given, are first appended to the cache in place, after the
    ``kv_lens[b]`` keys that row ``b`` holds; its queries then see ``kv_lens[b] + Sn`` keys. That
    sum is the length of row ``b`` below. The host reads no length, so one CUDA graph serves every
    length.

    Note:
        Positions are aligned at the **bottom right** of each row: query ``i`` of ``Sq`` stands at
        ``length + i - Sq``. Pass ``is_causal`` where several new tokens must not see each other's
        future.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``Sq`` query tokens, ``Sn`` new keys, ``S`` the cache's capacity, ``D`` head dimension, ``Dv``
    value head dimension, ``R`` rotated features.

    Args:
        query: ``(B, Hq, Sq, D)``, float16, bfloat16, float32, or float64 on CPU.
        key_cache: ``(B, Hkv, S, D)``, any strides with a contiguous last dimension (a cache laid
            out ``(B, S, Hkv, D)`` comes as ``cache.transpose(1, 2)``); with ``page_table``
            ``(pages, page_size, Hkv, D)``. Query's dtype, or float8_e4m3fn.
        value_cache: the same with ``Dv``. May be a view of ``key_cache``, as in MLA, where it is
            the first ``Dv`` columns; the keys are then read once. If keys are appended, ``value``
            must then be the same view of ``key``; caches that share memory otherwise are refused.
        kv_lens: int32 ``(B,)``, keys that each row of the cache holds before the call.
        page_table: int32 ``(B, max_pages)``; key ``j`` of row ``b`` is in page
            ``page_table[b, j // page_size]``. Of ``(B, Hkv, max_pages)`` each key head has pages of
            its own, as where a model selects blocks of keys: key ``j`` of head ``h`` is in page
            ``page_table[b, h, j // page_size]``, and nothing can be appended. Entries beyond the
            row's length may be anything. On CUDA a page number out of range is never followed, and
            its keys count as absent; ``FA_OPS_DEBUG=1`` makes it an error there too.
        is_causal: query ``i`` attends keys ``j <= length + i - Sq``.
        key: ``(B, Hkv, Sn, D)``, query's dtype, to be appended. Neither it nor query and value may
            share memory with the caches then.
        value: ``(B, Hkv, Sn, Dv)``.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``; a tensor as in
            :func:`attention`.
        window: ``(left, right)``, keys that stay visible on either side of a query's own position.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``.
        sinks: ``(Hq,)``, a logit per head that joins the softmax's denominator only.
        k_scale: float32 ``(B, Hkv)``, by which cached fp8 keys are multiplied; new keys are divided
            by it. Or a scale for each token, ``(B, Hkv, S)``; with ``page_table`` ``(pages,
            page_size, Hkv)``, or ``(pages, 1, Hkv)`` for each page.
        v_scale: the same for values, with the shape of ``k_scale``.
        rotary_cos: ``(positions, R / 2)``; rotates query and the new keys at their positions. The
            keys in the cache have been rotated before.
        rotary_sin: ``(positions, R / 2)``.
        rotary_interleaved: features pair up as (0, 1), (2, 3), ...; else as (0, R / 2), ....
        num_splits: number of splits of each row's keys; 0: chosen from shapes.
        batch_invariant: splits of a fixed length, so that no bit of a row's result depends on the
            other rows.
        key_ranges: int32 ``(B or 1, 1, 1, 2)``; the queries of row ``b`` attend keys in the
            half-open ``[key_ranges[b, 0, 0, 0], key_ranges[b, 0, 0, 1])`` alone, which is clamped
            to ``[0, length]``. Positions stay what they are. Where the cache begins with padding,
            ``[padding, length)`` is the range, and the padding is neither read nor waited for.
        unified_max: float32 ``(Hq,)``, an estimate of each head's largest score from calibration,
            in units of scores (``query @ key * scale``, softcap and ALiBi applied). Softmax may
            then subtract it instead of a running maximum. No result depends on it: rows for which
            it is too far off are computed again without it. The triton backend uses it.
        return_lse: also return the logarithm of the softmax's denominator.
        backend: as in :func:`attention`.
        **unknown: refused.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)`` in query's dtype, laid out ``(B, Sq, Hq, Dv)`` in memory; with
        ``return_lse`` ``(out, lse)``, ``lse`` ``(B, Hq, Sq)`` natural, float32.

    Raises:
        ValueError: shapes, devices or values that do not fit each other; an argument that requires
            grad; on CPU also lengths and pages that lie outside the cache.
        TypeError: a dtype or Python type that is not accepted.
        NotImplementedError: no backend, or not the one named, can run the call; the message gives
            the reasons.

    Source: Dao et al., Flash-Decoding, https://pytorch.org/blog/flash-decoding; Kwon et al.,
    PagedAttention, https://arxiv.org/abs/2309.06180; Hong et al., FlashDecoding++
    (``unified_max``), https://arxiv.org/abs/2311.01282.

    Examples:
        >>> k, v = (torch.zeros(1, 128, 2, 64).transpose(1, 2) for _ in range(2))
        >>> q, new = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1, 64)
        >>> lens = torch.zeros(1, dtype=torch.int32)
        >>> fa_ops.attention_with_kv_cache(q, k, v, lens, key=new, value=new).shape
        torch.Size([1, 8, 1, 64])
    """
    if unknown:
        refuse_unknown(attention_with_kv_cache, unknown)
    if type(return_lse) is not bool:
        need_bool("return_lse", return_lse)
    if scale is not None and type(scale) is not float:
        scale = read_scale(scale)
    if isinstance(page_table, Tensor) and page_table.dim() == 3:
        options = {
            "is_causal": is_causal, "scale": scale, "window": window, "softcap": softcap,
            "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "num_splits": num_splits,
            "rotary_interleaved": rotary_interleaved, "batch_invariant": batch_invariant,
            "backend": backend,
        }  # fmt: skip
        tensors = Operands(
            kv_lens=kv_lens, page_table=page_table, alibi_slopes=alibi_slopes, sinks=sinks,
            new_key=key, new_value=value, k_scale=k_scale, v_scale=v_scale, key_ranges=key_ranges,
            unified_max=unified_max,
        )  # fmt: skip
        out, lse = _with_pages_of_heads(query, key_cache, value_cache, tensors, options)
        return (out, lse) if return_lse else out
    operands = new_operands((
        None, alibi_slopes, sinks, kv_lens, key_ranges, None, None, None, None, page_table, key,
        value, None, k_scale, v_scale, rotary_cos, rotary_sin, unified_max, None, None, None,
        None, None, None,
    ))  # fmt: skip
    left, right = (-1, -1) if window is None else sides(window)
    scalars = (
        is_causal, 0.0, scale, left, right, softcap, False,
        backend, rotary_interleaved, num_splits,
        batch_invariant,
    )  # fmt: skip
    return run(query, key_cache, value_cache, operands, scalars, _CACHED, return_lse)


# Pages of each key head. A page of a head is a page of one head, at a stride of its own: rows of
# the cache are then those of all pairs of a sequence and a key head.


def _with_pages_of_heads(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, t: Operands, options: dict
) -> tuple[Tensor, Tensor]:
    """out and lse of a call whose page_table is (B, Hkv, max_pages)."""
    for name, x in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        need_tensor(name, x)
    cache_checks.pages_of_heads(query, key_cache, value_cache, t)
    B, (pages, size, Hkv, _) = query.shape[0], key_cache.shape
    table = t.page_table
    if query.device.type == "cpu" and can_read(table, waiting=True):
        cache_checks.page_values(table, need_tensor("kv_lens", t.kv_lens), pages, size)
    steps, keys = _pages_of_one_head(key_cache)
    of_values, values = _pages_of_one_head(value_cache)
    if steps != of_values:  # of which one table cannot have both
        values = _pages_of_one_head(value_cache.contiguous())[1]
        steps, keys = _pages_of_one_head(key_cache.contiguous())
    head = torch.arange(Hkv, dtype=torch.int32, device=table.device).view(-1, 1)
    exists = (table >= 0) & (table < pages)
    table = torch.where(exists, table * steps[0] + head * steps[1], keys.shape[0]).int()
    table = table.flatten(0, 1).contiguous()

    def rows(x: Tensor | None, by_heads: bool) -> Tensor | None:
        """A tensor (B or 1, ...) or (B, Hq, ...) for the rows of B * Hkv."""
        if x is None:
            return None
        if by_heads:
            return x.expand(B, *x.shape[-1:]).unflatten(1, (Hkv, -1)).flatten(0, 1)
        return x.expand(B, *x.shape[1:]).repeat_interleave(Hkv, 0)

    out, lse = attention_with_kv_cache(
        query.unflatten(1, (Hkv, -1)).flatten(0, 1), keys, values, rows(t.kv_lens, False), table,
        key_ranges=rows(t.key_ranges, False), alibi_slopes=rows(t.alibi_slopes, True),
        return_lse=True, **options,
    )  # fmt: skip
    out = out.unflatten(0, (B, Hkv)).flatten(1, 2)
    lse = lse.unflatten(0, (B, Hkv)).flatten(1, 2)
    if t.sinks is not None:  # which differ between the rows of a sequence
        sinks = t.sinks.to(lse.dtype).view(-1, 1)
        share = torch.sigmoid(lse - sinks).nan_to_num(0.0)  # -inf less -inf: there are no keys
        out = (out * share.unsqueeze(-1)).to(out.dtype)
        lse = torch.logaddexp(lse, sinks.expand_as(lse))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse.contiguous()


def _pages_of_one_head(cache: Tensor) -> tuple[tuple[int, int], Tensor]:
    """Pages (n, page_size, 1, D) at all places where a page of a head may begin.

    Page p of head h is page p * steps[0] + h * steps[1], for the steps that are returned.
    """
    (pages, size, Hkv, D), (of_page, of_key, of_head, one) = cache.shape, cache.stride()
    unit = max(1, math.gcd(of_page, of_head))
    steps = of_page // unit, of_head // unit
    count = (pages - 1) * steps[0] + (Hkv - 1) * steps[1] + 1 if cache.numel() else 0
    strides = unit, of_key, D, one
    return steps, cache.as_strided((count, size, 1, D), strides)
