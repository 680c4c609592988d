"""The public functions: collect tensors and scalars, which `ops.eager` runs.

Shapes, dtypes and devices are checked when a call is planned, with the same messages for functions
and operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.call.call import DENSE, PACKED
from fa_ops.call.options import NO_OPERANDS, Operands, dtype_name, new_operands
from fa_ops.call.python_types import (
    Window,
    is_proxy,
    need_bool,
    need_tensor,
    probability,
    read_scale,
    refuse_unknown,
    sides,
)
from fa_ops.functions.largest_scores import with_aux
from fa_ops.ops import autocast, dense, masks, merge, seeds, varlen
from fa_ops.ops.eager import PublicFunction, run
from fa_ops.ops.schemas import Schema

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
    from typing_extensions import Unpack

    from fa_ops.call.python_types import DenseOptions, PackedOptions

DENSE_FUNCTION = PublicFunction(
    DENSE, lambda call, with_lse: _OF_LSE[with_lse], autocast.cast_attention, dense.OPERATORS
)
_OF_LSE = {False: Schema(dense.ATTENTION, DENSE), True: dense.OPERATORS.forward}
_VARLEN = PublicFunction(
    PACKED, lambda call, with_lse: varlen.OPERATORS.forward, autocast.cast_attention,
    varlen.OPERATORS,
)  # fmt: skip


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False,
    *, return_lse: Literal[False] = False, return_aux: None = None, **options: Unpack[DenseOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False,
    *, return_lse: Literal[True], return_aux: None = None, **options: Unpack[DenseOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False,
    *, return_lse: bool, return_aux: None = None, **options: Unpack[DenseOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False,
    *, return_aux: AuxRequest, return_lse: Literal[False] = False, **options: Unpack[DenseOptions],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    mask_blocks: Tensor | None = None,
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    r"""Fused attention: ``softmax(scale * query @ key.T + ...) @ value``, the scores never stored.

    The first six arguments are those of ``F.scaled_dot_product_attention``, in its order. Each key
    head serves ``Hq / Hkv`` query heads (GQA, MQA). A row with nothing to attend gives 0, its lse
    is -inf.

    Note:
        Positions are aligned at the **bottom right**: query ``i`` of ``Sq`` stands at key position
        ``i + Sk - Sq``, as cached decoding needs. With ``Sq == Sk`` this is SDPA's meaning.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``Sq`` and ``Sk`` lengths, ``D`` head dimension, ``Dv`` value head dimension.

    Args:
        query: ``(B, Hq, Sq, D)``, float16, bfloat16, float32, or float64 on CPU. Any strides with a
            contiguous last dimension, here and below.
        key: ``(B, Hkv, Sk, D)``, query's dtype.
        value: ``(B, Hkv, Sk, Dv)``, query's dtype.
        attn_mask: broadcastable to ``(B, Hq, Sq, Sk)``. Bool keeps where True; float (query's
            dtype or float32) is added to the scores and may require grad. A padding mask
            ``(B, Sk)`` of a tokenizer is ``mask[:, None, None, :].bool()``; two dimensions are
            ``(Sq, Sk)``.
        dropout_p: probability in [0, 1) of dropping a softmax weight. The seed is drawn from
            torch's generator of query's device.
        is_causal: query ``i`` attends keys ``j <= i + Sk - Sq``.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``. The value of a tensor without
            dimensions is read, on CUDA with a synchronisation, and not under ``torch.compile`` or
            ``torch.vmap``. There, or if it requires grad, pass ``query * scale`` and ``scale=1.0``.
        window: ``(left, right)``, keys that stay visible on either side of a query's own position;
            ``None``, -1 or any number from ``2**31 - 1`` on: all of them.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``; subtracts slope times distance. No gradient.
        sinks: ``(Hq,)``, a logit per head that is added to the softmax's denominator only. May
            require grad.
        kv_lens: int32 ``(B,)``; row ``b`` has only its first ``kv_lens[b]`` keys, and ``Sk`` above
            is ``kv_lens[b]``.
        key_ranges: int32 ``(B or 1, Hq or 1, Sq or 1, 2)``; row ``i`` attends keys in the half-open
            ``[key_ranges[..., i, 0], key_ranges[..., i, 1])``. The compact form of most masks.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: a bitwise repeatable backward; also by
            ``torch.use_deterministic_algorithms``.
        backend: a backend's name, which then never falls back; ``None``: the one set by
            ``use_backend``, ``set_backend`` or ``FA_OPS_BACKEND``, else the fastest that supports
            the call.
        q_scale: float32, given with the two below where query, key and value are float8_e4m3fn:
            the factor of their numbers, as one element, ``(B, Hq)``, ``(B, Hq, Sq)``, or
            ``(B, Hq, ceil(Sq / 64))`` for blocks of 64 tokens. Then there is no gradient, ``out``
            is bfloat16, softmax weights are rounded to e4m3, and ``attn_mask``, ``dropout_p`` and
            ``alibi_slopes`` must not be given. See :func:`quantized_attention` for 16-bit tensors.
        k_scale: the same with ``Hkv`` and ``Sk``.
        v_scale: the same as one element, ``(B, Hkv)``, or ``(B, Hkv, Dv)`` for channels.
        mask_blocks: what :func:`mask_blocks` returned for this very ``attn_mask``. Tiles of the
            scores that the mask excludes entirely are then skipped, and the mask is not read where
            it changes nothing; no result depends on it. Make it once and pass it to all layers
            that share the mask; make it again after the mask was written to.
        enable_gqa: as SDPA has it, and without effect: heads may always form groups.
        return_aux: torch's ``AuxRequest``: return ``AuxOutput`` with ``lse`` and ``max_scores``:
            the largest score of each query, after all that changes and masks scores, in shape and
            dtype of lse, -inf for queries without keys, without a gradient. ``max_scores`` are not
            returned with ``dropout_p`` or ``q_scale``, and such calls do not use ``mask_blocks``.
        **unknown: refused; the message has the name here of arguments of other libraries.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)`` in query's dtype, laid out ``(B, Sq, Hq, Dv)`` in memory, so
        that ``out.transpose(1, 2).flatten(2)`` copies nothing; with ``return_lse`` ``(out, lse)``,
        ``lse`` ``(B, Hq, Sq)`` natural, float32 (float64 for float64). Gradients flow through
        both. With ``return_aux`` ``(out, AuxOutput)``.

    Raises:
        ValueError: shapes, devices or values that do not fit each other.
        TypeError: a dtype or Python type that is not accepted.
        NotImplementedError: no backend, or not the one named, can run the call; the message gives
            the reasons.

    Source: Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135; Dao, FlashAttention-2,
    https://arxiv.org/abs/2307.08691.

    Examples:
        >>> q, k, v = (torch.randn(1, heads, 512, 64) for heads in (9, 3, 3))
        >>> fa_ops.attention(q, k, v, is_causal=True).shape
        torch.Size([1, 9, 512, 64])
    """
    if unknown:
        refuse_unknown(attention, unknown)
    if return_aux is not None:
        options = {
            "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
            "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks,
            "kv_lens": kv_lens, "key_ranges": key_ranges, "deterministic": deterministic,
            "backend": backend, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
            "mask_blocks": mask_blocks, "enable_gqa": enable_gqa,
        }  # fmt: skip
        return with_aux(attention, (query, key, value), options, return_lse, return_aux)
    if type(return_lse) is not bool:
        need_bool("return_lse", return_lse)
    if enable_gqa is not False:
        need_bool("enable_gqa", enable_gqa)
    if scale is not None and type(scale) is not float:
        scale = read_scale(scale)
    if not (q_scale is k_scale is v_scale is None):
        from fa_ops.functions import quantized

        operands = new_operands((
            None, None, sinks, kv_lens, key_ranges, None, None, None, None, None, None, None,
            q_scale, k_scale, v_scale, None, None, None, None, None, None, None, None, None,
        ))  # fmt: skip
        return quantized.scaled_attention(
            query, key, value, is_causal, scale, window, softcap, operands, return_lse, backend,
            attn_mask=(attn_mask, None), mask_blocks=(mask_blocks, None), dropout_p=(dropout_p, 0),
            alibi_slopes=(alibi_slopes, None), deterministic=(deterministic, False),
        )  # fmt: skip
    dropout_p = dropout_p if type(dropout_p) is float else probability(dropout_p)
    seed = None if dropout_p == 0.0 else dropout_seed(query, dropout_p)
    operands, mask, blocks = NO_OPERANDS, attn_mask, mask_blocks
    if not (mask is blocks is alibi_slopes is sinks is kv_lens is key_ranges is seed is None):
        operands = new_operands((
            mask, alibi_slopes, sinks, kv_lens, key_ranges, seed, blocks, None,
            None, None, None, None, None, None, None, None, None, None, None, None, None, None,
            None, None,
        ))  # fmt: skip
    left, right = (-1, -1) if window is None else sides(window)
    scalars = (
        is_causal, dropout_p, scale, left, right, softcap, deterministic,
        backend,
    )  # fmt: skip
    return run(query, key, value, operands, scalars, DENSE_FUNCTION, return_lse)


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    is_causal: bool = False,
    *, return_lse: Literal[False] = False, **options: Unpack[PackedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    is_causal: bool = False,
    *, return_lse: Literal[True], **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    is_causal: bool = False,
    *, return_lse: bool, **options: Unpack[PackedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Fused attention over a batch of sequences of different lengths, concatenated (packed).

    Sequence ``b`` holds query tokens ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the keys
    that ``cu_seqlens_k`` delimits likewise. It is a batch element of :func:`attention`; arguments
    with the same names have the same meaning. Tokens outside every sequence give 0, their lse is
    -inf.

    Shape legend: ``Tq`` and ``Tk`` total tokens, ``B`` sequences, ``Hq`` and ``Hkv`` query and key
    heads, ``D`` head dimension, ``Dv`` value head dimension.

    Args:
        query: ``(Tq, Hq, D)``.
        key: ``(Tk, Hkv, D)``; with ``page_table`` ``(pages, page_size, Hkv, D)``.
        value: the same with ``Dv``.
        cu_seqlens_q: int32 ``(B + 1,)`` on query's device, not decreasing, within ``[0, Tq]``.
        cu_seqlens_k: int32 ``(B + 1,)`` on query's device, not decreasing, within ``[0, Tk]``. With
            ``page_table`` ``None``, or the cumulative numbers of keys, in place of ``kv_lens``.
        max_seqlen_q: at least the longest sequence's number of queries, which is checked on the
            CPU; ``None``: ``Tq``, which is safe and needs no synchronisation.
        max_seqlen_k: the same for keys; ``None``: ``Tk``.
        dropout_p: probability in [0, 1) of dropping a softmax weight.
        is_causal: aligned at the bottom right of each sequence.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``; a tensor as in
            :func:`attention`.
        window: ``(left, right)``, per sequence as in :func:`attention`.
        softcap: as in :func:`attention`.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``. No gradient.
        sinks: ``(Hq,)``. May require grad.
        kv_lens: int32 ``(B,)``; sequence ``b`` uses its first ``kv_lens[b]`` keys.
        page_table: int32 ``(B, max_pages)``: the keys of sequence ``b`` lie in the pages that row
            ``b`` names, as those of ``key_cache`` and ``value_cache`` of
            :func:`attention_with_kv_cache`. Prompts and decoding steps may share a batch. Then
            there is no gradient, and ``dropout_p`` must be 0.
        q_scale: float32, given with the two below where query, key and value are float8_e4m3fn: one
            number or ``(B, Hq)``. Such calls are as those of :func:`attention` with scales. Where
            no kernel takes the sequences packed, they are copied into rows of the longest bounds.
        k_scale: one number or ``(B, Hkv)``.
        v_scale: one number or ``(B, Hkv)``.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: a bitwise repeatable backward.
        backend: as in :func:`attention`.
        **unknown: refused.

    Returns:
        ``out`` ``(Tq, Hq, Dv)`` in query's dtype; with ``return_lse`` ``(out, lse)``, ``lse``
        ``(Hq, Tq)``. Gradients flow through both.

    Raises:
        ValueError: shapes, devices or values that do not fit each other; on CPU also sequences that
            are not among the tokens or pages or are longer than ``max_seqlen_q`` or
            ``max_seqlen_k``; with ``page_table`` an argument that requires grad.
        TypeError: a dtype or Python type that is not accepted.
        NotImplementedError: no backend, or not the one named, can run the call; the message gives
            the reasons.

    Examples:
        >>> ends = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> q = torch.randn(10, 4, 64)
        >>> fa_ops.attention_varlen(q, q, q, ends, ends, is_causal=True).shape
        torch.Size([10, 4, 64])
    """
    if unknown:
        refuse_unknown(attention_varlen, unknown)
    if type(return_lse) is not bool:
        need_bool("return_lse", return_lse)
    if scale is not None and type(scale) is not float:
        scale = read_scale(scale)
    if not (page_table is q_scale is k_scale is v_scale is None):
        from fa_ops.functions import varlen as others

        operands = Operands(
            None, alibi_slopes, sinks, kv_lens, None, None, None, cu_seqlens_q, cu_seqlens_k,
            page_table, None, None, q_scale, k_scale, v_scale,
        )  # fmt: skip
        return others.attend(
            query, key, value, operands, (max_seqlen_q, max_seqlen_k), dropout_p,
            deterministic, return_lse, is_causal=is_causal, scale=scale, window=window,
            softcap=softcap, backend=backend)  # fmt: skip
    dropout_p = dropout_p if type(dropout_p) is float else probability(dropout_p)
    seed = None if dropout_p == 0.0 else dropout_seed(query, dropout_p)
    operands = new_operands((
        None, alibi_slopes, sinks, kv_lens, None, seed, None, cu_seqlens_q, cu_seqlens_k, None,
        None, None, None, None, None, None, None, None, None, None, None, None, None, None,
    ))  # fmt: skip
    left, right = (-1, -1) if window is None else sides(window)
    scalars = (
        is_causal, dropout_p, scale, left, right, softcap, deterministic,
        backend, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return run(query, key, value, operands, scalars, _VARLEN, return_lse)


def mask_blocks(attn_mask: Tensor) -> Tensor:
    r"""Lists the tiles of a dense mask that :func:`attention` may skip or need not read.

    The mask is read once, on its device, without synchronisation. The result is passed to every
    call of :func:`attention` with the same mask, forward and backward, and is exact for every mask:
    a tile is skipped only if all of it is False or -inf, and not read only if all of it is True or
    exactly 0. It pays where queries are many. The semantics describe its form.

    Args:
        attn_mask: bool or floating point, of up to four dimensions that broadcast to
            ``(B, Hq, Sq, Sk)``. Dimensions that it shares are shared by the result.

    Returns:
        int32 ``(B or 1, Hq or 1, L)``, without a gradient.

    Raises:
        ValueError: the mask has more than four dimensions.
        TypeError: a dtype or Python type that is not accepted.

    Examples:
        >>> q, k, v = (torch.randn(1, 4, 512, 64) for _ in range(3))
        >>> mask = torch.ones(512, 512, dtype=torch.bool).tril()
        >>> out = fa_ops.attention(q, k, v, mask, mask_blocks=fa_ops.mask_blocks(mask))
    """
    return masks.MASK_BLOCKS(need_tensor("attn_mask", attn_mask))


def merge_states(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    r"""Attention over a union of disjoint key sets from the attention over each of them.

    ``lse = log sum_n exp(lses[n])`` and ``out = sum_n exp(lses[n] - lse) outs[n]``. Differentiable.

    Args:
        outs: ``(N, ..., Dv)``, or N tensors ``(..., Dv)``, the outputs over each key set.
        lses: ``(N, ...)``, or N tensors ``(...)``, natural, float32 (float64 for float64 outputs).

    Returns:
        ``(out, lse)`` of shapes ``(..., Dv)`` and ``(...)``; 0 and -inf where no set has a key.

    Raises:
        ValueError: shapes or devices that do not fit each other.
        TypeError: a dtype or Python type that is not accepted.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax,
    https://arxiv.org/abs/1805.02867.
    """
    outs, lses = _stack("outs", outs), _stack("lses", lses)
    return merge.MERGE(outs, lses)


def dropout_seed(query: Tensor, dropout_p: float) -> Tensor | None:
    """A seed from torch's generator; None where the probability is 0 or out of range."""
    if not 0.0 < dropout_p < 1.0:
        return None
    if is_proxy(need_tensor("query", query)):
        return seeds.DROPOUT_SEED(query.new_empty(0))
    if tracing.is_compiling():
        return seeds.record_draw(query.device)
    return torch.randint(2**63 - 1, (1,), device=query.device)


def _stack(name: str, states: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(states, Tensor) or is_proxy(states):
        return states
    if not isinstance(states, Sequence):
        kind = type(states).__name__
        raise TypeError(f"{name} must be a Tensor or a sequence of Tensors, got {kind}")
    if not states:
        raise ValueError(f"{name} must hold at least one state")
    if any(is_proxy(state) for state in states):  # whose shapes are not known
        return torch.stack([need_tensor(name, state) for state in states])
    first = need_tensor(name, states[0])
    for state in states:
        if need_tensor(name, state).shape != first.shape:
            shapes = f"{tuple(first.shape)} and {tuple(state.shape)}"
            raise ValueError(f"{name} must hold states of one shape, got {shapes}")
        if state.dtype != first.dtype:
            found = f"{dtype_name(first.dtype)} and {dtype_name(state.dtype)}"
            raise TypeError(f"{name} must hold one dtype, got {found}")
    return torch.stack(tuple(states))
