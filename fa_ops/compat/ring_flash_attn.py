"""The functions of ring-flash-attention, on fa_ops.distributed:

    from fa_ops.compat.ring_flash_attn import zigzag_ring_flash_attn_func

After `fa_ops.compat.install("ring_flash_attn")`, `import ring_flash_attn` finds them. Arguments,
their order and defaults, layouts and which tokens each process holds are those of
ring-flash-attention 0.1.7. They run over NCCL and gloo, and are differentiable.

Differences: windows are those of the whole sequence, where the original applies them to each
block of keys; ALiBi is supported; gradients are summed over processes in float32; dropout has one
seed, drawn by the group's first process, and its backward pass drops what the forward pass
dropped; a window without causality in the llama3 functions raises NotImplementedError; arguments
are compared between processes before anything is sent. The striped functions do not exist here. In
place of the adapter for transformers there is `hf_integration.context_parallel`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fa_ops.backends import dropout
from fa_ops.call import python_types
from fa_ops.call.call import Call, Saved, attention_call
from fa_ops.call.options import dtype_name
from fa_ops.call.python_types import need_int, need_tensor
from fa_ops.compat.flash import (
    DENSE,
    PACKED,
    Window,
    flag,
    heads_first,
    infinite_where_empty,
    number,
    parts,
    scalar,
    shape,
    sides,
)
from fa_ops.distributed import SequenceLayout, context_parallel_attention, ring_steps, transport
from fa_ops.distributed.layout import Members, groups_of, members, merged, outside_graphs
from fa_ops.distributed.ring_steps import sum_dtype
from fa_ops.distributed.schedule import on_host
from fa_ops.distributed.transport import Exchange, Transfer, agreed_seed, all_gather
from fa_ops.ops.autograd import differentiable_once

__version__ = "0.1.7"  # the release whose functions these are
__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

# Tensor, or tuple[Tensor, Tensor, None] on request: users of the original have no types
Result = Any


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


def ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`ring_flash_attn_func` with keys and values in one tensor ``(B, S, 2, Hkv, D)``."""
    return ring_flash_attn_func(q, *parts("kv", kv, 2, "(B, S, 2, H, D)"), *args, **options)


def ring_flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`ring_flash_attn_func` of one tensor ``(B, S, 3, H, D)``."""
    return ring_flash_attn_func(*parts("qkv", qkv, 3, "(B, S, 3, H, D)"), *args, **options)


def zigzag_ring_flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *args: Any, **options: Any
) -> Result:
    """:func:`zigzag_ring_flash_attn_func` with keys and values in one ``(B, S, 2, Hkv, D)``."""
    return zigzag_ring_flash_attn_func(q, *parts("kv", kv, 2, "(B, S, 2, H, D)"), *args, **options)


def zigzag_ring_flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
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


def ring_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, *args: Any, **options: Any
) -> Result:
    """:func:`ring_flash_attn_varlen_func` with keys and values in one ``(T, 2, Hkv, D)``."""
    return ring_flash_attn_varlen_func(q, *parts("kv", kv, 2, "(T, 2, H, D)"), *args, **options)


def ring_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`ring_flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``."""
    return ring_flash_attn_varlen_func(*parts("qkv", qkv, 3, "(T, 3, H, D)"), *args, **options)


def zigzag_ring_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, *args: Any, **options: Any
) -> Result:
    """:func:`zigzag_ring_flash_attn_varlen_func` with keys and values in one ``(T, 2, Hkv, D)``."""
    packed = parts("kv", kv, 2, "(T, 2, H, D)")
    return zigzag_ring_flash_attn_varlen_func(q, *packed, *args, **options)


