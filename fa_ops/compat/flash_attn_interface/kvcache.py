"""FlashAttention 3's function over a cache, of rows or of packed queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.python_types import need_tensor
from fa_ops.compat.flash import (
    DENSE,
    PACKED,
    Caches,
    Rotation,
    Window,
    append,
    attend_chunks,
    attend_pages,
    attend_rows,
    caches_of,
    check_appended,
    check_list,
    check_new,
    count,
    flag,
    has_shape,
    lengths,
    new_keys,
    of_sequences,
    ranges_from,
    rotation_of,
    saturated,
    score_options,
    shape,
    unit_stride,
    without_gradient,
)
from fa_ops.compat.flash_attn_interface.attention import (
    E4M3,
    WIDE,
    Scales,
    WidenedQueries,
    attend_none,
    attend_numbers,
    check_qv,
    check_unused,
    chunk_of,
    in_32_bits,
    rows_of_tokens,
    say,
    with_features_of_values,
)
from fa_ops.compat.flash_attn_interface.attention import check as check_numbers
from fa_ops.functions import varlen as varlen_pages
from fa_ops.functions.kv_cache import attention_with_kv_cache

# Packed queries and packed new keys over a cache.


class PackedCacheCall(NamedTuple):
    """What says where packed queries and new keys belong."""

    ends_q: Tensor | None  # int32 (B + 1,); None: rows of equal length
    ends_k: Tensor | None  # of new keys
    lens: Tensor
    rotation: Rotation | None
    offsets: Tensor | None  # of the rotation; None: lens

    def attend(
        self, q: Tensor, qv: Tensor | None, new: tuple[Tensor, Tensor] | None, caches: Caches,
        longest: int | None, leftpad: Tensor | None, chunk: int, options: dict,
        scales: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out and lse in the layout of q; `scales` are those of e4m3 queries, none of others."""
        rows, B = q.shape[:2], len(self.lens)
        ends, lens, caches = self.ends_q, self.lens, caches.in_pages()
        checks.integers(q, "cache_seqlens", lens)
        if leftpad is not None:
            checks.same_device(q, "cache_leftpad", of_sequences("cache_leftpad", leftpad, B), "q")
        if qv is not None:
            check_qv(q, qv, caches.v)
            qv = qv.detach().reshape(-1, *qv.shape[-2:])
        if ends is None:
            longest, ends, q = q.shape[1], _even(B, q), q.flatten(0, 1)
        if scales:
            check_numbers(q, k_cache=caches.k, v_cache=caches.v)
        wide = qv is not None or leftpad is not None or chunk > 0
        if new is not None:
            q, lens = self._appended(q, qv, new, caches, ends, longest, options,
                                     None if wide else scales)  # fmt: skip
        if scales and not wide:
            out, lse = attend_numbers(q, caches, lens, ends, longest, options | scales)
        elif scales:
            tokens = rows_of_tokens(ends, q.shape[0])
            wide = WidenedQueries(q, qv, {"k_cache": caches.k, "v_cache": caches.v}, scales, tokens)
            say(4, qv=qv, cache_leftpad=leftpad, attention_chunk=chunk or None)
            out, lse = _attended(wide.q, wide.qv, caches, lens, ends, longest, leftpad, chunk,
                                 options)  # fmt: skip
            out = wide.result(out)
        else:
            out, lse = _attended(q, qv, caches, lens, ends, longest, leftpad, chunk, options)
        if self.ends_q is None:
            return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)
        return out, lse

    def _appended(
        self, q, qv, new, caches, ends, longest, options, scales
    ) -> tuple[Tensor, Tensor]:
        """The rotated queries, and the lengths, once new keys and values are in the cache."""
        ends_k, (k, v), lens = self.ends_k, new, self.lens
        if ends_k is None:
            ends_k, k, v = _even(len(lens), k), k.flatten(0, 1), v.flatten(0, 1)
        check_appended(q, caches, k, v, ends_k, lens)
        filled = (lens + ends_k.diff()).int()
        wide = q if q.dtype != E4M3 else torch.empty_like(q, dtype=WIDE)  # has a shape only
        varlen_pages.check(wide, caches.k, caches.v, ends, filled, caches.table, (longest, None))
        check_options(wide, qv, caches, filled, options)
        if scales:
            attend_none(q, caches, options | scales)
        q, k = self._rotated(q, k, ends, ends_k)
        append(caches, k, v, ends_k, lens)
        return q, filled

    def _rotated(self, q, k, ends, ends_k) -> tuple[Tensor, Tensor]:
        if self.rotation is None:
            return q, k
        offsets, rotation = self.lens if self.offsets is None else self.offsets, self.rotation
        is_eight_bit = q.dtype == E4M3
        if is_eight_bit:
            q, k = q.float(), k.float()
            cos, sin = in_32_bits(rotation.cos), in_32_bits(rotation.sin)
            rotation = rotation._replace(cos=cos, sin=sin)
        q = rotation.of_tokens(q, ends, offsets, rotation.queries_differ)
        k = rotation.of_tokens(k, ends_k, offsets, True)
        return (saturated(q), saturated(k)) if is_eight_bit else (q, k)


