"""attention_with_kv_cache with a page table for each key head, against one head at a time."""

from __future__ import annotations

import math
import re

import pytest
import torch

import fa_ops

B, HQ, HKV, PAGES, SIZE, D, DV, COLUMNS = 3, 6, 2, 11, 4, 16, 8, 5
TABLE = torch.stack([torch.randperm(PAGES)[:COLUMNS] for _ in range(B * HKV)])
TABLE = TABLE.view(B, HKV, COLUMNS).int()
LENS = torch.tensor([20, 0, 7], dtype=torch.int32)


def caches(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(PAGES, SIZE, HKV, D), torch.randn(PAGES, SIZE, HKV, DV)
    if layout == "heads before keys":
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    if layout == "two layouts":
        return k, v.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "a view":
        return torch.cat((k, k), 1)[:, SIZE:], torch.cat((v, v), 1)[:, SIZE:]
    if layout == "values within keys":
        return k, k[..., :DV]
    return k, v


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "window": (9, None)},
    "sinks": {"sinks": torch.randn(HQ)},
    "slopes": {"alibi_slopes": torch.rand(HQ)},
    "slopes of rows": {"alibi_slopes": torch.rand(B, HQ), "softcap": 3.0},
    "ranges": {"key_ranges": torch.tensor([[2, 30], [0, 9], [1, 5]]).int().view(B, 1, 1, 2)},
    "one range": {"key_ranges": torch.tensor([3, 18]).int().view(1, 1, 1, 2)},
}
LAYOUTS = ["contiguous", "heads before keys", "two layouts", "a view", "values within keys"]
CASES = [(layout, "causal") for layout in LAYOUTS] + [("contiguous", name) for name in OPTIONS]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layout, name", CASES)
def test_each_head_reads_its_own_pages(layout, name, backend):
    (k, v), options, group = caches(layout), OPTIONS[name], HQ // HKV
    q = torch.randn(B, HQ, 3, D)
    out, lse = fa_ops.attention_with_kv_cache(
        q, k, v, LENS, TABLE, return_lse=True, backend=backend, **options
    )
    for h in range(HKV):
        at = slice(h * group, h * group + group)
        own = {n: x[..., at] if n in ("sinks", "alibi_slopes") else x for n, x in options.items()}
        expected, expected_lse = fa_ops.attention_with_kv_cache(
            q[:, at], k[:, :, h : h + 1], v[:, :, h : h + 1], LENS, TABLE[:, h].contiguous(),
            return_lse=True, backend=backend, **own,
        )  # fmt: skip
        torch.testing.assert_close(out[:, at], expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[:, at], expected_lse, rtol=0, atol=2e-6)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()


def test_other_heads_and_pages_are_not_read():
    k, v = caches("contiguous")
    q, lens = torch.randn(B, HQ, 1, D), torch.full((B,), 18, dtype=torch.int32)
    expected = fa_ops.attention_with_kv_cache(q, k, v, lens, TABLE)
    for h in range(HKV):
        others = [p for p in range(PAGES) if p not in TABLE[:, h]]
        k[others, :, h] = v[others, :, h] = math.nan
    table = torch.where(torch.arange(COLUMNS) < 5, TABLE, 2**31 - 1)
    assert torch.equal(fa_ops.attention_with_kv_cache(q, k, v, lens, table), expected)
    table = TABLE.clone()
    table[..., 4] = -(2**31)  # behind 16 keys, where it may be anything
    short = torch.full((B,), 16, dtype=torch.int32)
    found = fa_ops.attention_with_kv_cache(q, k, v, short, table)
    assert torch.equal(found, fa_ops.attention_with_kv_cache(q, k, v, short, TABLE[..., :4]))


def test_selected_blocks_of_each_head():
    """A step over the blocks that lists name is attention_selected of its query."""
    k, v = (x.transpose(1, 2) for x in (torch.randn(1, PAGES * SIZE, HKV, D) for _ in range(2)))
    q, lists = torch.randn(1, HQ, 1, D), TABLE[:1, :, None]
    pages = [x.transpose(1, 2).view(PAGES, SIZE, HKV, D) for x in (k, v)]
    lens = torch.tensor([COLUMNS * SIZE], dtype=torch.int32)
    out = fa_ops.attention_with_kv_cache(q, *pages, lens, TABLE[:1])
    expected = fa_ops.attention_selected(q, k, v, lists, block_size=SIZE, is_causal=False)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_compiled_calls_are_eager_ones():
    compiled = torch.compile(fa_ops.attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    given = torch.randn(B, HQ, 1, D), *caches("contiguous"), LENS, TABLE
    assert torch.equal(compiled(*given), fa_ops.attention_with_kv_cache(*given))


K, V = caches("contiguous")
VALID = {"query": torch.randn(B, HQ, 1, D), "key_cache": K, "value_cache": V, "kv_lens": LENS,
         "page_table": TABLE}  # fmt: skip
BAD = {
    "heads": ({"page_table": TABLE[:, :1]}, ValueError,
              "page_table must have shape (3, 2, 5), got (3, 1, 5)"),
    "rank": ({"page_table": TABLE[:, None]}, ValueError, "page_table must have shape (B, max_pages)"
             ", or (B, Hkv, max_pages), got (3, 1, 2, 5)"),
    "int64": ({"page_table": TABLE.long()}, TypeError, "page_table must be int32, got int64"),
    "page": ({"page_table": TABLE.clamp(min=10) + 1}, ValueError,
             "page_table[0, 0, 0] is 11, but key_cache has 11 pages"),
    "no pages": ({"key_cache": K[0]}, ValueError, "key_cache must have shape (pages,"),
    "new keys": ({"key": K[:3, :1].transpose(1, 2), "value": V[:3, :1].transpose(1, 2)}, ValueError,
                 "key must be None where page_table has a row for each key head"),
    "lengths": ({"kv_lens": LENS[:2]}, ValueError, "kv_lens must have shape (3,), got (2,)"),
    "too long": ({"kv_lens": LENS + 1}, ValueError, "is 21, which with 0 new keys is past"),
    "sinks": ({"sinks": torch.randn(2)}, ValueError, "sinks must have shape (6,), got (2,)"),
}  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD)
def test_errors(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fa_ops.attention_with_kv_cache(**VALID | change)
