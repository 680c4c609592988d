"""The functions of the `flash_attn` package (FlashAttention 2), on the operators of fa_ops:

    from fa_ops.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

Arguments, their order and defaults, layouts, (B, S, H, D) or packed (T, H, D), and results are
those of flash-attn 2.8. The functions run on every device and in every dtype that fa_ops supports,
on the CPU too, and are differentiable where the originals are. Numbers may also be 0-d tensors or
NumPy numbers, and bools 0 or 1.

Differences: the sides of a window may be None, which means unbounded, as -1 does; the head
dimension of values may differ from that of keys; dropout drops other weights than flash-attn with
the same seed. `return_attn_probs` with dropout, `block_table` of packed sequences and
`cache_batch_idx` have no counterpart and raise. Errors of the operators use the operators' names of
arguments: query, key, value, kv_lens.
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
        softmax_scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        causal: causal mask, aligned at the bottom right as in flash-attn since 2.1.
        window_size: number of visible keys on either side of a query's own position; negative:
            unbounded.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``.
        deterministic: whether the backward pass is bitwise repeatable.
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
    result = attention(*map(_heads_first, (q, k, v)), **options)
    if not options["return_lse"]:
        return result.transpose(1, 2)
    return result[0].transpose(1, 2), result[1], None


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor ``(B, Sk, 2, Hkv, D)``."""
    k, v = _parts("kv", kv, 2, "(B, S, 2, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_func` of queries, keys and values in one tensor ``(B, S, 3, H, D)``."""
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
    """Attention within packed sequences.

    Args:
        q: ``(Tq, Hq, D)``.
        k: ``(Tk, Hkv, D)``.
        v: ``(Tk, Hkv, Dv)``.
        cu_seqlens_q: int32 ``(B + 1,)``, the cumulative lengths of the sequences of queries.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: upper bound on the number of queries of a sequence.
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
            "block_table must be None for packed sequences: flash_attn_with_kvcache supports pages"
        )
    _shape(_PACKED, q=q, k=k, v=v)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                       deterministic, return_attn_probs)  # fmt: skip
    packing = cu_seqlens_q, cu_seqlens_k, _scalar(max_seqlen_q), _scalar(max_seqlen_k)
    result = attention_varlen(*map(_unit_stride, (q, k, v)), *packing, **options)
    return (*result, None) if options["return_lse"] else result


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor ``(Tk, 2, Hkv, D)``."""
    k, v = _parts("kv", kv, 2, "(T, 2, H, D)")
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args, **options
) -> Result:
    """:func:`flash_attn_varlen_func` of queries, keys and values in one tensor ``(T, 3, H, D)``."""
    q, k, v = _parts("qkv", qkv, 3, "(T, 3, H, D)")
    packing = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *packing, *args, **options)


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
        k_cache: ``(B, S, Hkv, D)``; with ``block_table`` ``(pages, page_size, Hkv, D)``.
        v_cache: the same with ``Dv``.
        k: ``(B, Sn, Hkv, D)``, appended in place.
        v: ``(B, Sn, Hkv, Dv)``.
        rotary_cos: ``(positions, R / 2)``; rotates the queries and ``k``, which must be given. New
            key ``j`` is at position ``cache_seqlens + j``. Query ``i`` is at ``cache_seqlens + i``
            if the call is causal or has a window, else at ``cache_seqlens``. Padding counts.
        rotary_sin: ``(positions, R / 2)``.
        cache_seqlens: int32 ``(B,)`` or one number, the number of keys in each row before the call;
            ``None``: the capacity of the cache.
        cache_leftpad: int32 ``(B,)``, the index of the first key of each row.
        block_table: int32 ``(B, max_pages)``.
        num_splits: number of splits of the keys of each row; 0: chosen from shapes.
        return_softmax_lse: also return the lse, float32 ``(B, Hq, Sq)``.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_with_kv_cache`.

    Source: Dao et al., Flash-Decoding, https://pytorch.org/blog/flash-decoding.
    """
    _shape(_DENSE, q=q)
    is_paged = block_table is not None
    _shape("(pages, page_size, H, D)" if is_paged else _DENSE, k_cache=k_cache, v_cache=v_cache)
    _check_combination(k, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx)
    if k is not None and v is not None:
        _shape(_DENSE, k=k, v=v)
    room = k_cache.shape[1]
    if is_paged:
        _shape("(B, max_pages)", block_table=block_table)
        room *= block_table.shape[1]
    else:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    lens, window = _lens(q, cache_seqlens, room), _window(window_size)
    causal, interleaved = _flag("causal", causal), _flag("rotary_interleaved", rotary_interleaved)
    if rotary_cos is not None:
        is_local = window is not None and any(0 <= side < room for side in window)
        positions_differ = causal or is_local
        if q.shape[1] != k.shape[1] or (q.shape[1] > 1 and not positions_differ):
            tables = rotary_cos, rotary_sin, interleaved
            q, k = _rotated(q, k, *tables, lens, positions_differ)
            rotary_cos = rotary_sin = None
    return_lse = _flag("return_softmax_lse", return_softmax_lse)
    result = attention_with_kv_cache(
        *(_heads_first(q), k_cache, v_cache, lens, block_table, causal), key=_heads_first(k),
        value=_heads_first(v), scale=_scalar(softmax_scale), window=window,
        softcap=_scalar(softcap), alibi_slopes=alibi_slopes, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_interleaved=interleaved and rotary_cos is not None,
        num_splits=_scalar(num_splits),
        key_ranges=None if cache_leftpad is None else _ranges_from(cache_leftpad),
        return_lse=return_lse,
    )  # fmt: skip
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


def _check_combination(k, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx) -> None:
    """Raise an error for arguments that are unsupported or lack another."""
    if cache_batch_idx is not None:
        raise NotImplementedError(
            "cache_batch_idx must be None, because it would copy rows: pass a block_table instead"
        )
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if rotary_cos is not None and k is None:
        raise ValueError("k must be given with rotary_cos, which rotates both queries and new keys")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k, which is written behind them")


def _lens(q: Tensor, cache_seqlens: int | Tensor | None, room: int) -> Tensor:
    """The lengths (B,) of the rows before the call."""
    B, lens = q.shape[0], room if cache_seqlens is None else cache_seqlens
    if isinstance(lens, Tensor):
        lens = lens.int() if lens.dtype == torch.int64 and lens.dim() == 0 else lens
        return lens.expand(B) if lens.dim() < 2 and lens.numel() == 1 else lens
    lens = need_int("cache_seqlens", _scalar(lens), "a Tensor or an int")
    if not 0 <= lens <= room:
        raise ValueError(f"cache_seqlens must lie within the cache's {room} keys, got {lens}")
    return torch.full((B,), lens, dtype=torch.int32, device=q.device)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, lens: Tensor,
    positions_differ: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and new keys rotated as in flash-attn, where the operator would do it differently.

    The operator rotates the last query to the position of the last key. Tensors that do not fit
    are returned unchanged, because the operator refuses them.
    """
    cache_checks.rotary(q.transpose(1, 2), cos, sin)
    (B, Sq, _, D), Sn = q.shape, k.shape[1]
    if lens.shape != (B,) or k.shape[0] != B or k.shape[3] != D:
        return q, k
    query_steps = Sq if positions_differ else 1
    if lens.device.type == "cpu" and not torch.compiler.is_compiling() and B:
        needed = int(lens.max()) + max(Sn, query_steps)
        if needed > cos.shape[0]:
            raise ValueError(f"rotary_cos has {cos.shape[0]} positions, but {needed} are needed")
    results = []
    for x, steps in ((q, query_steps), (k, Sn)):
        positions = lens[:, None] + torch.arange(steps, device=lens.device)
        positions = positions.clamp(0, cos.shape[0] - 1).expand(-1, x.shape[1])
        x = rotary.turned(x.transpose(1, 2), cos, sin, interleaved, positions)
        results.append(x.transpose(1, 2))
    return results[0], results[1]


def _ranges_from(leftpad: Tensor) -> Tensor:
    """Key ranges from the end of the padding to the end of each row."""
    _shape("(B)", cache_leftpad=leftpad)
    if leftpad.dtype != torch.int32:
        raise TypeError(f"cache_leftpad must be int32, got {leftpad.dtype}")
    ends = torch.full_like(leftpad, torch.iinfo(torch.int32).max)
    return torch.stack([leftpad, ends], -1)[:, None, None]


def _window(window: object) -> tuple[int, int] | None:
    """The sides of a window, -1 for unbounded ones; None if both are unbounded."""
    if isinstance(window, Tensor):
        window = window.tolist()
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
    left, right = (
        -1 if side is None else max(need_int("a side of window_size", _scalar(side)), -1)
        for side in window
    )
    return None if left == right == -1 else (left, right)


def _scalar(value: object) -> object:
    """A Python number in place of a 0-d tensor or a NumPy number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _flag(name: str, value: object) -> bool:
    value = _scalar(value)
    if value not in (0, 1):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def _heads_first(x: Tensor | None) -> Tensor | None:
    """``(B, H, S, D)`` for ``(B, S, H, D)``, copied if the last dimension is not contiguous."""
    return None if x is None else _unit_stride(x).transpose(1, 2)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


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
    """The same as options of fa_ops.attention."""
    dropout_p = _scalar(dropout_p)
    return_lse = _flag("return_attn_probs", return_attn_probs)
    if return_lse and dropout_p:
        raise NotImplementedError(
            f"return_attn_probs must be False with dropout, got dropout_p {dropout_p}: weights are "
            "never stored"
        )
    return {
        "dropout_p": dropout_p, "is_causal": _flag("causal", causal),
        "scale": _scalar(softmax_scale), "window": _window(window_size),
        "softcap": _scalar(softcap), "alibi_slopes": alibi_slopes,
        "deterministic": _flag("deterministic", deterministic), "return_lse": return_lse,
    }  # fmt: skip