def _attended(q, qv, caches, lens, ends, longest, leftpad, chunk, options) -> tuple[Tensor, Tensor]:
    """out and lse of packed queries that are not in 8 bits."""
    if qv is not None:
        q, caches = with_features_of_values(q, qv, caches)
    if chunk:
        return attend_chunks(q, caches, lens, ends, leftpad, chunk, options)
    if leftpad is not None:
        options = options | {"key_ranges": ranges_from(q, leftpad, len(lens))}
    return attend_pages(q, *caches[:2], lens, caches.table, ends, longest, options)


def check_options(
    q: Tensor, qv: Tensor | None, caches: Caches, lens: Tensor, options: dict
) -> None:
    """Raise what attention over the caches would, by a call without rows."""
    more = 0 if qv is None else qv.shape[-1]
    k, v = (x.new_empty(0, *x.shape[1:-1], x.shape[-1] + n) for x, n in zip(caches, (more, 0)))
    query = q.new_empty(0, q.shape[1], 1, q.shape[-1] + more)
    attention_with_kv_cache(query, k, v, lens[:0], caches.table[:0], **options)


def _even(rows: int, x: Tensor) -> Tensor:
    """The cu_seqlens of rows (B, S, ...) of equal length."""
    return torch.arange(rows + 1, dtype=torch.int32, device=x.device) * x.shape[1]


