"""The functions of the `flash_attn` package (FlashAttention 2), by the operators of this one:

    from fa_ops.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

Arguments, their order and their defaults are those of flash-attn 2.8, and so are layouts,
(B, S, H, D) or packed (T, H, D), and what is returned. They run wherever this package does, on a
CPU too, in every dtype it has, and differentiate where the originals do.

What differs: a window's sides may be None, which is unbounded as -1 is; values may be of another
width than keys; dropout drops other weights than flash-attn's for the same seed of torch. What has
no counterpart is refused by its name: `return_attn_probs` with dropout, as weights are never
stored; `block_table` of packed sequences; and `cache_batch_idx`. What the operators refuse, they
name as they do: query, key, value, kv_lens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import cache_checks
from fa_ops.api import attention, attention_varlen, need_int, need_tensor
from fa_ops.backends import rotary
from fa_ops.kv_cache import attention_with_kv_cache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int | None, int | None]
Result = Tensor | tuple[Tensor, Tensor, None]
_DENSE, _PACKED = "(B, S, H, D)", "(T, H, D)"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q ``(B, Sq, Hq, D)`` over k ``(B, Sk, Hkv, D)`` and v ``(B, Sk, Hkv, Dv)``.

    Args:
        softmax_scale: factor on the products; ``None``: ``1 / sqrt(D)``.
        causal: aligned at the bottom right, as flash-attn since 2.1.
        window_size: keys visible on either side of a query's own position.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``.
        deterministic: a bitwise repeatable backward.
        return_attn_probs: also return the lse, float32 ``(B, Hq, Sq)``, and None.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse, None)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention`.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    _shape(_DENSE, q=q, k=k, v=v)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                       deterministic, return_attn_probs)  # fmt: skip
    result = attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    if not return_attn_probs:
        return result.transpose(1, 2)
    return result[0].transpose(1, 2), result[1], None


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor ``(B, Sk, 2, Hkv, D)``."""
    k, v = _parts("kv", kv, 2, "(B, S, 2, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_func` of one tensor ``(B, S, 3, H, D)``."""
    q, k, v = _parts("qkv", qkv, 3, "(B, S, 3, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention within sequences that are packed one behind the other.

    Args:
        q: ``(Tq, Hq, D)``.
        k: ``(Tk, Hkv, D)``.
        v: ``(Tk, Hkv, Dv)``.
        cu_seqlens_q: int32 ``(B + 1,)``, where sequences begin and end.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: at least the longest sequence's number of queries.
        max_seqlen_k: the same for keys.
        return_attn_probs: also return the lse, float32 ``(Hq, Tq)``, and None.

    Returns:
        out ``(Tq, Hq, Dv)``, or ``(out, lse, None)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_varlen`.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    if block_table is not None:
        raise NotImplementedError(
            "block_table must be None for packed sequences: flash_attn_with_kvcache takes pages"
        )
    _shape(_PACKED, q=q, k=k, v=v)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                       deterministic, return_attn_probs)  # fmt: skip
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    result = attention_varlen(q, k, v, *packing, **options)
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor ``(Tk, 2, Hkv, D)``."""
    k, v = _parts("kv", kv, 2, "(T, 2, H, D)")
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args, **options
) -> Result:
    """:func:`flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``, whose sequences are the same
    for queries and keys."""
    q, k, v = _parts("qkv", qkv, 3, "(T, 3, H, D)")
    both = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *both, *args, **options)


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
    """Attention over a cache, to which new keys and values are appended first. No gradient.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k_cache: ``(B, S, Hkv, D)``; with ``block_table`` ``(pages, page_size, Hkv, D)``.
        v_cache: the same with ``Dv``.
        k: ``(B, Sn, Hkv, D)``, to be appended in place.
        v: ``(B, Sn, Hkv, Dv)``.
        rotary_cos: ``(positions, R / 2)``; turns the queries and ``k``, which must be given. New
            key ``j`` stands at ``cache_seqlens + j``, and so does query ``i`` at
            ``cache_seqlens + i`` of a call that is causal or has a window; all queries stand at
            ``cache_seqlens`` else. Padding counts.
        rotary_sin: ``(positions, R / 2)``.
        cache_seqlens: int32 ``(B,)`` or one number, keys that each row holds before the call;
            ``None``: all that the cache has room for.
        cache_leftpad: int32 ``(B,)``, where each row's keys begin.
        block_table: int32 ``(B, max_pages)``.
        num_splits: pieces that the keys of each row are cut into; 0: chosen from shapes.
        return_softmax_lse: also return the lse, float32 ``(B, Hq, Sq)``.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_with_kv_cache`.

    Source: Dao et al., Flash-Decoding, https://pytorch.org/blog/flash-decoding.
    """
    _shape(_DENSE, q=q)
    paged = block_table is not None
    _shape("(pages, page_size, H, D)" if paged else _DENSE, k_cache=k_cache, v_cache=v_cache)
    if cache_batch_idx is not None:
        raise NotImplementedError(
            "cache_batch_idx must be None, as it would copy rows: a block_table says where they are"
        )
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if rotary_cos is not None and k is None:
        raise ValueError("k must be given where rotary_cos is: it is turned with the queries")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k: they say where it goes")
    if k is not None and v is not None:
        _shape(_DENSE, k=k, v=v)
    room = k_cache.shape[1]
    if paged:
        _shape("(B, max_pages)", block_table=block_table)
        room *= block_table.shape[1]
    else:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    lens = room if cache_seqlens is None else cache_seqlens
    if not isinstance(lens, Tensor):
        lens = need_int("cache_seqlens", lens, "a Tensor or an int")
        if not 0 <= lens <= room:
            raise ValueError(f"cache_seqlens must lie within the cache's {room} keys, got {lens}")
        lens = torch.full((q.shape[0],), lens, dtype=torch.int32, device=q.device)
    if rotary_cos is not None:
        local = any(side is not None and 0 <= side < room for side in _pair(window_size))
        apart = causal or local
        if q.shape[1] != k.shape[1] or (q.shape[1] > 1 and not apart):
            tables = rotary_cos, rotary_sin, rotary_interleaved
            q, k = _turned(q, k, *tables, lens, apart)
            rotary_cos = rotary_sin = None
    result = attention_with_kv_cache(
        *(q.transpose(1, 2), k_cache, v_cache, lens, block_table, causal),
        key=None if k is None else k.transpose(1, 2),
        value=None if v is None else v.transpose(1, 2),
        scale=softmax_scale,
        window=_window(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved and rotary_cos is not None,
        num_splits=num_splits,
        key_ranges=None if cache_leftpad is None else _from(cache_leftpad),
        return_lse=return_softmax_lse,
    )
    if not return_softmax_lse:
        return result.transpose(1, 2)
    return result[0].transpose(1, 2), result[1]


def _turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, lens: Tensor, apart: bool
) -> tuple[Tensor, Tensor]:
    """Queries and new keys where the operator, whose last query stands at the last key, would turn
    them otherwise; as they are if they do not fit, which the operator refuses."""
    cache_checks.rotary(q.transpose(1, 2), cos, sin)
    (B, Sq, _, D), Sn = q.shape, k.shape[1]
    if lens.shape != (B,) or k.shape[0] != B or k.shape[3] != D:
        return q, k
    needed = max(Sn, Sq if apart else 1)
    if lens.device.type == "cpu" and not torch.compiler.is_compiling() and B:
        last = int(lens.max()) + needed
        if last > cos.shape[0]:
            raise ValueError(f"rotary_cos has {cos.shape[0]} positions, but {last} are turned to")
    results = []
    for x, steps in ((q, Sq if apart else 1), (k, Sn)):
        at = lens[:, None] + torch.arange(steps, device=lens.device)
        at = at.clamp(0, cos.shape[0] - 1).expand(-1, x.shape[1])
        x = rotary.turned(x.transpose(1, 2), cos, sin, interleaved, at)
        results.append(x.transpose(1, 2))
    return results[0], results[1]


def _from(leftpad: Tensor) -> Tensor:
    """Runs from there to a row's end, wherever that is."""
    _shape("(B)", cache_leftpad=leftpad)
    if leftpad.dtype != torch.int32:
        raise TypeError(f"cache_leftpad must be int32, got {leftpad.dtype}")
    ends = torch.full_like(leftpad, torch.iinfo(torch.int32).max)
    return torch.stack([leftpad, ends], -1)[:, None, None]


def _window(window: Window) -> Window | None:
    """None where no side is bounded."""
    unbounded = ((-1, -1), (None, None), (-1, None), (None, -1))
    return None if tuple(_pair(window)) in unbounded else window


def _pair(window: object) -> tuple | list:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
    return window


def _shape(layout: str, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if need_tensor(name, t).dim() != layout.count(",") + 1:
            raise ValueError(f"{name} must have shape {layout}, got {tuple(t.shape)}")


def _parts(name: str, packed: Tensor, count: int, layout: str) -> tuple[Tensor, ...]:
    _shape(layout, **{name: packed})
    if packed.shape[-3] != count:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _options(
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs,
) -> dict:  # fmt: skip
    """As this package's functions call them."""
    if return_attn_probs and dropout_p:
        raise NotImplementedError(
            f"return_attn_probs must be False with dropout, got dropout_p {dropout_p}: weights are "
            "never stored"
        )
    return {
        "dropout_p": dropout_p, "is_causal": causal, "scale": softmax_scale,
        "window": _window(window_size), "softcap": softcap, "alibi_slopes": alibi_slopes,
        "deterministic": deterministic, "return_lse": return_attn_probs,
    }  # fmt: skip
