"""llama3_flash_attn_varlen_func, its packed forms, and what prepares its arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import need_int, need_tensor
from fa_ops.compat.flash.arguments import (
    PACKED,
    Window,
    flag,
    infinite_where_empty,
    parts,
    scalar,
    shape,
)
from fa_ops.compat.ring_flash_attn.dense import Result, options_of
from fa_ops.distributed.ulysses import gathered_attention


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What :func:`llama3_flash_attn_varlen_func` takes on one process.

    Args:
        cu_seqlens: int32 ``(B + 1,)``, the boundaries of all packed sequences, of which
            process ``rank`` of ``world_size`` holds part ``rank``. Read by the host.
        causal: as in the call.
        rank: of this process in the group.
        world_size: the number of processes, which divides the number of tokens.

    Returns:
        ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)``: cu_seqlens of
        the sequences among this process's queries, and among the keys of the whole that these
        attend, which are ``local_k_slice`` of it.

    Raises:
        ValueError: cu_seqlens that do not rise from 0, tokens that the processes do not divide, or
            a rank that the group does not have.
        TypeError: cu_seqlens that are not int32.
    """
    if need_tensor("cu_seqlens", cu_seqlens).dtype != torch.int32 or cu_seqlens.dim() != 1:
        dtype = dtype_name(cu_seqlens.dtype)
        found = f"{dtype} of shape {tuple(cu_seqlens.shape)}"
        raise TypeError(f"cu_seqlens must be int32 of shape (B + 1,), got {found}")
    rank, size = need_int("rank", scalar(rank)), need_int("world_size", scalar(world_size))
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, world_size), got {rank} of {size}")
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] or ends != sorted(ends) or ends[-1] % size:
        raise ValueError(
            f"cu_seqlens must rise from 0 to a multiple of world_size {size}, got {ends[:16]}"
        )
    local = ends[-1] // size
    first, last = rank * local, (rank + 1) * local
    here = [(a, b) for a, b in zip(ends, ends[1:]) if a < last and b > first]
    if not here:  # no tokens at all
        here = [(0, 0)]
    start, stop = here[0][0], last if flag("causal", causal) else here[-1][1]
    ends_q = [0, *(min(b, last) - first for _, b in here)]
    ends_k = [0, *(min(b, stop) - start for _, b in here)]
    longest = (max(b - a for a, b in zip(e, e[1:])) for e in (ends_q, ends_k))
    return *map(cu_seqlens.new_tensor, (ends_q, ends_k)), *longest, slice(start, stop)


def llama3_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> Result:  # fmt: skip
    """Attention within packed sequences, of which each process holds a contiguous part.

    Keys and values of all processes are gathered, some heads at a time while the heads before are
    attended, again in the backward pass. Results need no merging.

    Args:
        q: ``(T, Hq, D)``.
        k: ``(T, Hkv, D)``.
        v: ``(T, Hkv, Dv)``.
        cu_seqlens_q: as :func:`llama3_flash_attn_prepare_cu_seqlens` returns it, like the next
            three and `local_k_slice`.
        heads_k_stride: key heads that are gathered at a time; it divides ``Hkv``.
        dropout_p: probability of dropping a weight. The seed is drawn by the group's first
            process. No process knows the sequences of the others, so weights are numbered by their
            query and key in the packed whole: the same ones are dropped for every number of
            processes, but others than :func:`fa_ops.attention_varlen` drops with this seed.
        window_size: needs `causal`, as do `alibi_slopes`.
        return_attn_probs: also return the lse, float32 ``(Hq, T)``, and None.

    All other arguments are those of :func:`ring_flash_attn_func`.

    Returns:
        out ``(T, Hq, Dv)``, or ``(out, lse, None)``.

    Raises:
        ValueError, TypeError: shapes and options that do not fit each other or those of other
            processes, or as :func:`fa_ops.attention_varlen`.
        RuntimeError: torch.distributed is not initialised, or another process raised an error.
        NotImplementedError: a window or ALiBi without causality, where the position of the
            queries in the last sequence is not known.

    Source: Dubey et al., The Llama 3 Herd of Models, section 3.3.2,
    https://arxiv.org/abs/2407.21783.
    """
    shape(PACKED, q=q, k=k, v=v)
    options = options_of(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    packing = (cu_seqlens_q, cu_seqlens_k, scalar(max_seqlen_q), scalar(max_seqlen_k))
    if not isinstance(local_k_slice, slice):
        raise TypeError(f"local_k_slice must be a slice, got {type(local_k_slice).__name__}")
    stride = need_int("heads_k_stride", scalar(heads_k_stride))
    out, lse = gathered_attention(q, k, v, packing, local_k_slice, stride, group, **options)
    with_lse = flag("return_attn_probs", return_attn_probs)
    return (out, infinite_where_empty(lse), None) if with_lse else out


def llama3_flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`llama3_flash_attn_varlen_func` with keys and values in one ``(T, 2, Hkv, D)``."""
    return llama3_flash_attn_varlen_func(q, *parts("kv", kv, 2, "(T, 2, H, D)"), *args, **options)


def llama3_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`llama3_flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``."""
    return llama3_flash_attn_varlen_func(*parts("qkv", qkv, 3, "(T, 3, H, D)"), *args, **options)
