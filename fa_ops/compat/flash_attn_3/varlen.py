"""flash_attn_varlen_func of FlashAttention 3."""

from __future__ import annotations

from torch import Tensor

from fa_ops.api import attention_varlen
from fa_ops.argument_types import checked_packing
from fa_ops.compat.flash import segments
from fa_ops.compat.flash.arguments import (
    PACKED,
    Window,
    flag,
    of_sequences,
    scalar,
    score_options,
    shape,
    unit_stride,
)
from fa_ops.compat.flash.cache import without_gradient
from fa_ops.compat.flash_attn_3 import numbers
from fa_ops.compat.flash_attn_3 import qv as values
from fa_ops.compat.flash_attn_3.arguments import Scales, check_unused, chunk_of
from fa_ops.compat.flash_attn_3.dense import Result
from fa_ops.compat.flash_attn_3.wide_values import attend_parts
from fa_ops.types import Packing


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
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
        seqused_q: int32 ``(B,)``: only the first queries of a sequence are used, and the others
            give 0; ``None``: all.
        seqused_k: the same for keys.
        softmax_scale: as in :func:`flash_attn_func`, as all arguments that are not here.
        return_attn_probs: also return the lse, float32 ``(Hq, Tq)``, -inf in rows that attend no
            key.

    Returns:
        out ``(Tq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention_varlen`.

    Source: Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.
    """
    shape(PACKED, q=q, k=k, v=v)
    scales = Scales(q_descale, k_descale, v_descale)
    check_unused(num_splits, pack_gqa, sm_margin)
    given = cu_seqlens_q, cu_seqlens_k, scalar(max_seqlen_q), scalar(max_seqlen_k)
    tokens = q.shape[0], k.shape[0]
    chunk = chunk_of(attention_chunk)
    packing, kv_lens = packed(given, seqused_q, seqused_k, chunk, tokens)
    options = score_options(softmax_scale, causal, window_size, softcap)
    deterministic = flag("deterministic", deterministic)
    with_lse = flag("return_attn_probs", return_attn_probs)
    eight_bit = scales.options(q, cu_seqlens_q.numel() - 1, (q.shape[1], k.shape[1]))
    if eight_bit:
        wide = numbers.rows_of_tokens(cu_seqlens_q, q.shape[0]) if qv is not None or chunk else None
        if seqused_q is not None and wide is None:
            eight_bit = numbers.of_used_parts(eight_bit)
        given = packing, kv_lens, options, with_lse
        result = _attend_numbers(q, k, v, qv, eight_bit, wide, *given)
        result = numbers.without_backward((q, k, v, qv, *scales), result)
    else:
        if qv is None:
            options["deterministic"] = deterministic
        result = _attend(q, k, v, qv, packing, kv_lens, options, with_lse)
    return result if with_lse else result[0]


def _attend(q, k, v, qv, packing, kv_lens, options, with_lse) -> tuple[Tensor, ...]:
    """out, with or without lse."""
    if qv is not None:
        return values.packed(q, k, v, qv, packing, kv_lens, options)
    options = options | {"kv_lens": kv_lens, "return_lse": with_lse}
    q, k, v = map(unit_stride, (q, k, v))
    result = attend_parts(lambda part: attention_varlen(q, k, part, *packing, **options), v)
    return result if with_lse else (result,)


def _attend_numbers(q, k, v, qv, scales, rows, *given) -> tuple[Tensor, ...]:
    """The same of e4m3 tensors; with the rows of tokens in `scales` by products in 16 bits."""
    q, k, v = map(without_gradient, (q, k, v))
    if rows is None:
        packing, kv_lens, options, with_lse = given
        return _attend(q, k, v, None, packing, kv_lens, options | scales, with_lse)
    qv = None if qv is None else without_gradient(qv)
    wide = numbers.Widened(q, qv, {"k": k, "v": v}, scales, rows)
    numbers.say(4, qv=qv, attention_chunk=True if qv is None else None)
    if qv is None:  # pages may stay in 8 bits
        k, v = k.to(numbers.WIDE), v.to(numbers.WIDE)
    out, *lse = _attend(wide.q, k, v, wide.qv, *given)
    return wide.result(out), *lse


def packed(
    given: tuple, seqused_q: Tensor | None, seqused_k: Tensor | None, chunk: int,
    tokens: tuple[int, int],
) -> tuple[Packing, Tensor | None]:  # fmt: skip
    """The packing of the used parts and chunks of sequences, and their numbers of keys.

    `tokens` are the numbers of queries and keys.
    """
    packing = checked_packing(*given)
    sequences = packing.cu_seqlens_q.numel() - 1
    of_sequences("seqused_q", seqused_q, sequences)
    of_sequences("seqused_k", seqused_k, sequences)
    if seqused_q is None and not chunk:
        return packing, seqused_k
    ends_q, ends_k, longest_q, longest_k = packing
    segments.check(packing, tokens)
    parts = segments.used(ends_q, ends_k, seqused_q, seqused_k)
    segments.check_longest("max_seqlen_q", longest_q, parts[1])
    segments.check_longest("max_seqlen_k", longest_k, parts[3])
    if not sequences:
        return packing, seqused_k
    if chunk:
        parts = segments.chunks(parts, chunk, tokens[0] if longest_q is None else longest_q)
    return segments.packing_of(parts, longest_q, longest_k)
