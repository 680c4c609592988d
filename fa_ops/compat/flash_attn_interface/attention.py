"""FlashAttention 3's functions without a cache: dense, packed, and the merging of splits.

Before them stands what FlashAttention 3 alone has: its arguments, and products that no kernel of
ours has at once. Values wider than keys, a second product of queries (`qv`), and 8-bit numbers
where a kernel has no 8-bit form: these are multiplied in bfloat16, from the same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.call import checks
from fa_ops.call.options import MAX_HEAD_DIM, dtype_name
from fa_ops.call.python_types import checked_packing, need_tensor
from fa_ops.compat import flash
from fa_ops.compat.flash import (
    DENSE,
    PACKED,
    Caches,
    Window,
    attend_chunks,
    attend_pages,
    buffers,
    chunk_ranges,
    count,
    flag,
    has_shape,
    heads_first,
    of_sequences,
    scalar,
    score_options,
    shape,
    unit_stride,
    without_gradient,
)
from fa_ops.functions.attention import attention, attention_varlen, merge_states
from fa_ops.ops.autograd import undifferentiable

# Arguments that only FlashAttention 3 has.


def chunk_of(attention_chunk: int) -> int:
    """The length of a chunk of positions; 0: none. Positions are int32, as is the length."""
    chunk = count("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk must not be negative, got {chunk}")
    return min(chunk, 2**31 - 1)


def check_unused(
    num_splits: int, pack_gqa: bool | None, sm_margin: int, scheduler_metadata: Tensor | None = None
) -> None:
    """Raise TypeError for values of wrong types of what only steers FlashAttention 3's kernels."""
    count("num_splits", num_splits)
    count("sm_margin", sm_margin)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)
    if scheduler_metadata is not None:
        need_tensor("scheduler_metadata", scheduler_metadata)


class Scales(NamedTuple):
    """Factors (B, Hkv) of fp8 queries, keys and values, 1 where they are None."""

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def options(self, q: Tensor, batch: int, heads: tuple[int, int]) -> dict[str, Tensor]:
        """The scales of `fa_ops.attention` for fp8 queries; none for others.

        `heads`: of queries and of keys. A scale of a key head is for all query heads of its group.

        Raises:
            TypeError: queries in 16 bits have scales, or scales are not float32.
            ValueError: another shape or device.
        """
        if need_tensor("q", q).dtype != torch.float8_e4m3fn:
            for name, scale in zip(self._fields, self):
                if scale is not None:
                    raise TypeError(
                        f"{name} is for inputs in float8_e4m3fn, but q is {dtype_name(q.dtype)}: "
                        "pass None"
                    )
            return {}
        found, (Hq, Hkv) = {}, heads
        for name, scale in zip(("q_scale", "k_scale", "v_scale"), self):
            if scale is None:
                found[name] = torch.ones(1, device=q.device)
                continue
            given = name.replace("scale", "descale")
            remedy = "pass a factor for each sequence and key head"
            has_shape(given, need_tensor(given, scale), (batch, Hkv), remedy)
            checks.same_device(q, given, scale, "q")
            checks.has_dtype(given, scale, torch.float32)
            found[name] = scale.detach() if scale.requires_grad else scale
        if self.q_descale is not None and Hkv and Hq % Hkv == 0:
            found["q_scale"] = found["q_scale"].repeat_interleave(Hq // Hkv, 1)
        return found


# Values with more features than the GPU kernels take, part by part.


def attend_parts(
    attend: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]], v: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """out, or (out, lse), of a call for values of any width.

    The weights do not depend on the values, so that more than 512 features are attended in calls of
    512 each, all of which compute the scores. The lse is that of the first.
    """
    if not is_limited(v.device):
        return attend(v)
    results = [attend(part) for part in v.split(MAX_HEAD_DIM, -1)]
    if len(results) == 1:
        return results[0]
    if isinstance(results[0], Tensor):
        return torch.cat(results, -1)
    return torch.cat([out for out, _ in results], -1), results[0][1]


def is_limited(device: torch.device) -> bool:
    """Whether the kernels for a device take a limited number of features."""
    return device.type == "cuda"


# qv, queries of the values: scores are ``scale * (q . k + qv . v)``, as those of latent attention.
#
# That is attention of the queries ``(qv, q)`` over the keys ``(v, k)``. GPUs have kernels for such
# head dimensions over caches, so the keys of batches and packed sequences are attended as pages.


