"""flash_attn_with_kvcache: attention over a cache, to which new keys and values are appended."""

from __future__ import annotations

from torch import Tensor

from fa_ops.compat.flash.arguments import (
    DENSE,
    Window,
    count,
    flag,
    infinite_where_empty,
    lengths,
    score_options,
    shape,
    unit_stride,
)
from fa_ops.compat.flash.cache import (
    attend_rows,
    caches_of,
    check_new,
    new_keys,
    rotation_of,
    without_gradient,
)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache, to which new keys and values are appended first. Not differentiable.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k_cache: ``(rows, S, Hkv, D)``, with B rows or more; with ``block_table``
            ``(pages, page_size, Hkv, D)``.
        v_cache: the same with ``Dv``.
        k: ``(B, Sn, Hkv, D)``, appended in place.
        v: ``(B, Sn, Hkv, Dv)``.
        rotary_cos: ``(positions, R / 2)``; rotates the queries and ``k``, which must be given. New
            key ``j`` is at position ``cache_seqlens + j``. Query ``i`` is at ``cache_seqlens + i``
            if the call is causal or has a window, else at ``cache_seqlens``. Padding counts.
        rotary_sin: ``(positions, R / 2)``.
        cache_seqlens: int32 ``(B,)`` or one number, the number of keys in each row before the call;
            ``None``: the capacity of the cache.
        cache_batch_idx: int32 ``(B,)``, the row of the cache that belongs to each row of q;
            ``None``: the first B, in order. Not with ``block_table``.
        cache_leftpad: int32 ``(B,)``, the index of the first key of each row.
        block_table: int32 ``(B, max_pages)``.
        num_splits: number of splits of the keys of each row; 0: chosen from shapes.
        return_softmax_lse: also return the lse, float32 ``(B, Hq, Sq)``, +inf in rows that attend
            no key.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_with_kv_cache`.

    Source: Dao et al., Flash-Decoding, https://pytorch.org/blog/flash-decoding.
    """
    shape(DENSE, q=q)
    check_new(k, v, rotary_cos, rotary_sin, cache_seqlens)
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx must be None with block_table, whose rows are those of q")
    caches = caches_of(q.shape[0], k_cache, v_cache, "block_table", block_table, cache_batch_idx)
    q, new = unit_stride(without_gradient(q)), new_keys(k, v, DENSE)
    lens = lengths("cache_seqlens", cache_seqlens, q.shape[0], caches.room, q.device)
    options = score_options(softmax_scale, causal, window_size, softcap)
    options |= {"alibi_slopes": alibi_slopes, "num_splits": count("num_splits", num_splits)}
    unbounded = caches.room, caches.room
    rotation = rotation_of(rotary_cos, rotary_sin, rotary_interleaved, options, unbounded)
    with_lse = flag("return_softmax_lse", return_softmax_lse)
    out, lse = attend_rows(
        q, caches, new, lens, cache_leftpad, rotation, None, options, with_lse
    )  # fmt: skip
    return (out, infinite_where_empty(lse)) if with_lse else out