# flash_attn_with_kvcache of FlashAttention 3: rows or packed queries over a cache.


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over a cache, to which new keys and values are appended first. Not differentiable.

    Args:
        q: ``(B, Sq, Hq, D)``, or ``(Tq, Hq, D)`` with ``cu_seqlens_q``.
        k_cache: ``(rows, S, Hkv, D)``, with B rows or more; with ``page_table``
            ``(pages, page_size, Hkv, D)``.
        v_cache: the same with ``Dv``.
        k: ``(B, Sn, Hkv, D)``, or ``(Tn, Hkv, D)`` with ``cu_seqlens_k_new``, appended in place.
        v: the same with ``Dv``.
        qv: as in :func:`flash_attn_func`; the cache is copied unless k_cache and v_cache are
            views of one latent cache ``(..., Dv + D)`` that begins with the values.
        q_descale: float32 ``(B, Hkv)``, the factors of fp8 queries, which attend an fp8 cache, or
            ``None``: 1. The result is in bfloat16. New fp8 keys and values are appended as they
            are, rotated ones rounded to fp8, as rotated queries are. With ``qv``, ``cache_leftpad``
            or ``attention_chunk`` the products are in bfloat16, of the same numbers.
        k_descale: the same of fp8 keys.
        v_descale: the same of fp8 values.
        rotary_cos: ``(positions, R / 2)``; rotates the queries and ``k``, which must be given. New
            key ``j`` is at position ``rotary_seqlens + j``. Query ``i`` is at
            ``rotary_seqlens + i`` if the call is causal or has a window or an attention_chunk,
            else at ``rotary_seqlens``.
        rotary_sin: ``(positions, R / 2)``.
        cache_seqlens: int32 ``(B,)`` or one number, the number of keys in each row before the call;
            ``None``: the capacity of the cache.
        cache_batch_idx: int32 ``(B,)``, the row of the cache, or of ``page_table``, that belongs to
            each row of q; ``None``: the first B, in order.
        cache_leftpad: int32 ``(B,)``, the index of the first key of each row.
        page_table: int32 ``(rows, max_pages)``.
        cu_seqlens_q: int32 ``(B + 1,)``, the cumulative lengths of packed queries.
        cu_seqlens_k_new: the same for new keys.
        max_seqlen_q: upper bound on the number of queries of a packed sequence.
        rotary_seqlens: ``(B,)``, see ``rotary_cos``; ``None``: ``cache_seqlens``.
        attention_chunk: as in :func:`flash_attn_func`; positions begin behind the padding. Several
            queries of a row are then attended as if each were a row.
        scheduler_metadata: ignored, as ``pack_gqa`` and ``sm_margin``: no result depends on it.
        num_splits: number of splits of the keys of each row; 0: chosen from shapes.
        return_softmax_lse: also return the lse, float32 ``(B, Hq, Sq)`` or ``(Hq, Tq)``, and two
            tensors without elements, the results of the splits.

    Returns:
        out, q's shape with ``Dv`` features, or ``(out, lse, _, _)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_with_kv_cache`.

    Source: Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.
    """
    scales = Scales(q_descale, k_descale, v_descale)
    check_new(k, v, rotary_cos, rotary_sin, cache_seqlens)
    check_unused(num_splits, pack_gqa, sm_margin, scheduler_metadata)
    rows, longest = _checked_packing(q, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
    caches = caches_of(rows, k_cache, v_cache, "page_table", page_table, cache_batch_idx)
    lens = lengths("cache_seqlens", cache_seqlens, rows, caches.room, q.device)
    options = score_options(softmax_scale, causal, window_size, softcap)
    options["num_splits"] = count("num_splits", num_splits)
    _check_offsets(q, rotary_seqlens, rows)
    q, chunk = unit_stride(without_gradient(q)), chunk_of(attention_chunk)
    unbounded = caches.room - 1, _most_queries(q, cu_seqlens_q, longest) - 1
    rotation = rotation_of(rotary_cos, rotary_sin, rotary_interleaved, options, unbounded, chunk)
    new = new_keys(k, v, DENSE if cu_seqlens_k_new is None else PACKED)
    with_lse = flag("return_softmax_lse", return_softmax_lse)
    eight_bit = scales.options(q, rows, (q.shape[-2], k_cache.shape[2]))
    if eight_bit and new is qv is cache_leftpad is None and not chunk:
        out, lse = attend_numbers(q, caches, lens, cu_seqlens_q, longest, options | eight_bit)
    elif cu_seqlens_q is cu_seqlens_k_new is qv is None and not chunk and not eight_bit:
        out, lse = attend_rows(
            q, caches, new, lens, cache_leftpad, rotation, rotary_seqlens, options
        )
    else:
        packed = PackedCacheCall(cu_seqlens_q, cu_seqlens_k_new, lens, rotation, rotary_seqlens)
        out, lse = packed.attend(
            q, qv, new, caches, longest, cache_leftpad, chunk, options, eight_bit
        )
    return (out, lse, *(q.new_empty(0, dtype=torch.float32) for _ in "kv")) if with_lse else out


def _check_offsets(q: Tensor, offsets: Tensor | None, rows: int) -> None:
    """Raise ValueError or TypeError unless rotary_seqlens, if given, holds one integer a row."""
    if offsets is None:
        return
    remedy = "pass the position of each row's first new key"
    has_shape("rotary_seqlens", need_tensor("rotary_seqlens", offsets), (rows,), remedy)
    checks.same_device(q, "rotary_seqlens", offsets, "q")
    if offsets.dtype != torch.int64:
        checks.has_dtype("rotary_seqlens", offsets, torch.int32)


def _most_queries(q: Tensor, ends: Tensor | None, longest: int | None) -> int:
    """An upper bound on the number of queries of a sequence."""
    return q.shape[-3] if ends is None or longest is None else longest


def _checked_packing(
    q: Tensor, ends_q: Tensor | None, ends_k: Tensor | None, longest: object
) -> tuple[int, int | None]:
    """The number of sequences and max_seqlen_q, once q and what describes packing are checked."""
    for name, ends in (("cu_seqlens_q", ends_q), ("cu_seqlens_k_new", ends_k)):
        if ends is not None:
            check_list(name, ends)
    longest = None if longest is None else count("max_seqlen_q", longest, "an int or None")
    shape(DENSE if ends_q is None else PACKED, q=q)
    return q.shape[0] if ends_q is None else ends_q.numel() - 1, longest