def zigzag_ring_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`zigzag_ring_flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``."""
    packed = parts("qkv", qkv, 3, "(T, 3, H, D)")
    return zigzag_ring_flash_attn_varlen_func(*packed, *args, **options)


def _attend_packed(q, k, v, cu_seqlens, options: dict, with_lse, group, zigzag: bool) -> Result:
    shape(PACKED, q=q, k=k, v=v)
    _, size = members(group)
    ends = tuple(on_host(need_tensor("cu_seqlens", cu_seqlens)).flatten().tolist())
    _check_parts(ends, q.shape[0], 2 if zigzag and size > 1 else 1)
    whole, layout = _whole(ends, size, zigzag)
    tensors = tuple(x.unsqueeze(0) for x in (q, k, v))
    out, lse = in_ring(tensors, options | {"cu_seqlens": whole}, group, layout)
    out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse, None) if flag("return_attn_probs", with_lse) else out


def _check_parts(ends: tuple[int, ...], tokens: int, multiple: int) -> None:
    lengths = [b - a for a, b in zip(ends, ends[1:])]
    if not lengths or ends[0] or ends[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to q's {tokens} tokens, got {list(ends[:16])}: pass the "
            "boundaries of this process's parts"
        )
    odd = [n for n in lengths if n % multiple]
    if odd:
        raise ValueError(
            f"cu_seqlens must have parts of even lengths in zigzag order, got {odd[:16]}: pad the "
            "sequences to multiples of twice the number of processes"
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


# llama3_flash_attn_varlen_func, its packed forms, and what prepares its arguments.


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
            f"cu_seqlens must rise from 0 to a multiple of world_size {size}, got {ends[:16]}: pad "
            "the last sequence"
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


def llama3_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, *args: Any, **options: Any
) -> Result:
    """:func:`llama3_flash_attn_varlen_func` with keys and values in one ``(T, 2, Hkv, D)``."""
    return llama3_flash_attn_varlen_func(q, *parts("kv", kv, 2, "(T, 2, H, D)"), *args, **options)


def llama3_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """:func:`llama3_flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``."""
    return llama3_flash_attn_varlen_func(*parts("qkv", qkv, 3, "(T, 3, H, D)"), *args, **options)


# Attention of packed queries over gathered keys, some key heads at a time.
#
# While some heads are attended, those of the next piece are gathered. Each process knows only the
# mask of its own queries. In the backward pass keys and values are gathered again, and the owner of
# keys sums their gradients in float32.

Packing = tuple[Tensor, Tensor, int, int]


@outside_graphs
def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, keys: slice, heads: int,
    group: dist.ProcessGroup | None, *, is_causal: bool, window: Window | None,
    scale: float | None, alibi_slopes: Tensor | None, deterministic: bool, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``(T, Hq, Dv)`` and lse ``(Hq, T)`` of this process's queries. Differentiable.

    Args:
        q: ``(T, Hq, D)``.
        k: ``(T, Hkv, D)``, gathered in the order of the processes.
        v: ``(T, Hkv, Dv)``.
        packing: cu_seqlens and maximal lengths of the queries, and of the keys in `keys`.
        keys: of the gathered keys, those that the queries attend.
        heads: key heads of a piece.
        group: ``None``: all processes.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: see
            :func:`llama3_flash_attn_varlen_func`.
    """
    (members,) = groups_of(group)
    left, right = python_types.sides(window)
    options = {
        "is_causal": is_causal, "scale": scale, "window_left": left, "window_right": right,
        "deterministic": deterministic,
    }  # fmt: skip
    job = Gathering(members, packing, keys, heads, alibi_slopes, options)
    with transport.shared_errors(members, q.device, True) as words:
        shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v)))
        given = {n: x for n, x in options.items() if n != "deterministic"}
        slopes = alibi_slopes is not None
        words.append(
            f"{shapes} of {dtype_name(q.dtype)}, {heads} heads at a time, {given}, "
            f"alibi_slopes {slopes}, dropout_p {dropout_p}"
        )
        _check_gathering(q, k, v, job, dropout_p)
    if dropout_p > 0:
        seed = agreed_seed(q, dropout_p, (members,), None)
        place = q.shape[0], q.shape[1], members.rank, keys.start
        job = job._replace(dropout=PackedDropout.of(dropout_p, seed, packing[:2], options, *place))
    return _GatheredAttention.apply(q, k, v, job)


