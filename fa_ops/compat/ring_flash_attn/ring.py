"""The functions whose names contain ring_flash_attn, of dense and of packed sequences."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fa_ops.call.python_types import need_tensor
from fa_ops.compat.arguments import (
    DENSE,
    PACKED,
    Window,
    flag,
    heads_first,
    infinite_where_empty,
    number,
    parts,
    shape,
    sides,
)
from fa_ops.distributed import SequenceLayout, context_parallel_attention
from fa_ops.distributed.layout import members, merged
from fa_ops.distributed.masks import on_host

Result = Tensor | tuple[Tensor, Tensor, None]


def ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> Result:  # fmt: skip
    """Attention of this process's queries over the keys of all processes, in contiguous order.

    Process ``r`` of ``n`` holds part ``r`` of the sequence.

    Args:
        q: ``(B, S, Hq, D)``.
        k: ``(B, S, Hkv, D)``.
        v: ``(B, S, Hkv, Dv)``.
        dropout_p: probability of dropping a weight. The seed is drawn by the group's first
            process, from torch's generator, and the weights that it drops on one device are
            dropped on all processes together.
        softmax_scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        causal: whether token ``i`` of the whole sequence attends tokens ``j <= i`` alone.
        window_size: number of visible keys on either side of a query's own position in the whole
            sequence; negative: unbounded.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``.
        deterministic: whether the backward pass is bitwise repeatable.
        return_attn_probs: also return the lse, float32 ``(B, Hq, S)``, and None.
        group: ``None``: all processes.

    Returns:
        out ``(B, S, Hq, Dv)``, or ``(out, lse, None)``.

    Raises:
        ValueError, TypeError, RuntimeError: as
            :func:`fa_ops.distributed.context_parallel_attention`.
        NotImplementedError: the same.

    Source: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; the interface of
    https://github.com/zhuzilin/ring-flash-attention.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    return _attend(q, k, v, options, return_attn_probs, group, "contiguous")


def zigzag_ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> Result:  # fmt: skip
    """:func:`ring_flash_attn_func` in zigzag order.

    The sequence is divided into ``2 n`` chunks, of which process ``r`` of ``n`` holds chunks ``r``
    and ``2 n - 1 - r``, one after the other: all processes then have equal work if `causal`.

    Args:
        q: ``(B, S, Hq, D)``, with an even S.
        k: ``(B, S, Hkv, D)``.
        v: ``(B, S, Hkv, Dv)``.
        causal: as in :func:`ring_flash_attn_func`, as all arguments that are not here. May be
            False, which the original refuses.

    Returns:
        out ``(B, S, Hq, Dv)``, or ``(out, lse, None)``.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as :func:`ring_flash_attn_func`.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    return _attend(q, k, v, options, return_attn_probs, group, "zigzag")


def ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`ring_flash_attn_func` with keys and values in one tensor ``(B, S, 2, Hkv, D)``."""
    return ring_flash_attn_func(q, *parts("kv", kv, 2, "(B, S, 2, H, D)"), *args, **options)


def ring_flash_attn_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`ring_flash_attn_func` of one tensor ``(B, S, 3, H, D)``."""
    return ring_flash_attn_func(*parts("qkv", qkv, 3, "(B, S, 3, H, D)"), *args, **options)


def zigzag_ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`zigzag_ring_flash_attn_func` with keys and values in one ``(B, S, 2, Hkv, D)``."""
    return zigzag_ring_flash_attn_func(q, *parts("kv", kv, 2, "(B, S, 2, H, D)"), *args, **options)


def zigzag_ring_flash_attn_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`zigzag_ring_flash_attn_func` of one tensor ``(B, S, 3, H, D)``."""
    return zigzag_ring_flash_attn_func(*parts("qkv", qkv, 3, "(B, S, 3, H, D)"), *args, **options)


def options_of(
    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
) -> dict:  # fmt: skip
    """The options of context_parallel_attention for the arguments of ring-flash-attention."""
    return {
        "dropout_p": number("dropout_p", dropout_p),
        "scale": None if softmax_scale is None else number("softmax_scale", softmax_scale),
        "is_causal": flag("causal", causal),
        "window": sides(window_size), "alibi_slopes": alibi_slopes,
        "deterministic": flag("deterministic", deterministic),
    }  # fmt: skip


def in_ring(
    tensors: tuple[Tensor, Tensor, Tensor], options: dict, group: ProcessGroup | None,
    layout: str | SequenceLayout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``(B, S, Hq, Dv)`` and the lse of FlashAttention 2 of tensors ``(B, S, H, D)``."""
    out, lse = context_parallel_attention(
        *map(heads_first, tensors), group, "ring", layout=layout, return_lse=True, **options
    )
    return out.transpose(1, 2), infinite_where_empty(lse)


def _attend(q, k, v, options: dict, with_lse, group, layout: str) -> Result:
    shape(DENSE, q=q, k=k, v=v)
    out, lse = in_ring((q, k, v), options, group, layout)
    return (out, lse, None) if flag("return_attn_probs", with_lse) else out


# Packed sequences: each is distributed over all processes, and a process packs its parts of them.


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
    return _attend_packed(q, k, v, cu_seqlens, options, return_attn_probs, group, False)


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
    return _attend_packed(q, k, v, cu_seqlens, options, return_attn_probs, group, True)


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


def _attend_packed(q, k, v, cu_seqlens, options: dict, with_lse, group, zigzag: bool) -> Result:
    shape(PACKED, q=q, k=k, v=v)
    _, size = members(group)
    ends = tuple(on_host(need_tensor("cu_seqlens", cu_seqlens)).flatten().tolist())
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
