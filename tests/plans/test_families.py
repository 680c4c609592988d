"""Calls that differ in the number of keys alone are checked and planned once."""

from __future__ import annotations

import pytest
import torch

import fa_ops
from fa_ops.backends import cpu
from fa_ops.call import cache_checks, checks
from fa_ops.plans import planning

LENS = torch.tensor([3], dtype=torch.int32)
RANGES = torch.tensor([0, 3], dtype=torch.int32).view(1, 1, 1, 2)
SINKS = torch.zeros(2)


def qkv(Sk):
    return [torch.randn(1, 2, S, 8) for S in (5, Sk, Sk)]


@pytest.fixture
def checked(monkeypatch):
    """How often the rules and the backend were consulted."""
    consulted = []
    for module, name in ((checks, "dense"), (cache_checks, "cached"), (cpu, "supports")):
        one = getattr(module, name)
        noted = lambda *a, one=one, name=name, **k: consulted.append(name) or one(*a, **k)  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    return consulted


@pytest.mark.parametrize("small", [{}, {"kv_lens": LENS, "sinks": SINKS}], ids=("plain", "small"))
def test_a_cache_that_grows_is_checked_once(small, checked):
    for Sk in range(513, 521):
        fa_ops.attention(*qkv(Sk), **small)
        assert checked == ["dense", "supports"]
    assert len(planning._plans) == 1 and len(planning._prepared) == 8
    fa_ops.attention(*qkv(520), **small, is_causal=True)
    assert checked == ["dense", "supports"] * 2
    with pytest.raises(ValueError, match="value has length 520, but key's is 521"):
        fa_ops.attention(*qkv(521)[:2], qkv(520)[2], **small)


MASKS = {
    "bool": lambda Sk: torch.ones(1, 1, 1, Sk, dtype=torch.bool),
    "bool, sliced": lambda Sk: torch.ones(1, 2, 5, 600, dtype=torch.bool)[..., :Sk],
    "float": lambda Sk: torch.zeros(Sk),
    "float, of a query each": lambda Sk: torch.zeros(5, Sk),
    "shared by keys": lambda Sk: torch.zeros(1, 5, 1),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_that_grows_with_its_cache_is_checked_once(mask, checked):
    for Sk in range(513, 521):
        q, k, v = qkv(Sk)
        out = fa_ops.attention(q, k, v, mask(Sk), kv_lens=LENS)
        torch.testing.assert_close(out, fa_ops.attention(q, k, v, kv_lens=LENS))
    assert checked == ["dense", "supports"] * 2
    assert len(planning._plans) == 2 and len(planning._prepared) == 16
    other = torch.float32 if mask(1).dtype == torch.bool else torch.bool
    fa_ops.attention(*qkv(513), mask(513).to(other), kv_lens=LENS)
    assert checked == ["dense", "supports"] * 3


@pytest.mark.parametrize("new", [False, True], ids=("read", "append"))
def test_a_page_table_that_grows_is_checked_once(new, checked):
    q, new_key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    pages = torch.randn(64, 16, 2, 8)
    options = {"key": new_key, "value": new_key} if new else {}
    for count in range(33, 40):
        table = torch.arange(count, dtype=torch.int32)[None]
        lens = torch.tensor([16 * count - 3], dtype=torch.int32)
        fa_ops.attention_with_kv_cache(q, pages, pages.clone(), lens, table, **options)
        assert checked == ["cached", "supports"]
    assert len(planning._plans) == 1 and len(planning._prepared) == 7
    for wrong, error in (
        (table[0], "page_table must have shape"),
        (table.long(), "page_table must be int32"),
        (table.expand(2, -1), "page_table has 2 rows"),
        (table + 60, "page"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            fa_ops.attention_with_kv_cache(q, pages, pages.clone(), lens, wrong, **options)


def test_scales_of_tokens_are_checked_against_every_number_of_keys():
    q, lens = torch.randn(1, 2, 1, 8).half(), torch.tensor([500], dtype=torch.int32)
    cache = torch.randn(1, 2, 601, 8).to(torch.float8_e4m3fn)

    def call(keys, scales):
        part, scale = cache[:, :, :keys], torch.ones(1, 2, scales)
        return fa_ops.attention_with_kv_cache(q, part, part, lens, k_scale=scale, v_scale=scale)

    for _ in range(2):
        call(600, 600), call(601, 601)
        for keys, scales in ((601, 600), (600, 601)):
            with pytest.raises(ValueError, match="k_scale must have shape"):
                call(keys, scales)


@pytest.mark.parametrize("power", [8, 9, 10])
def test_a_backend_is_asked_again_beyond_a_power_of_two(power, checked):
    """What a backend supports may depend on how the number of keys compares with those."""
    for Sk in (2**power - 1, 2**power, 2**power + 1):
        fa_ops.attention(*qkv(Sk))
    assert checked == ["dense", "supports"] * 3


@pytest.mark.parametrize("rows", [1, 5])
def test_a_mask_is_checked_against_every_number_of_keys(rows):
    q, k, v = qkv(600)
    mask = torch.ones(rows, 600, dtype=torch.bool)
    for _ in range(2):
        fa_ops.attention(q, k, v, mask)
        for Sk in (599, 601):
            with pytest.raises(ValueError, match="attn_mask must broadcast"):
                fa_ops.attention(q, *qkv(Sk)[1:], mask)
        with pytest.raises(ValueError, match="pass one of them"):
            fa_ops.attention(q, *qkv(601)[1:], torch.ones(rows, 601).bool(), key_ranges=RANGES)
        with pytest.raises(ValueError, match="attn_mask must broadcast"):
            fa_ops.attention(q, *qkv(601)[1:], torch.ones(rows + 1, 601).bool())


def test_rows_apart_are_refused_where_nothing_is_aligned():
    def off(*shape):
        return torch.zeros(1, 2, shape[0] * shape[1] + 1)[..., 1:].unflatten(2, shape)

    q, k, v = off(5, 8), off(600, 8), off(600, 4)
    fa_ops.attention(q, k, v), fa_ops.attention(q, off(601, 8), off(601, 4))
    wide = off(601, 16)[..., ::2]
    with pytest.raises(ValueError, match="key must be contiguous in its last dimension"):
        fa_ops.attention(q, wide, off(601, 4))
    with pytest.raises(ValueError, match="value must be contiguous in its last dimension"):
        fa_ops.attention(q, off(601, 8), wide[..., :4])


def test_values_are_checked_against_every_number_of_keys():
    """Also where they have other features, and the strides of values that fit."""
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 700, 8), torch.randn(1, 2, 700, 4)
    for _ in range(2):
        fa_ops.attention(q, k[:, :, :600], v[:, :, :600])
        for keys, values in ((601, 600), (601, 602), (600, 601)):
            message = f"value has length {values}, but key's is {keys}"
            with pytest.raises(ValueError, match=message):
                fa_ops.attention(q, k[:, :, :keys], v[:, :, :values])


def test_rows_of_a_mask_are_no_keys_where_both_are_as_many():
    q, mask = torch.randn(1, 2, 600, 8), torch.ones(700, 700, dtype=torch.bool)
    for _ in range(2):
        fa_ops.attention(q, *qkv(600)[1:], mask[:600, :600])
        with pytest.raises(ValueError, match="attn_mask must broadcast"):
            fa_ops.attention(q, *qkv(601)[1:], mask[:601, :601])
