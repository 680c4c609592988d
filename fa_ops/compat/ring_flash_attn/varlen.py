"""ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_func and their packed forms.

Every sequence is distributed over all processes, and each process packs its parts of them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fa_ops.call.python_types import need_tensor
from fa_ops.compat.flash.arguments import PACKED, Window, flag, parts, shape
from fa_ops.compat.ring_flash_attn.dense import Result, in_ring, options_of
from fa_ops.distributed import SequenceLayout, masks
from fa_ops.distributed.layout import members, merged


def ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: ProcessGroup | None = None,
) -> Result:  # fmt: skip
    """Attention within packed sequences, of each of which process ``r`` of ``n`` holds part ``r``.

    Args:
        q: ``(T, Hq, D)``.
        k: ``(T, Hkv, D)``.
        v: ``(T, Hkv, Dv)``.
        cu_seqlens: int32 ``(B + 1,)``, the cumulative lengths of the parts that this process
            holds, ``1 / n`` of those of the whole sequences; equal on all processes.
        max_seqlen: the length of the longest part; not needed here.
        alibi_slopes: float32 ``(Hq,)``. Distances are those of the packed whole sequences.
        return_attn_probs: also return the lse, float32 ``(Hq, T)``, and None.

    All other arguments, and the errors, are those of :func:`ring_flash_attn_func`.

    Returns:
        out ``(T, Hq, Dv)``, or ``(out, lse, None)``.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    return _attend(q, k, v, cu_seqlens, options, return_attn_probs, group, False)


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: ProcessGroup | None = None,
) -> Result:  # fmt: skip
    """:func:`ring_flash_attn_varlen_func` with each sequence in zigzag order.

    Of ``2 n`` chunks of each sequence, process ``r`` holds chunks ``r`` and ``2 n - 1 - r``.

    Args:
        q: ``(T, Hq, D)``.
        k: ``(T, Hkv, D)``.
        v: ``(T, Hkv, Dv)``.
        cu_seqlens: as in :func:`ring_flash_attn_varlen_func`, as all arguments that are not here;
            the lengths are even.
        causal: may be False, which the original refuses.

    Returns:
        out ``(T, Hq, Dv)``, or ``(out, lse, None)``.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as :func:`ring_flash_attn_func`.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    return _attend(q, k, v, cu_seqlens, options, return_attn_probs, group, True)


def ring_flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`ring_flash_attn_varlen_func` with keys and values in one ``(T, 2, Hkv, D)``."""
    return ring_flash_attn_varlen_func(q, *parts("kv", kv, 2, "(T, 2, H, D)"), *args, **options)


def ring_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`ring_flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``."""
    return ring_flash_attn_varlen_func(*parts("qkv", qkv, 3, "(T, 3, H, D)"), *args, **options)


def zigzag_ring_flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`zigzag_ring_flash_attn_varlen_func` with keys and values in one ``(T, 2, Hkv, D)``."""
    packed = parts("kv", kv, 2, "(T, 2, H, D)")
    return zigzag_ring_flash_attn_varlen_func(q, *packed, *args, **options)


def zigzag_ring_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`zigzag_ring_flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``."""
    packed = parts("qkv", qkv, 3, "(T, 3, H, D)")
    return zigzag_ring_flash_attn_varlen_func(*packed, *args, **options)


def _attend(q, k, v, cu_seqlens, options: dict, with_lse, group, zigzag: bool) -> Result:
    shape(PACKED, q=q, k=k, v=v)
    _, size = members(group)
    ends = tuple(masks.on_host(need_tensor("cu_seqlens", cu_seqlens)).flatten().tolist())
    _check(ends, q.shape[0], 2 if zigzag and size > 1 else 1)
    whole, layout = _whole(ends, size, zigzag)
    tensors = tuple(x.unsqueeze(0) for x in (q, k, v))
    out, lse = in_ring(tensors, options | {"cu_seqlens": whole}, group, layout)
    out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse, None) if flag("return_attn_probs", with_lse) else out


def _check(ends: tuple[int, ...], tokens: int, multiple: int) -> None:
    lengths = [b - a for a, b in zip(ends, ends[1:])]
    if not lengths or ends[0] or ends[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to q's {tokens} tokens, got {list(ends[:16])}"
        )
    odd = [n for n in lengths if n % multiple]
    if odd:
        raise ValueError(
            f"cu_seqlens must have parts of even lengths in zigzag order, got {odd[:16]}"
        )


@functools.lru_cache(maxsize=64)
def _whole(ends: tuple[int, ...], size: int, zigzag: bool) -> tuple[Tensor, SequenceLayout]:
    """cu_seqlens of the whole sequences, and the tokens of each process."""
    held: list[list] = [[] for _ in range(size)]
    for first, last in zip(ends, ends[1:]):
        start, part = first * size, last - first
        for rank, segments in enumerate(held):
            chunks, length = [rank], part
            if zigzag and size > 1:
                chunks, length = [rank, 2 * size - 1 - rank], part // 2
            segments += [(start + c * length, start + (c + 1) * length) for c in chunks]
    layout = SequenceLayout(ends[-1] * size, tuple(merged(sorted(s)) for s in held))
    return torch.tensor(ends, dtype=torch.int32, device="cpu") * size, layout
