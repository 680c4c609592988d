"""The public functions of attention over keys that lists name, as blocks or as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.call import SELECTED
from fa_ops.call.options import Operands
from fa_ops.call.python_types import (
    need_bool,
    need_int,
    need_number,
    need_tensor,
    read_scale,
    refuse_unknown,
)
from fa_ops.ops import autocast, selected, token_selection
from fa_ops.ops.eager import PublicFunction, run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fa_ops.call.python_types import SelectedOptions, SelectedTokensOptions

_SELECTED = PublicFunction(
    SELECTED, lambda call, with_lse: selected.OPERATORS.forward, autocast.cast_attention,
    selected.OPERATORS,
)  # fmt: skip


@overload
def attention_selected(
    query: Tensor, key: Tensor, value: Tensor, block_indices: Tensor,
    *, return_lse: Literal[False] = False, **options: Unpack[SelectedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_selected(
    query: Tensor, key: Tensor, value: Tensor, block_indices: Tensor,
    *, return_lse: Literal[True], **options: Unpack[SelectedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_selected(
    query: Tensor, key: Tensor, value: Tensor, block_indices: Tensor,
    *, return_lse: bool, **options: Unpack[SelectedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    *,
    block_size: int = 64,
    query_block: int = 1,
    counts: Tensor | None = None,
    is_causal: bool = True,
    scale: float | Tensor | None = None,
    sinks: Tensor | None = None,
    key_ranges: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of each query over the blocks of keys that its list names: NSA, MoBA and others.

    Memory is linear in what is selected. A query attends a key if the key's block is in the query's
    list and no other argument excludes it. The order of a list has no meaning, and a block that
    is listed twice counts once.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``Sq`` and ``Sk`` lengths, ``D`` head dimension, ``Dv`` value head dimension, ``n`` blocks of a
    list.

    Args:
        query: ``(B, Hq, Sq, D)``, float16, bfloat16, float32, or float64 on the CPU.
        key: ``(B, Hkv, Sk, D)``, query's dtype.
        value: ``(B, Hkv, Sk, Dv)``, query's dtype.
        block_indices: int32 ``(B or 1, Hkv or 1, ceil(Sq / query_block), n)``. Block ``j`` holds
            the keys from ``j * block_size`` on, the last one those that remain; -1 lists nothing.
            Other numbers out of range raise an error on the CPU and list nothing on a GPU.
        block_size: keys of a block.
        query_block: queries that share a list, those from ``i * query_block`` on list ``i``. With 1
            each query has its own.
        counts: int32 ``(B or 1, Hkv or 1, ceil(Sq / query_block))``, block_indices' sizes: how many
            entries of each list count, the first ones; ``None``: all.
        is_causal: as in :func:`attention`, aligned at the bottom right; on by default.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``; a tensor as in
            :func:`attention`.
        sinks: ``(Hq,)``, as in :func:`attention`.
        key_ranges: int32 ``(B or 1, 1, Sq or 1, 2)``: each query attends listed keys in its
            half-open range only, as for padding.
        cu_seqlens: int32 ``(N + 1,)``, boundaries of sequences that follow one another in the only
            row of a batch. Blocks are numbered from the beginning of each sequence, and queries
            attend keys of their own.
        return_lse: also return the logarithm of the softmax's denominator, by which
            :func:`merge_states` merges branches.
        deterministic: as in :func:`attention`; backward passes repeat bitwise with and without it.
        backend: as in :func:`attention`.
        **unknown: refused.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)`` in query's dtype, laid out ``(B, Sq, Hq, Dv)`` in memory; with
        ``return_lse`` ``(out, lse)``, ``lse`` ``(B, Hq, Sq)`` natural, float32 (float64 for
        float64). A query without keys gives 0 and -inf, or the sink. Gradients of query, key, value
        and sinks flow through both.

    Raises:
        ValueError: shapes, devices or values that do not fit each other.
        TypeError: a dtype or Python type that is not accepted.
        NotImplementedError: no backend, or not the one named, can run the call.

    Source: Yuan et al., Native Sparse Attention, https://arxiv.org/abs/2502.11089; Lu et al., MoBA,
    https://arxiv.org/abs/2502.13189.

    Examples:
        >>> q, k, v = (torch.randn(1, heads, 512, 64) for heads in (8, 2, 2))
        >>> blocks = torch.randint(0, 8, (1, 2, 512, 3), dtype=torch.int32)
        >>> fa_ops.attention_selected(q, k, v, blocks, block_size=64).shape
        torch.Size([1, 8, 512, 64])
    """
    if unknown:
        refuse_unknown(attention_selected, unknown)
    if type(return_lse) is not bool:
        need_bool("return_lse", return_lse)
    if scale is not None and type(scale) is not float:
        scale = read_scale(scale)
    operands = Operands(
        sinks=sinks, key_ranges=key_ranges, block_indices=block_indices, counts=counts,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    scalars = (
        is_causal, 0.0, scale, -1, -1, 0.0, deterministic, backend, block_size, query_block
    )  # fmt: skip
    return run(query, key, value, operands, scalars, _SELECTED, return_lse)


@overload
def attention_selected_tokens(
    query: Tensor, key: Tensor, value: Tensor, token_indices: Tensor,
    *, return_lse: Literal[False] = False, **options: Unpack[SelectedTokensOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_selected_tokens(
    query: Tensor, key: Tensor, value: Tensor, token_indices: Tensor,
    *, return_lse: Literal[True], **options: Unpack[SelectedTokensOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_selected_tokens(
    query: Tensor, key: Tensor, value: Tensor, token_indices: Tensor,
    *, return_lse: bool, **options: Unpack[SelectedTokensOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_selected_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    token_indices: Tensor,
    *,
    counts: Tensor | None = None,
    scale: float | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of each query over the tokens of a cache that its list names, as DSA does.

    Prompts and decoding steps, of any number of sequences, are tokens alike: causality and the
    place of a sequence in the cache are in the lists. For inference; :func:`attention_selected`
    with ``block_size=1`` has gradients.

    Shape legend: ``T`` queries, ``N`` tokens of the cache, ``Hq`` and ``Hkv`` query and key heads
    (``Hkv`` divides ``Hq``), ``D`` head dimension, ``Dv`` value head dimension, ``k`` tokens of a
    list.

    Args:
        query: ``(T, Hq, D)``, float16, bfloat16, float32, or float64 on the CPU.
        key: ``(N, Hkv, D)``, query's dtype. Of a latent cache ``(N, D)``, as MLA has it, pass
            ``latent[:, None]``.
        value: ``(N, Hkv, Dv)``, query's dtype; of a latent cache ``latent[:, None, :Dv]``.
        token_indices: int32 ``(T, k)``: the keys that all heads of a query attend; -1 lists
            nothing. Other numbers out of range raise an error on the CPU and list nothing on a GPU.
            No token may be listed twice: how often it then counts is not specified.
        counts: int32 ``(T,)``: how many entries of each list count, the first ones; ``None``: all.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``; a tensor as in
            :func:`attention`.
        sinks: ``(Hq,)``, as in :func:`attention`.
        return_lse: also return the logarithm of the softmax's denominator.
        backend: as in :func:`attention`.
        **unknown: refused.

    Returns:
        ``out`` ``(T, Hq, Dv)`` in query's dtype; with ``return_lse`` ``(out, lse)``, ``lse``
        ``(Hq, T)`` natural, float32 (float64 for float64). A query without keys gives 0 and -inf,
        or the sink.

    Raises:
        ValueError: shapes, devices or values that do not fit each other; an argument that requires
            grad, as there is no gradient.
        TypeError: a dtype or Python type that is not accepted.
        NotImplementedError: no backend, or not the one named, can run the call.

    Source: DeepSeek-AI, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.

    Examples:
        >>> latent, q = torch.randn(100, 576), torch.randn(7, 16, 576)
        >>> tokens = torch.stack([torch.randperm(100)[:32] for _ in range(7)]).int()
        >>> k, v = latent[:, None], latent[:, None, :512]
        >>> fa_ops.attention_selected_tokens(q, k, v, tokens).shape
        torch.Size([7, 16, 512])
    """
    if unknown:
        refuse_unknown(attention_selected_tokens, unknown)
    if type(return_lse) is not bool:
        need_bool("return_lse", return_lse)
    tensors = {"query": query, "key": key, "value": value, "token_indices": token_indices}
    for name, t in (tensors | {"counts": counts, "sinks": sinks}).items():
        if t is not None or name in tensors:
            need_tensor(name, t)
    scale = read_scale(scale)
    scale = scale if scale is None else need_number("scale", scale)
    backend = backend_option.chosen() if backend is None else backend
    if backend is not None:
        backend_option.check_name(backend)
    out, lse = selected.TOKENS(
        query, key, value, token_indices, counts, scale=scale, sinks=sinks, backend=backend
    )
    return (out, lse) if return_lse else out


def select_tokens(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    count: int,
    *,
    is_causal: bool = True,
    scale: float | Tensor | None = None,
    kv_lens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **unknown: object,
) -> Tensor:
    r"""Lists the keys that DSA's lightning indexer scores highest, for each query.

    The score of key ``j`` for query ``i`` is ``sum_h weights[h, i] * relu(scale * query[h, i] .
    key[j])``, in float32. Memory is linear in the lists: scores are computed in tiles of keys, of
    which the best join those before. The result is that of sorting all scores, and deterministic:
    of equal scores the lowest key comes first, and NaN counts as the largest.

    Shape legend: ``B`` batch, ``H`` heads of the indexer, ``Sq`` and ``Sk`` lengths, ``D`` head
    dimension.

    Args:
        query: ``(B, H, Sq, D)``, float16, bfloat16, float32, or float64 on the CPU.
        key: ``(B, 1, Sk, D)``, query's dtype.
        weights: ``(B, H, Sq)``, query's dtype or float32.
        count: the length of the lists.
        is_causal: as in :func:`attention`, aligned at the bottom right; on by default.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``; a tensor as in
            :func:`attention`.
        kv_lens: int32 ``(B,)``: keys of each row, as in :func:`attention`, for a cache.
        key_ranges: int32 ``(B or 1, 1, Sq or 1, 2)``: each query may attend keys in its half-open
            range only, as for padding or a window.
        attn_mask: bool ``(B or 1, 1, Sq or 1, Sk)``: each query may attend keys that are True only.
        **unknown: refused.

    Returns:
        int32 ``(B, 1, Sq, count)``, the best key first, without a gradient; -1 behind the last key
        that a query may attend. :func:`attention_selected` with ``block_size=1`` takes it as
        ``block_indices``, and :func:`attention_selected_tokens` of one sequence its ``[0, 0]``.

    Raises:
        ValueError: shapes, devices or values that do not fit each other.
        TypeError: a dtype or Python type that is not accepted.

    Source: DeepSeek-AI, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1.

    Examples:
        >>> q, k = torch.randn(1, 4, 100, 32), torch.randn(1, 1, 100, 32)
        >>> fa_ops.select_tokens(q, k, torch.rand(1, 4, 100), 16).shape
        torch.Size([1, 1, 100, 16])
    """
    if unknown:
        refuse_unknown(select_tokens, unknown)
    required = {"query": query, "key": key, "weights": weights}
    optional = {"kv_lens": kv_lens, "key_ranges": key_ranges, "attn_mask": attn_mask}
    for name, t in (required | optional).items():
        if t is not None or name in required:
            need_tensor(name, t)
    need_bool("is_causal", is_causal)
    scale = read_scale(scale)
    return token_selection.SELECT(
        query, key, weights, need_int("count", count), is_causal,
        scale=scale if scale is None else need_number("scale", scale), kv_lens=kv_lens,
        key_ranges=key_ranges, attn_mask=attn_mask,
    )  # fmt: skip