class Gathering(NamedTuple):
    """What a call computes, besides tensors that may require grad."""

    members: Members
    packing: Packing
    keys: slice
    heads: int
    slopes: Tensor | None
    options: dict
    dropout: PackedDropout | None = None

    def pieces(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, dict]]:
        """The query heads and key heads of each piece, and the operator's options."""
        group = q.shape[1] // k.shape[1]
        for first in range(0, k.shape[1], self.heads):
            of_keys = slice(first, first + self.heads)
            of_queries = slice(of_keys.start * group, of_keys.stop * group)
            slopes = None if self.slopes is None else self.slopes[..., of_queries]
            yield of_queries, of_keys, self.options | {"alibi_slopes": slopes}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice, options: dict
    ) -> tuple[Tensor, Tensor]:
        """out and lse of a piece, which has these query heads."""
        if self.dropout is not None:
            return self.dropout.forward(q, k, v, heads, options)
        return torch.ops.fa.attention_varlen(q, k, v, *self.packing, **options)

    def gradients(self, saved: tuple, heads: slice, options: dict) -> Sequence[Tensor]:
        """The gradients of q, k and v of a piece; `saved` as of the operator's backward pass."""
        if self.dropout is not None:
            return self.dropout.backward(*saved, heads, options)
        return torch.ops.fa.attention_varlen_backward(*saved, *self.packing, **options)[:3]

    def gathered(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of all processes for each piece, while the next ones are gathered."""
        firsts = range(0, k.shape[1], self.heads)
        arriving = self._gather(k, v, firsts[0]) if firsts else None
        for following in [*firsts[1:], None]:
            if arriving is None:
                return
            whole, waiting = arriving
            arriving = None if following is None else self._gather(k, v, following)
            waiting.wait()
            yield whole

    def _gather(self, k: Tensor, v: Tensor, first: int) -> tuple[tuple[Tensor, Tensor], Transfer]:
        mine = [x[:, first : first + self.heads].contiguous() for x in (k, v)]
        whole = tuple(x.new_empty(self.members.size * x.shape[0], *x.shape[1:]) for x in mine)
        what = f"the step of key heads {first} to {first + self.heads} (keys)"
        return whole, all_gather(whole, mine, Exchange(self.members), what)

    def returned(self, grads: Tensor, heads: slice) -> Tensor:
        """The sum over processes of the gradients of this process's keys, in float32."""
        received, group = torch.empty_like(grads), self.members.group
        work = dist.all_to_all_single(received, grads, group=group, async_op=not grads.is_cuda)
        what = f"the step of key heads {heads.start} to {heads.stop} (gradients)"
        Transfer([work], [grads], what, None).wait()
        return received.unflatten(0, (self.members.size, -1)).sum(0, dtype=sum_dtype(grads))


class _GatheredAttention(torch.autograd.Function):
    """apply(q, k, v, job) -> (out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, job: Gathering):
        """Attend piece after piece."""
        outs, lses = [q.new_empty(q.shape[0], 0, v.shape[2])], []
        lses.append(q.new_empty(0, q.shape[0], dtype=sum_dtype(q)))
        for whole, (of_queries, _, options) in zip(job.gathered(k, v), job.pieces(q, k)):
            keys, values = (x[job.keys] for x in whole)
            out, lse = job.attend(q[:, of_queries], keys, values, of_queries, options)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 1), torch.cat(lses)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("attention over gathered heads")
    def backward(ctx, tensors, grad_out, grad_lse):
        """Gradients of q, k and v."""
        q, k, v, out, lse = tensors
        job = ctx.job
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for whole, (of_queries, of_keys, options) in zip(job.gathered(k, v), job.pieces(q, k)):
            saved = (
                grad_out[:, of_queries], None if grad_lse is None else grad_lse[of_queries],
                q[:, of_queries], *(x[job.keys] for x in whole), out[:, of_queries],
                lse[of_queries],
            )  # fmt: skip
            grads = job.gradients(saved, of_queries, options)
            dq[:, of_queries] = grads[0]
            for total, like, part in zip((dk, dv), whole, grads[1:], strict=True):
                sent = torch.zeros_like(like)
                sent[job.keys] = part
                total[:, of_keys] = job.returned(sent, of_keys)
        return dq, dk, dv, None


def _check_gathering(q: Tensor, k: Tensor, v: Tensor, job: Gathering, dropout_p: float) -> None:
    """Raise the errors of this process's call."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    keys, tokens = job.keys, k.shape[0] * job.members.size
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k must be as long as q, got {k.shape[0]} and {q.shape[0]} tokens: pass this "
            "process's part of both"
        )
    if job.heads < 1 or k.shape[1] % job.heads:
        raise ValueError(
            f"heads_k_stride must divide k's {k.shape[1]} heads, got {job.heads}: 1 always does"
        )
    if keys.step not in (None, 1) or not 0 <= keys.start <= keys.stop <= tokens:
        raise ValueError(
            f"local_k_slice must lie within the {tokens} tokens of all processes, got {keys}: pass "
            "that of llama3_flash_attn_prepare_cu_seqlens"
        )
    placed = {"window_size": job.options["window_left"] >= 0 or job.options["window_right"] >= 0}
    placed["alibi_slopes"] = job.slopes is not None
    for name, given in placed.items():
        if given and not job.options["is_causal"]:
            raise NotImplementedError(
                f"{name} needs causal=True: without it the position of the queries in the last "
                "sequence is not known"
            )
    attended = keys.stop - keys.start
    on_meta = (x.new_empty(attended, *x.shape[1:], device="meta") for x in (k, v))
    ends = (x.to("meta") for x in job.packing[:2])
    slopes = None if job.slopes is None else job.slopes.detach().to("meta")
    torch.ops.fa.attention_varlen(
        q.detach().to("meta"), *on_meta, *ends, *job.packing[2:],
        **job.options | {"alibi_slopes": slopes},
    )  # fmt: skip