def with_features_of_values(q: Tensor, qv: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
    """The queries and caches whose products are those of both: ``(qv, q)`` and ``(v, k)``."""
    k, v, *rest = caches
    check_qv(q, qv, v)
    keys = joined(k, v)
    return torch.cat((qv, q), -1), Caches(keys, keys[..., : v.shape[-1]], *rest)


def check_qv(q: Tensor, qv: Tensor, v: Tensor) -> None:
    """Raise ValueError or TypeError unless qv is of q's tokens and heads and v's features."""
    remedy = "pass a vector of v's features for each query and head"
    has_shape("qv", need_tensor("qv", qv), (*q.shape[:-1], v.shape[-1]), remedy)
    checks.need(qv.dtype == q.dtype, "qv must have q's dtype {}, got {}: pass qv.to(q.dtype)",
                q.dtype, qv.dtype)  # fmt: skip
    checks.same_device(q, "qv", qv, "q")
    checks.same_device(q, "v", v)


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Keys ``(..., Dv + D)`` that begin with the values.

    Nothing is copied where a latent cache holds them so, and k and v are views of it.
    """
    D, Dv = k.shape[-1], v.shape[-1]
    has_shape("k", k, (*v.shape[:-1], D), "pass keys of v's tokens and heads")
    checks.same_device(v, "k", k, "v")
    checks.need(k.dtype == v.dtype, "k must have v's dtype {}, got {}", v.dtype, k.dtype,
                error=TypeError)  # fmt: skip
    if not tracing.is_compiling() and k.stride() == v.stride() and k.stride(-1) == 1:
        behind = k.storage_offset() - v.storage_offset() == Dv
        if behind and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
            return v.as_strided((*v.shape[:-1], Dv + D), v.stride(), v.storage_offset())
    return torch.cat((v, k), -1)


def batch(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, chunk: int, options: dict
) -> tuple[Tensor, Tensor]:
    """out ``(B, Sq, Hq, Dv)`` and lse ``(B, Hq, Sq)``."""
    (B, Sq), Sk = q.shape[:2], k.shape[1]
    check_qv(q, qv, v)
    checks.need(k.shape[0] == B, "k has batch size {}, but q's is {}", k.shape[0], B)
    if not Sk:  # a page holds at least one key
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    ends = torch.arange(B + 1, dtype=torch.int32, device=q.device) * Sq
    lens = torch.full((B,), Sk, dtype=torch.int32, device=q.device)
    table = torch.arange(B, dtype=torch.int32, device=q.device)[:, None]
    flat = (x.flatten(0, 1) for x in (q, qv))
    out, lse = _attend_caches(
        *flat, Caches(k, v, table, k.shape[1]), lens, ends, Sq, chunk, options
    )
    return out.unflatten(0, (B, Sq)), lse.unflatten(1, (B, Sq)).transpose(0, 1)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, packing: flash.Borders, kv_lens: Tensor | None,
    options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``(Tq, Hq, Dv)`` and lse ``(Hq, Tq)``; each key is a page of its own."""
    check_qv(q, qv, v)
    flash.check_packing(packing, (q.shape[0], k.shape[0]))
    ends_q, ends_k, longest_q, longest_k = packing
    tokens = k.shape[0]
    lens = ends_k.diff() if kv_lens is None else torch.minimum(kv_lens, ends_k.diff()).clamp(min=0)
    flash.check_longest("max_seqlen_k", longest_k, lens)
    longest_k = tokens if longest_k is None else min(longest_k, tokens)
    table = ends_k[:-1, None] + torch.arange(longest_k, dtype=torch.int32, device=q.device)
    table = table.clamp(0, max(tokens - 1, 0))
    pages = Caches(k[:, None], v[:, None], table, longest_k)
    return _attend_caches(q, qv, pages, lens.int(), ends_q, longest_q, 0, options)


def _attend_caches(q, qv, caches, lens, ends, longest, chunk, options) -> tuple[Tensor, Tensor]:
    given = (q, qv, *caches[:2])
    q, qv, k, v = (unit_stride(x.detach()) for x in given)
    q, caches = with_features_of_values(q, qv, caches._replace(k=k, v=v))
    options = options | {"num_splits": 0}
    if chunk:
        out, lse = attend_chunks(q, caches, lens, ends, None, chunk, options)
    else:
        out, lse = attend_pages(q, *caches[:2], lens, caches.table, ends, longest, options)
    return undifferentiable("attention with qv has no backward pass", given, out, lse)


# Attention of e4m3 tensors.
#
# Calls that have 8-bit products attend the numbers as they are. In the others the queries are
# widened to bfloat16 and multiplied by the factors of both queries and keys, and the result by
# those of the values, so that keys, values and caches stay as they are.

E4M3, WIDE = torch.float8_e4m3fn, torch.bfloat16
SCALES = "q_scale", "k_scale", "v_scale"
_said: set[str] = set()


class WidenedQueries:
    """Queries of e4m3 tensors in bfloat16, whose scores are those of the tensors and scales.

    Attributes:
        q: ``(..., Hq, D)``, for products with the 8-bit keys.
        qv: ``(..., Hq, Dv)``, for products with the 8-bit values; or ``None``.
    """

    def __init__(
        self, q: Tensor, qv: Tensor | None, keys_and_values: dict[str, Tensor],
        scales: dict[str, Tensor], rows: Tensor,
    ) -> None:  # fmt: skip
        """`scales` are those of :meth:`Scales.options`; `rows` says which row of them a token has.

        `rows` broadcasts to the tokens; rows behind the last one have factors of 1. Keys and
        values, by name, are only checked.
        """
        check(q, **keys_and_values)
        if qv is not None:
            check_qv(q, qv, [*keys_and_values.values()][1])
        factors = [_by_token(scales[name], rows, q.shape[-2]) for name in SCALES]
        wide = q.float() * factors[0]
        self.q = (wide * factors[1]).to(WIDE)
        self.qv = None if qv is None else (qv.float() * factors[0] * factors[2]).to(WIDE)
        self._values = factors[2]

    def result(self, out: Tensor) -> Tensor:
        """out ``(..., Hq, Dv)`` of the 8-bit values, times their factors."""
        return (out.float() * self._values).to(WIDE)


def _by_token(scale: Tensor, rows: Tensor, heads: int) -> Tensor:
    """The scale (1,) or (B, H) as a factor of tokens (..., heads, features)."""
    if scale.dim() == 1:
        return scale
    scale = torch.nn.functional.pad(scale, (0, 0, 0, 1), value=1.0)
    return scale[rows].repeat_interleave(heads // scale.shape[1], -1)[..., None]


def rows_of_tokens(ends: Tensor, tokens: int) -> Tensor:
    """The sequence of each packed token; for tokens behind all of them their number."""
    token = torch.arange(tokens, device=ends.device)
    return torch.searchsorted(ends[1:].contiguous(), token, right=True)


def say(level: int, **arguments: object) -> None:
    """Warn once of each of these that is given: with it products are not computed in 8 bits.

    `level` is the stack level of the caller. Compiled functions warn when they are traced.
    """
    for name, value in arguments.items():
        if value is not None:
            _warn_once(name, level + 1)


@torch.compiler.assume_constant_result
def _warn_once(name: str, level: int) -> None:
    if name not in _said:
        _said.add(name)
        warnings.warn(
            f"no kernel has 8-bit products with {name}: products of float8_e4m3fn tensors are "
            "computed in bfloat16, which takes about twice as long on a GPU",
            RuntimeWarning,
            stacklevel=level,
        )


def in_32_bits(x: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is a smaller one of floating point."""
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def check(q: Tensor, **keys_and_values: Tensor) -> None:
    """Raise TypeError or ValueError unless keys and values fit the e4m3 queries.

    The first are the keys, all in layouts that end with ``(H, D)``.
    """
    for name, x in keys_and_values.items():
        checks.same_device(q, name, x, "q")
        checks.need(x.dtype == q.dtype, "{} is {}, but q is {}", name, x.dtype, q.dtype,
                    error=TypeError)  # fmt: skip
    (Hq, D), (Hkv, Dk), (Hv, _) = (x.shape[-2:] for x in (q, *keys_and_values.values()))
    checks.heads(Hq, Hkv, Hv, D, Dk, *keys_and_values)


def of_used_parts(scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales of a packing of the used parts of sequences, and of what lies between two."""
    return {n: s if s.dim() == 1 else s.repeat_interleave(2, 0)[:-1] for n, s in scales.items()}


def without_backward(inputs: tuple[Tensor | None, ...], result: tuple) -> tuple[Tensor, ...]:
    """The tensors of a result, whose backward pass raises if one of the inputs requires grad."""
    message = "attention of float8_e4m3fn tensors has no backward pass"
    return undifferentiable(message, [x for x in inputs if x is not None], *result)


def attend_numbers(
    q: Tensor, caches: Caches, lens: Tensor, ends: Tensor | None, longest: int | None, options: dict
) -> tuple[Tensor, Tensor]:
    """out and lse in the layout of q: rows ``(B, Sq, Hq, D)`` or packed ``(Tq, Hq, D)``.

    Args:
        ends: int32 ``(B + 1,)``, the cumulative numbers of packed queries; ``None``: rows.
        longest: upper bound on the number of queries of a packed sequence.
        options: those of :func:`fa_ops.attention_varlen`, and ``num_splits``, which is ignored.
    """
    rows, caches = q.shape[:2], caches.in_pages()
    options = {name: value for name, value in options.items() if name != "num_splits"}
    packed, longest = (q, longest) if ends is not None else (q.flatten(0, 1), rows[1])
    if ends is None:
        ends = torch.arange(rows[0] + 1, dtype=torch.int32, device=q.device) * rows[1]
    out, lse = attention_varlen(
        packed, caches.k, caches.v, ends, None, longest, kv_lens=lens, page_table=caches.table,
        return_lse=True, **options,
    )  # fmt: skip
    if packed is q:
        return out, lse
    return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)


def attend_none(q: Tensor, caches: Caches, options: dict) -> None:
    """Raise what attention of packed queries over these caches would, by a call without rows."""
    none = torch.zeros(1, dtype=torch.int32, device=q.device)
    options = options | {n: options[n][:0] for n in SCALES if options[n].dim() > 1}
    attend_numbers(q[:0], caches._replace(table=caches.table[:0]), none[:0], none, 0, options)


# flash_attn_func and flash_attn_qkvpacked_func of FlashAttention 3.

# Tensor, or tuple[Tensor, Tensor] on request: users of the original have no types
Result = Any


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Attention of q ``(B, Sq, Hq, D)`` over k ``(B, Sk, Hkv, D)`` and v ``(B, Sk, Hkv, Dv)``.

    Args:
        softmax_scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        causal: causal mask, aligned at the bottom right.
        qv: the shape of out, queries of the values: scores are ``scale * (q . k + qv . v)`` and
            the default scale ``1 / sqrt(D + Dv)``; has no backward pass.
        q_descale: float32 ``(B, Hkv)``, the factors of fp8 queries by sequence and key head, or
            ``None``: 1. fp8 inputs have a result in bfloat16; their backward pass raises. With
            ``qv`` the products are in bfloat16, of the same numbers.
        k_descale: the same of fp8 keys.
        v_descale: the same of fp8 products.
        window_size: number of visible keys on either side of a query's own position; negative:
            unbounded.
        attention_chunk: a query at position p attends only keys of its chunk, those from
            ``p // attention_chunk * attention_chunk`` on; 0: all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        num_splits: no result depends on it, as on ``pack_gqa`` and ``sm_margin``; all are ignored.
        deterministic: whether the backward pass is bitwise repeatable.
        return_attn_probs: also return the lse, float32 ``(B, Hq, Sq)``, -inf in rows that attend
            no key.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention`.

    Source: Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.
    """
    shape(DENSE, q=q, k=k, v=v)
    scales = Scales(q_descale, k_descale, v_descale)
    eight_bit = scales.options(q, q.shape[0], (q.shape[2], k.shape[2]))
    check_unused(num_splits, pack_gqa, sm_margin)
    options = score_options(softmax_scale, causal, window_size, softcap)
    chunk = chunk_of(attention_chunk)
    deterministic = flag("deterministic", deterministic)
    with_lse = flag("return_attn_probs", return_attn_probs)
    inputs = q, k, v, qv, *scales
    if eight_bit:
        q, k, v = map(without_gradient, (q, k, v))
    if qv is not None and eight_bit:
        rows = torch.arange(q.shape[0], device=q.device)[:, None]
        wide = WidenedQueries(q, without_gradient(qv), {"k": k, "v": v}, eight_bit, rows)
        say(3, qv=qv)
        out, lse = batch(wide.q, k, v, wide.qv, chunk, options)
        result = wide.result(out), lse
    elif qv is not None:
        result = batch(q, k, v, qv, chunk, options)
    else:
        if chunk:
            options["key_ranges"] = chunk_ranges(q.shape[1], k.shape[1], chunk, q.device)
        options |= eight_bit or {"deterministic": deterministic}
        options["return_lse"] = with_lse
        q, k, v = map(heads_first, (q, k, v))
        result = attend_parts(lambda part: attention(q, k, part, **options), v)
        result = (result[0].transpose(1, 2), result[1]) if with_lse else (result.transpose(1, 2),)
    if eight_bit:
        result = without_backward(inputs, result)
    return result if with_lse else result[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of one tensor.

    Args:
        qkv: ``(B, S, 3, H, D)``, or ``(B, S, Hq + 2 Hkv, D)`` with ``num_heads_q``.
        num_heads_q: ``Hq``.

    Raises:
        ValueError: another shape.
    """
    if num_heads_q is not None:
        num_heads_q = count("num_heads_q", num_heads_q, "an int or None")
    if need_tensor("qkv", qkv).dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads, heads], 2)
    else:
        raise ValueError(
            "qkv must have shape (B, S, 3, H, D), or (B, S, Hq + 2 Hkv, D) with num_heads_q, got "
            f"{tuple(qkv.shape)} and {num_heads_q}: pass torch.stack([q, k, v], 2)"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


# flash_attn_varlen_func of FlashAttention 3.


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
        wide = rows_of_tokens(cu_seqlens_q, q.shape[0]) if qv is not None or chunk else None
        if seqused_q is not None and wide is None:
            eight_bit = of_used_parts(eight_bit)
        given = packing, kv_lens, options, with_lse
        result = _attend_numbers(q, k, v, qv, eight_bit, wide, *given)
        result = without_backward((q, k, v, qv, *scales), result)
    else:
        if qv is None:
            options["deterministic"] = deterministic
        result = _attend(q, k, v, qv, packing, kv_lens, options, with_lse)
    return result if with_lse else result[0]


def _attend(q, k, v, qv, packing, kv_lens, options, with_lse) -> tuple[Tensor, ...]:
    """out, with or without lse."""
    if qv is not None:
        return attend_packed(q, k, v, qv, packing, kv_lens, options)
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
    wide = WidenedQueries(q, qv, {"k": k, "v": v}, scales, rows)
    say(4, qv=qv, attention_chunk=True if qv is None else None)
    if qv is None:  # pages may stay in 8 bits
        k, v = k.to(WIDE), v.to(WIDE)
    out, *lse = _attend(wide.q, k, v, wide.qv, *given)
    return wide.result(out), *lse


def packed(
    given: tuple, seqused_q: Tensor | None, seqused_k: Tensor | None, chunk: int,
    tokens: tuple[int, int],
) -> tuple[flash.Borders, Tensor | None]:  # fmt: skip
    """The packing of the used parts and chunks of sequences, and their numbers of keys.

    `tokens` are the numbers of queries and keys.
    """
    packing = checked_packing(*given)
    ends_q, ends_k, longest_q, longest_k = packing
    sequences = ends_q.numel() - 1
    of_sequences("seqused_q", seqused_q, sequences)
    of_sequences("seqused_k", seqused_k, sequences)
    if seqused_q is None and not chunk:
        return packing, seqused_k
    flash.check_packing(packing, tokens)
    parts = flash.used_parts(ends_q, ends_k, seqused_q, seqused_k)
    flash.check_longest("max_seqlen_q", longest_q, parts[1])
    flash.check_longest("max_seqlen_k", longest_k, parts[3])
    if not sequences:
        return packing, seqused_k
    if chunk:
        parts = flash.chunk_parts(parts, chunk, tokens[0] if longest_q is None else longest_q)
    return flash.packing_of(parts, longest_q, longest_k)


# flash_attn_combine: results over parts of the keys become the result over all of them.

_FEATURES = 256  # of one call: what all backends take


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint sets of keys, as :func:`fa_ops.merge_states`.

    Args:
        out_partial: ``(N, B, S, H, Dv)`` or ``(N, T, H, Dv)``, float32.
        lse_partial: ``(N, B, S, H)`` or ``(N, T, H)``, float32.
        out: where the result is written.
        out_dtype: the dtype of the result; ``None``: that of ``out_partial``.

    Returns:
        out ``(B, S, H, Dv)`` or ``(T, H, Dv)``, and the lse, of its shape without ``Dv``.

    Raises:
        ValueError, TypeError: as :func:`fa_ops.merge_states`.
    """
    need_tensor("lse_partial", lse_partial)
    if not isinstance(out_dtype, torch.dtype | None):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {out_dtype!r}")
    need_tensor("out_partial", out_partial)
    checks.states(out_partial, lse_partial, ("out_partial", "lse_partial"))
    buffers(out=(out, out_partial.shape[1:]))
    parts = out_partial.split(_FEATURES, -1)
    merged = [merge_states(part, lse_partial) for part in parts]
    found = torch.cat([part for part, _ in merged], -1) if len(merged) > 1 else merged[0][0]
    found = found if out_dtype is None else found.to(out_dtype)
    return (found if out is None else out.copy_(found)), merged[0][1]
