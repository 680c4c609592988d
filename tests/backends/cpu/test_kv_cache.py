"""Attention over a key-value cache on CPU, against the oracle."""

from __future__ import annotations

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case

FEATURES = {
    "one token": {},
    "several tokens": {"Sq": 5, "is_causal": True},
    "more tokens than keys": {"Sq": 16, "is_causal": True, "lens": (0, 7)},
    "pages of one": {"page_size": 1},
    "pages of 64": {"page_size": 64, "Sq": 3, "is_causal": True},
    "append": {"new": 1, "bshd": False},
    "append several to pages": {"new": 20, "Sq": 20, "page_size": 8, "is_causal": True},
    "append until full": {"new": 3, "lens": (147, 0)},
    "rotary": {"new": 2, "Sq": 2, "rotary": 16, "is_causal": True},
    "rotary of pairs": {"new": 2, "Sq": 2, "rotary": 8, "interleaved": True, "page_size": 16},
    "rotary of the query alone": {"rotary": 16},
    "fp8": {"fp8": True, "dtype": torch.float16},
    "fp8, appended to pages": {"fp8": True, "dtype": torch.bfloat16, "new": 3, "page_size": 8},
    "fp8, scales of pages": {
        "fp8": True, "dtype": torch.float16, "page_size": 8, "page_scales": True, "lens": (150, 0),
    },
    "fp8, appended to pages with scales": {
        "fp8": True, "dtype": torch.bfloat16, "page_size": 5, "page_scales": True, "new": 7,
        "Sq": 7, "is_causal": True,
    },
    "fp8, scales of tokens": {
        "fp8": True, "dtype": torch.float16, "token_scales": True, "new": 2, "lens": (148, 0),
    },
    "fp8, appended to pages with scales of tokens": {
        "fp8": True, "dtype": torch.bfloat16, "page_size": 5, "token_scales": True, "new": 7,
        "Sq": 7, "is_causal": True,
    },
    "shared value": {"shared": True, "D": 32, "Dv": 24, "Hkv": 1},
    "shared value, appended": {"shared": True, "D": 32, "Dv": 24, "Hkv": 1, "new": 2},
    "options": {"window": (9, 2), "softcap": 3.0, "alibi": "batch_heads", "sinks": True, "Sq": 4},
    "fp64": {"dtype": torch.float64},
    "empty rows": {"lens": (0, 150), "sinks": True},
    "ranges": {"ranges": True, "B": 5},
    "ranges, paged and appended": {
        "ranges": True, "page_size": 8, "new": 3, "Sq": 3, "is_causal": True, "window": (30, -1),
        "alibi": "heads", "rotary": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    assert_cache_close(CacheCase(**FEATURES[feature]), "cpu")


@pytest.mark.parametrize("seed", range(120))
def test_random(seed):
    assert_cache_close(random_cache_case(seed), "cpu")


def test_a_cache_call_attends_the_existing_keys():
    """The oracle of caches against the oracle of plain attention, so that neither is alone."""
    call = CacheCase(Sq=3, S=40, lens=(40, 40), page_size=8).fresh()
    q, k, v = call[:3]
    table = call.operands.page_table.long()
    keys, values = (x[table].flatten(1, 2).transpose(1, 2) for x in (k, v))
    out = reference.cache_forward(call)[0]
    torch.testing.assert_close(out, fa_ops.attention(q, keys, values, backend="reference"))


def test_a_range_is_attention_over_its_keys():
    """Padding in front of a cache: as without it, but for the positions, which nothing asks for."""
    call = CacheCase(S=40, lens=(40, 40), Sq=2).fresh()
    q, k, v = call[:3]
    ranges = torch.tensor([[7, 40], [-3, 99]], dtype=torch.int32).view(2, 1, 1, 2)
    lens = call.operands.kv_lens
    out = fa_ops.attention_with_kv_cache(q, k, v, lens, None, True, key_ranges=ranges)
    alone = fa_ops.attention(q[:1], k[:1, :, 7:], v[:1, :, 7:], is_causal=True)
    whole = fa_ops.attention(q[1:], k[1:], v[1:], is_causal=True)
    torch.testing.assert_close(out, torch.cat([alone, whole]))


def test_appended_keys_are_seen_by_the_next_call():
    call = CacheCase(new=2, S=20, lens=(3, 11)).fresh()
    q, k, v = call[:3]
    t = call.operands
    new = {"key": t.new_key, "value": t.new_value}
    first = fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, **new)
    again = fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens + 2)
    torch.testing.assert_close(first, again)
    assert torch.equal(k[0, :, 3:5], t.new_key[0]) and torch.equal(v[1, :, 11:13], t.new_value[1])