# Dropout of packed queries over gathered keys, of whose sequences a process knows its own alone.
#
# A weight is numbered by its query and its key in the packed whole, so that it is dropped or kept
# for any number of processes alike. The operator for packed sequences numbers weights in each
# sequence; the one for dense calls takes a word for each row, and key ranges in place of
# cu_seqlens.


class PackedDropout(NamedTuple):
    """What the queries of a process attend and drop."""

    p: float
    words: Tensor  # int32 (1, Hq, T), for the keys that the process attends
    ranges: Tensor  # int32 (1, 1, T, 2), among these keys

    @classmethod
    def of(
        cls, p: float, seed: Tensor, cu_seqlens: tuple[Tensor, Tensor], options: dict, T: int,
        Hq: int, rank: int, first_key: int,
    ) -> PackedDropout:  # fmt: skip
        """For `T` queries of process `rank`, whose keys begin at `first_key` of the whole.

        `cu_seqlens` are those of the sequences among queries and among keys, int32 (B + 1,).
        """
        heads = torch.arange(Hq, device=seed.device).view(1, -1, 1)
        words = dropout.row_words(seed, heads, torch.arange(T, device=seed.device) + rank * T)
        window = options["window_left"], options["window_right"]
        ranges = key_ranges(*cu_seqlens, T, options["is_causal"], *window)
        return cls(p, dropout.from_key(words, first_key), ranges)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice, options: dict
    ) -> tuple[Tensor, Tensor]:
        """out (T, heads, Dv) and lse (heads, T) of some heads, as the packed operator returns."""
        out, lse = ring_steps.forward(self._call(q, k, v, heads, options))
        return _packed(out), lse.squeeze(0)

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor, heads: slice, options: dict,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of q, k and v."""
        lse, grad_lse = (None if x is None else x.unsqueeze(0) for x in (lse, grad_lse))
        saved = Saved(_dense(grad_out), grad_lse, _dense(out), lse)
        call = self._call(q, k, v, heads, options)._replace(saved=saved)
        return [_packed(x) for x in ring_steps.backward(call)]

    def _call(self, q: Tensor, k: Tensor, v: Tensor, heads: slice, options: dict) -> Call:
        # causal and window are in the ranges; with ALiBi, which needs causality, the last query
        # has the position of the last key, in dense calls too
        return attention_call(
            *map(_dense, (q, k, v)), dropout_p=self.p, scale=options["scale"],
            alibi_slopes=options["alibi_slopes"], key_ranges=self.ranges,
            dropout_seed=self.words[:, heads].contiguous(), deterministic=options["deterministic"],
        )  # fmt: skip


def key_ranges(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, T: int, is_causal: bool, left: int, right: int
) -> Tensor:
    """The keys of each packed query, int32 (1, 1, T, 2); (0, 0) outside of every sequence.

    Sequences are aligned at the last query and the last key, as in `attention_varlen`.
    """
    ends_q, ends_k = cu_seqlens_q.long(), cu_seqlens_k.long()
    i = torch.arange(T, device=ends_q.device)
    which = torch.searchsorted(ends_q[1:].contiguous(), i, right=True)
    which = which.clamp(max=max(0, ends_q.numel() - 2))
    lo, hi = ends_k[which], ends_k[which + 1]
    position = i + hi - ends_q[which + 1]
    if is_causal:
        hi = hi.minimum(position + 1)
    if right >= 0:
        hi = hi.minimum(position + right + 1)
    if left >= 0:
        lo = lo.maximum(position - left)
    there = (lo < hi) & (i >= ends_q[0]) & (i < ends_q[-1])
    ranges = torch.where(there.unsqueeze(1), torch.stack((lo, hi), 1), 0)
    return ranges.to(torch.int32).view(1, 1, T, 2)


def _dense(x: Tensor) -> Tensor:
    """(1, H, T, D) of (T, H, D)."""
    return x.transpose(0, 1).unsqueeze(0)


def _packed(x: Tensor) -> Tensor:
    """(T, H, D) of (1, H, T, D)."""
    return x.squeeze(0).transpose(0, 1)
