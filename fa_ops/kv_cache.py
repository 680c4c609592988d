"""The typed door to attention over a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops import api
from fa_ops.ops import kv_cache, prepared
from fa_ops.types import Cache, Spec


def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_lens: Tensor,
    page_table: Tensor | None = None,
    is_causal: bool = False,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    scale: float | None = None,
    window: api.Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    key_ranges: Tensor | None = None,
    unified_max: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""One query token, a few, or a prompt's, against a cache of keys and values. No gradient.

    With ``key`` and ``value`` the new ones are first written into the cache, in place, behind the
    ``kv_lens[b]`` that it holds; the queries then see ``kv_lens[b] + Sn`` keys. The length of row
    ``b`` below is that sum. No length is read by the host, so one CUDA graph serves all of them.

    .. note::
        Positions are aligned at the **bottom right** of each row: query ``i`` of ``Sq`` stands at
        ``length + i - Sq``. Pass ``is_causal`` where several new tokens must not see each other's
        future.

    Shape legend: ``B`` batch, ``Hq`` and ``Hkv`` query and key heads (``Hkv`` divides ``Hq``),
    ``Sq`` query tokens, ``Sn`` new keys, ``S`` the cache's capacity, ``D`` head dimension, ``Dv``
    value head dimension, ``R`` rotated features.

    Args:
        query: ``(B, Hq, Sq, D)``, float16, bfloat16, float32, or float64 on CPU.
        key_cache: ``(B, Hkv, S, D)``, any strides with a contiguous last dimension (a cache laid
            out ``(B, S, Hkv, D)`` comes as ``cache.transpose(1, 2)``); with ``page_table``
            ``(pages, page_size, Hkv, D)``. Query's dtype, or float8_e4m3fn.
        value_cache: the same with ``Dv``. May be a view of ``key_cache``, as in MLA, where it is
            the first ``Dv`` columns; the keys are then read once.
        kv_lens: int32 ``(B,)``, keys that each row of the cache holds before the call.
        page_table: int32 ``(B, max_pages)``; key ``j`` of row ``b`` is in page
            ``page_table[b, j // page_size]``. Entries behind the row's length may be anything. On
            CUDA a page that does not exist is never touched, and its keys count as absent;
            ``FA_OPS_DEBUG=1`` makes it an error there too.
        is_causal: query ``i`` attends keys ``j <= length + i - Sq``.
        key: ``(B, Hkv, Sn, D)``, query's dtype, to be appended.
        value: ``(B, Hkv, Sn, Dv)``.
        scale: factor on the products; ``None``: ``1 / sqrt(D)``.
        window: ``(left, right)``, keys that stay visible on either side of a query's own position.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``.
        sinks: ``(Hq,)``, a logit per head that joins the softmax's denominator only.
        k_scale: float32 ``(B, Hkv)``, by which cached fp8 keys are multiplied; new keys are divided
            by it. With ``page_table`` also ``(pages, 1, Hkv)``, a scale for each page, laid out as
            the pages are; both scales are then of pages.
        v_scale: the same for values.
        rotary_cos: ``(positions, R / 2)``; turns query and the new keys at their positions. What
            the cache holds is taken as already turned.
        rotary_sin: ``(positions, R / 2)``.
        rotary_interleaved: features pair up as (0, 1), (2, 3), ...; else as (0, R / 2), ....
        num_splits: pieces that the keys of each row are cut into; 0: chosen from shapes.
        batch_invariant: cut them into pieces of a fixed length, so that no bit of a row's result
            depends on the other rows.
        key_ranges: int32 ``(B or 1, 1, 1, 2)``; the queries of row ``b`` attend keys in the
            half-open ``[key_ranges[b, 0, 0, 0], key_ranges[b, 0, 0, 1])`` alone, which is clamped
            to ``[0, length]``. Positions stay what they are. Where the cache begins with padding,
            ``[padding, length)`` is the range, and the padding is neither read nor waited for.
        unified_max: float32 ``(Hq,)``, about the largest score of each head, from calibration, in
            units of scores (``query @ key * scale``, softcap and ALiBi applied). Softmax may then
            start from it instead of following a maximum. No result depends on it: where it is too
            far off, rows are computed once more, as without it. The triton backend uses it.
        return_lse: also return the logarithm of the softmax's denominator.
        backend: as in :func:`attention`.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)`` in query's dtype, laid out ``(B, Sq, Hq, Dv)`` in memory; with
        ``return_lse`` ``(out, lse)``, ``lse`` ``(B, Hq, Sq)`` natural, float32.

    Raises:
        ValueError: shapes, devices or values that do not fit each other; an argument that requires
            grad; on CPU also lengths and pages that lie outside the cache.
        TypeError: a dtype or Python type that is not accepted.
        NotImplementedError: no backend, or not the one named, can run the call; says why.

    Source: Dao et al., Flash-Decoding, https://pytorch.org/blog/flash-decoding; Kwon et al.,
    PagedAttention, https://arxiv.org/abs/2309.06180; Hong et al., FlashDecoding++
    (``unified_max``), https://arxiv.org/abs/2311.01282.

    Example:
        >>> k, v = (torch.zeros(1, 128, 2, 64).transpose(1, 2) for _ in range(2))
        >>> q, new = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1, 64)
        >>> lens = torch.zeros(1, dtype=torch.int32)
        >>> fa_ops.attention_with_kv_cache(q, k, v, lens, key=new, value=new).shape
        torch.Size([1, 8, 1, 64])
    """
    tensors, others = (kv_lens, page_table), (
        key_ranges, alibi_slopes, sinks, key, value, k_scale, v_scale, rotary_cos, rotary_sin,
        unified_max,
    )  # fmt: skip
    if not (
        key_ranges is alibi_slopes is sinks is key is value is k_scale is v_scale is rotary_cos
        is rotary_sin is unified_max is None
    ):  # fmt: skip
        tensors += others
    call = None
    if not (torch.compiler.is_compiling() or kv_cache.DEBUG):
        both = None if window is None else api.sides(window)
        plain = (
            is_causal, scale, both, softcap, rotary_interleaved, num_splits, batch_invariant,
            backend,
        )  # fmt: skip
        types = (
            is_causal.__class__, scale.__class__, softcap.__class__, rotary_interleaved.__class__,
            num_splits.__class__, batch_invariant.__class__,
        )  # fmt: skip
        call = prepared.key_of(query, key_cache, value_cache, tensors, "cache", *plain, *types)
    if call is not None and (run := prepared.find(call)) is not None:
        return _attend(run, query, key_cache, value_cache, tensors, return_lse)
    api.need_tensor("key_cache", key_cache)
    api.need_tensor("value_cache", value_cache)
    options = api.spec_options(
        query, key_cache, value_cache, 0.0, is_causal, scale, window, softcap, alibi_slopes, sinks,
        kv_lens, False, backend,
    )  # fmt: skip
    kv_lens = api.need_tensor("kv_lens", kv_lens)
    options.pop("kv_lens", None)
    optional = {
        "k_scale": k_scale, "v_scale": v_scale, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
        "key_ranges": key_ranges, "unified_max": unified_max,
    }  # fmt: skip
    for name, x in optional.items():
        if x is not None:
            options[name] = api.need_tensor(name, x)
    flags = {"rotary_interleaved": rotary_interleaved, "batch_invariant": batch_invariant}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")
        if flag:
            options[name] = flag
    if num_splits:
        num_splits = api.need_int("num_splits", num_splits)
        options["num_splits"] = num_splits
    if page_table is not None:
        api.need_tensor("page_table", page_table)
    if (key is None) != (value is None):
        raise ValueError("key and value must be given together")
    if call is not None:
        cache, spec = _bound(tensors, plain)
        cache = cache._replace(num_splits=num_splits)
        run = prepared.make_cached(call, query, key_cache, value_cache, cache, spec)
        if run is not None:
            return _attend(run, query, key_cache, value_cache, tensors, return_lse)
    operator, new = kv_cache.READ, ()
    if key is not None:
        operator, new = kv_cache.APPEND, (api.need_tensor("key", key),
                                          api.need_tensor("value", value))  # fmt: skip
    args = (query, key_cache, value_cache, *new, kv_lens, page_table, is_causal)
    recorded = (query, key_cache, value_cache, *tensors)
    out, lse = api.call_operator(operator, recorded, args, options)
    return (out, lse) if return_lse else out


def _attend(run, query, key_cache, value_cache, tensors: tuple, return_lse: bool):
    """By what is prepared for the call."""
    result = run(return_lse, query, key_cache, value_cache, *tensors)
    if len(tensors) > 2 and tensors[5] is not None:  # a new key
        kv_cache.written(key_cache, value_cache)
    return result if return_lse else result[0]


def _bound(tensors: tuple, plain: tuple) -> tuple[Cache, Spec]:
    (
        kv_lens, table, ranges, slopes, sinks, key, value, k_scale, v_scale, cos, sin, guesses
    ) = (*tensors, *[None] * 10)[:12]  # fmt: skip
    causal, scale, window, softcap, interleaved, splits, invariant, backend = plain
    left, right = window or (-1, -1)
    return (
        Cache(table, key, value, k_scale, v_scale, cos, sin, interleaved, splits, invariant,
              guesses),
        Spec(None, 0.0, causal, scale, left, right, softcap, slopes, sinks, kv_lens, ranges,
             None, False, backend),
    )  # fmt: skip
