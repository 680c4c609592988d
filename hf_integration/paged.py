"""Attention of continuous batching: sequences packed into one row, keys in pages of a cache.

transformers passes its PagedAttentionCache as a keyword; from 5.24 on, layers update the cache
themselves and pass what it adds to their keywords. Steps that only decode also get a block
table: the pages are then attended in place, and the operator itself writes the new key of each
sequence. In other steps the cache gathers the keys of all sequences, which are a packed batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

import fa_ops
from hf_integration.host_reads import PerTensorMemo
from hf_integration.operators import LayerCall

_memo = PerTensorMemo()  # the number of keys of each sequence before the step


class Pages(NamedTuple):
    """The pages of one layer, and the table of the pages of each sequence."""

    key: Tensor  # (pages, page_size, Hkv, D)
    value: Tensor
    table: Tensor  # int32 (sequences, pages of the longest sequence)


def attention(layer: nn.Module, call: LayerCall, cache: object, keywords: dict) -> Tensor:
    """Causal attention of query (1, Hq, T, D), within the layer's window; returns (1, T, Hq, Dv).

    `keywords` are the other keywords that transformers passes, which describe the batch.
    """
    query, key, value, _, sinks, options = call[:6]
    window = keywords.get("sliding_window") or getattr(layer, "sliding_window", None)
    options = {
        "is_causal": True, "scale": options["scale"], "softcap": options["softcap"], "sinks": sinks,
        "window": (int(window) - 1, 0) if window else None,
    }  # fmt: skip
    if cache is None:
        step = _updated(keywords, key, value)
    elif hasattr(cache, "layer_index_to_group_indices"):
        step = _before_5_19(layer, key, value, cache, window, keywords)
    else:
        step = _update(layer, key, value, cache, keywords)
    k_ends, longest_k, pages, key, value = step
    if pages is not None:
        return _decode(layer, query, key, value, pages, k_ends, options)
    longest_q = keywords.get("max_length_q", keywords.get("max_seqlen_q"))
    tokens = (t[0].transpose(0, 1) for t in (query, key, value))
    out = fa_ops.attention_varlen(
        *tokens, keywords["cu_seq_lens_q"].int(), k_ends, longest_q, longest_k, **options
    )
    return out[None]


Step = tuple[Tensor, int | None, Pages | None, Tensor, Tensor]


def _update(layer: nn.Module, key, value, cache, keywords: dict) -> Step:
    """Let the cache fill in this layer's keywords, and gather the keys unless there is a table."""
    filled = dict(keywords)
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=layer.layer_idx, kwargs=filled
    )
    return _updated(filled, key, value)


def _updated(keywords: dict, key, value) -> Step:
    """The step of a cache that has been updated."""
    pages = None
    if keywords.get("block_table") is not None:
        pages = Pages(keywords["k_cache"], keywords["v_cache"], keywords["block_table"])
    return keywords["cu_seq_lens_k"].int(), keywords["max_length_k"], pages, key, value


def _before_5_19(layer: nn.Module, key, value, cache, window, keywords: dict) -> Step:
    """The same before transformers 5.19: the keywords list the keys to gather for each group."""
    k_ends, longest_k = keywords["cu_seq_lens_k"], keywords["max_seqlen_k"]
    if isinstance(k_ends, dict):
        kind = "sliding_attention" if window else "full_attention"
        k_ends, longest_k = k_ends[kind], longest_k[kind]
    table = keywords.get("block_table")
    if table is None:
        indices = {name: keywords[name] for name in ("read_index", "write_index")}
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=layer.layer_idx, **indices
        )
        key, value = (t.transpose(0, 1)[None] for t in (key, value))
        return k_ends.int(), longest_k, None, key, value
    group, index = cache.layer_index_to_group_indices[layer.layer_idx]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    views = (cache.key_cache[index].view(shape), cache.value_cache[index].view(shape))
    return k_ends.int(), longest_k, Pages(*views, table[group]), key, value


def _decode(
    layer: nn.Module, query, key, value, pages: Pages, k_ends: Tensor, options: dict
) -> Tensor:
    """Attend with one token of each sequence, whose key is written behind the sequence's last."""
    query, key, value = (t[0].transpose(0, 1).unsqueeze(2) for t in (query, key, value))
    N = query.shape[0]
    before = _memo.get(k_ends, layer, lambda: (k_ends[1 : N + 1] - k_ends[:N] - 1).clamp(min=0))
    table = pages.table[:N].int()
    out = fa_ops.attention_with_kv_cache(
        query, pages.key, pages.value, before, table, key=key, value=value, **options
    )
    return out[:, :, 0][None]


def is_updated(keywords: dict) -> bool:
    """Whether the layer has updated a cache of continuous batching, as transformers 5.24 does."""
    return keywords.get("write_index") is not None


def is_batch(cache: object) -> bool:
    """Whether the `cache` keyword is a cache of continuous batching."""
    return hasattr(cache, "update") and type(cache).__name__ == "PagedAttentionCache"
