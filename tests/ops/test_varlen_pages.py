"""attention_varlen over keys in pages."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fa_ops
from fa_ops.functions import varlen

COUNTS, KEYS = [3, 0, 1, 7, 5], [9, 4, 24, 2, 13]  # queries and keys of each sequence
TOKENS = sum(COUNTS) + 2  # the first and the last are in no sequence
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "window": (3, 0)},
    "window": {"window": (4, 2)},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "slopes of sequences": {"alibi_slopes": torch.rand(5, 4), "is_causal": True},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.randn(4), "scale": 0.3},
}


def drawn(page_size: int = 4, D: int = 16, Dv: int = 8) -> tuple:
    """Query, caches, borders, lengths and table, with pages in random order."""
    g = torch.Generator().manual_seed(0)
    rows, width = len(KEYS), -(-24 // page_size)
    table = torch.randperm(rows * width + 3, generator=g)[: rows * width].view(rows, width).int()
    shape = rows * width + 3, page_size, 2
    q = torch.randn(TOKENS, 4, D, generator=g)
    k, v = torch.randn(*shape, D, generator=g), torch.randn(*shape, Dv, generator=g)
    ends = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0)], dtype=torch.int32) + 1
    lens = torch.tensor(KEYS, dtype=torch.int32)
    return q, k, v, ends, lens, table


def packed_keys(k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, table: torch.Tensor) -> tuple:
    """The keys of all sequences one after another, and their borders."""
    held = (
        [cache[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lens.tolist())]
        for cache in (k, v)
    )
    ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    return *(torch.cat(rows) for rows in held), ends


@pytest.mark.parametrize("size", [2, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_packed_keys(name, size, monkeypatch):
    monkeypatch.setattr(varlen, "tile_queries", lambda query, key: size)
    q, k, v, ends, lens, table = drawn()
    out, lse = fa_ops.attention_varlen(
        q, k, v, ends, None, 7, kv_lens=lens, page_table=table, return_lse=True, **OPTIONS[name]
    )
    packed_k, packed_v, ends_k = packed_keys(k, v, lens, table)
    expected, expected_lse = fa_ops.attention_varlen(
        q, packed_k, packed_v, ends, ends_k, return_lse=True, backend="reference", **OPTIONS[name]
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    assert not out[[0, -1]].any() and (lse[:, [0, -1]] == -torch.inf).all()
    of_borders = fa_ops.attention_varlen(q, k, v, ends, ends_k, page_table=table, **OPTIONS[name])
    torch.testing.assert_close(of_borders, out)


def test_a_prompt_and_decoding_steps_share_a_batch():
    g = torch.Generator().manual_seed(1)
    counts, keys = torch.tensor([300, 1, 1]), torch.tensor([300, 900, 40], dtype=torch.int32)
    k, v = (torch.randn(12, 128, 2, 16, generator=g) for _ in range(2))
    table = torch.randperm(12, generator=g)[:8].int().repeat(3, 1)
    q = torch.randn(302, 4, 16, generator=g)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    options = {"is_causal": True}
    out = fa_ops.attention_varlen(q, k, v, ends, None, kv_lens=keys, page_table=table, **options)
    packed_k, packed_v, ends_k = packed_keys(k, v, keys, table)
    expected = fa_ops.attention_varlen(q, packed_k, packed_v, ends, ends_k, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "Hq, D, queries", [(2, 128, 128), (8, 128, 32), (14, 128, 18), (8, 64, 64)]
)
def test_tiles_have_whole_queries_of_the_heads_of_a_group(Hq, D, queries):
    q, key = torch.empty(300, Hq, D), torch.empty(4, 16, 2, D)
    assert varlen.tile_queries(q, key) == queries
    ends, lens, table = torch.tensor([0, 290, 300]).int(), torch.zeros(2).int(), torch.zeros(2, 4)
    call = varlen.tiled_call(q, key, ends, lens, table.int(), None, {"is_causal": True})
    assert call.query.shape == (300 // queries + 2, Hq, queries, D)


@pytest.mark.parametrize("tokens, rows", [(0, 2), (3, 0), (0, 0)])
def test_sizes_of_zero(tokens, rows):
    q, k, v, _, _, table = drawn()
    ends = torch.zeros(rows + 1, dtype=torch.int32)
    lens = torch.ones(rows, dtype=torch.int32)
    out, lse = fa_ops.attention_varlen(
        q[:tokens], k, v, ends, None, kv_lens=lens, page_table=table[:rows], return_lse=True
    )
    assert out.shape == (tokens, 4, 8) and not out.any()
    assert lse.shape == (4, tokens) and (lse == -torch.inf).all()


def test_it_compiles_to_one_graph_for_all_lengths():
    q, k, v, ends, lens, table = drawn()

    def attend(q, ends, lens):
        return fa_ops.attention_varlen(
            q, k, v, ends, None, is_causal=True, kv_lens=lens, page_table=table
        )

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, ends, lens), attend(q, ends, lens))
    torch._dynamo.mark_dynamic(q, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (15, 12):
            given = q[:n].clone(), ends.clamp(max=n), lens
            torch.testing.assert_close(compiled(*given), attend(*given))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_lens": None}, "kv_lens or cu_seqlens_k must be given with page_table"),
        ({"dropout_p": 0.1}, "dropout_p must be 0 with page_table, got 0.1"),
        ({"max_seqlen_q": -1}, "max_seqlen_q must not be negative, got -1"),
        ({"key": torch.zeros(4, 2, 16)}, r"key must have shape \(pages, page_size, Hkv, D\)"),
        ({"query": torch.zeros(1, 4, 2, 16)}, r"query must have shape \(T, H, D\)"),
        ({"page_table": torch.zeros(5).int()}, r"page_table must have shape \(B, max_pages\)"),
        ({"page_table": torch.zeros(5, 6)}, "page_table must be int32, got float32"),
        ({"kv_lens": torch.zeros(4).int()}, r"kv_lens must have shape \(5,\), got \(4,\)"),
        ({"kv_lens": torch.tensor([9, 4, 25, 2, 13]).int()}, r"kv_lens\[2\] is 25"),
        ({"page_table": torch.full((5, 6), 33).int()}, r"page_table\[0, 0\] is 33, but key has"),
        ({"value": torch.zeros(31, 4, 2, 8)}, "value has 31 pages, but key has 33"),
        ({"value": torch.zeros(33, 3, 2, 8)}, "value has pages of 3 keys, but key of 4"),
        ({"value": torch.zeros(33, 4, 1, 8)}, "value has 1 heads, but key has 2"),
        ({"key": torch.zeros(33, 4, 2, 24)}, "key has head dimension 24, but query's is 16"),
        ({"key": torch.zeros(33, 4, 2, 16).half()}, "value is float32, but key is float16"),
        ({"query": torch.zeros(TOKENS, 4, 16).half()}, "key must be query's float16"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 2, 4, 5, 6]).int()}, r"cu_seqlens_q\[2\] is 2"),
        (
            {"cu_seqlens_q": torch.zeros(3).int()},
            r"cu_seqlens_q must have shape \(6,\), got \(3,\)",
        ),
        (
            {"query": torch.zeros(TOKENS, 4, 16, requires_grad=True)},
            "query must not require grad: attention_varlen with page_table has no gradient",
        ),
        (
            {"sinks": torch.zeros(4, requires_grad=True)},
            "sinks must not require grad: attention_varlen with page_table has no gradient",
        ),
        ({"page_table": [[0]]}, "page_table must be a Tensor, got list"),
        ({"max_seqlen_q": 2.5}, "max_seqlen_q must be an int or None, got 2.5"),
        ({"max_seqlen_q": 6}, "max_seqlen_q is 6, but a sequence has 7 queries"),
        ({"max_seqlen_k": "24"}, "max_seqlen_k must be an int or None, got '24'"),
        ({"max_seqlen_k": -1}, "max_seqlen_k must not be negative, got -1"),
        ({"deterministic": 1}, "deterministic must be a bool, got 1"),
        ({"cu_seqlens_k": torch.zeros(6).int()}, "one of them, got both"),
        (
            {"alibi_slopes": torch.zeros(6, 4)},
            r"alibi_slopes must have shape \(5, 4\), got \(6, 4\)",
        ),
        (
            {"alibi_slopes": torch.zeros(1, 4)},
            r"alibi_slopes must have shape \(5, 4\), got \(1, 4\)",
        ),
        ({"alibi_slopes": 0.5}, "alibi_slopes must be a Tensor, got float"),
    ],
)
def test_errors(change, message):
    q, k, v, ends, lens, table = drawn()
    given = {"query": q, "key": k, "value": v, "cu_seqlens_q": ends, "cu_seqlens_k": None,
             "kv_lens": lens, "page_table": table}  # fmt: skip
    fa_ops.attention_varlen(**given)
    with pytest.raises((ValueError, TypeError), match=message):
        fa_ops.attention_varlen(**given | change)


def test_options_that_cannot_be_hashed_are_named_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(varlen, "_may_run", lambda *args: True)
    q, k, v, ends, lens, table = drawn()
    with pytest.raises(TypeError, match=r"scale must be a number, got \[1.0\]"):
        fa_ops.attention_varlen(q, k, v, ends, None, kv_lens=lens, page_table=table, scale=[1.0])


@pytest.mark.parametrize(
    "borders, message",
    [
        (torch.tensor(0).int(), r"cu_seqlens_k must have shape \(6,\), got \(\)"),
        (torch.zeros(5).int(), r"cu_seqlens_k must have shape \(6,\), got \(5,\)"),
        (torch.zeros(6).long(), "cu_seqlens_k must be int32, got int64"),
        (torch.tensor([0, 3, 2, 4, 5, 6]).int(), r"cu_seqlens_k\[2\] is 2, but must not be less"),
        ([0] * 6, "cu_seqlens_k must be a Tensor, got list"),
    ],
)
def test_errors_of_borders_of_keys_name_them(borders, message):
    q, k, v, ends, _, table = drawn()
    with pytest.raises((ValueError, TypeError), match=message):
        fa_ops.attention_varlen(q, k, v, ends, borders, page_table=table)


@pytest.mark.parametrize("tokens, rows", [(0, 2), (3, 0)])
@pytest.mark.parametrize(
    "bad", [{"softcap": -1.0}, {"backend": "gpu"}, {"window": 3}, {"sinks": torch.zeros(5)}]
)
def test_sizes_of_zero_do_not_excuse_wrong_options(tokens, rows, bad):
    q, k, v, _, _, table = drawn()
    ends, lens = torch.zeros(rows + 1).int(), torch.ones(rows).int()
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        fa_ops.attention_varlen(
            q[:tokens], k, v, ends, None, kv_lens=lens, page_table=table[:rows], **bad
        )


def test_fake_and_meta_tensors_have_no_values_to_check():
    given = drawn()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in given]
        q, k, v, ends, lens, table = fakes
        out = fa_ops.attention_varlen(q, k, v, ends, None, kv_lens=lens, page_table=table)
    q, k, v, ends, lens, table = (x.to("meta") for x in given)
    on_meta = fa_ops.attention_varlen(q, k, v, ends, None, kv_lens=lens, page_table=table)
    assert out.shape == on_meta.shape == (TOKENS, 4, 8) and out.dtype == q.dtype


def test_it_is_traced_without_reading_values():
    q, k, v, ends, lens, table = drawn()

    def attend(q, ends, lens):
        return fa_ops.attention_varlen(q, k, v, ends, None, kv_lens=lens, page_table=table)

    traced = make_fx(attend)(q, ends, lens)
    torch.testing.assert_close(traced(2 * q, ends, lens - 1), attend(2 * q, ends, lens - 1))


def test_vmap_over_queries_and_lengths():
    q, k, v, ends, lens, table = drawn()

    def attend(q, lens):
        return fa_ops.attention_varlen(q, k, v, ends, None, kv_lens=lens, page_table=table)

    samples = torch.stack([q, 2 * q]), torch.stack([lens, lens - 1])
    expected = torch.stack([attend(*one) for one in zip(*samples)])
    torch.testing.assert_close(torch.func.vmap(attend)(*samples), expected)


def test_explain_names_the_call_over_a_cache():
    q, k, v, ends, lens, table = drawn()
    found = fa_ops.explain(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=None, kv_lens=lens, page_table=table
    )
    rows = q.new_empty(len(COUNTS), 4, TOKENS, 16)
    expected = fa_ops.explain(rows, k, v, kv_lens=lens, page_table=table)
    assert found.backend == expected.backend == "cpu" and found.kernel == expected.kernel
