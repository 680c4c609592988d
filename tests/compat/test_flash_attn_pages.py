"""flash_attn: packed queries over pages, rows of a cache by index, and what dropout drops."""

import pytest
import torch

from fa_ops.compat import flash_attn as compat
from fa_ops.functions import varlen
from tests.compat.test_flash_attn import OPTIONS, caches, draw, naive, options_of, rows_of

QUERIES = [0, 5, 5, 6, 11]  # borders of the queries of four sequences
KEYS = [9, 3, 24, 2]


def pages(count=4, size=4):
    """Caches of some rows with a capacity of 24 keys, and their table."""
    table = torch.randperm(count * 24 // size).view(count, -1).int()
    shape = (table.numel(), size, 2, 8)
    return draw(*shape, grad=False), draw(*shape, grad=False), table


@pytest.mark.parametrize("size", [2, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_queries_attend_pages(name, size, monkeypatch):
    monkeypatch.setattr(varlen, "tile_queries", lambda query, key: size)
    k, v, table = pages()
    q, options = draw(13, 4, 8, grad=False), options_of(name, 4)
    ends_q = torch.tensor(QUERIES, dtype=torch.int32) + 1  # a token before and one behind
    ends_k = torch.tensor([0, *torch.tensor(KEYS).cumsum(0)], dtype=torch.int32)
    out, lse, weights = compat.flash_attn_varlen_func(
        q, k, v, ends_q, ends_k, 5, 24, **options, block_table=table, return_attn_probs=True
    )
    assert weights.numel() == 0 and out.shape == q.shape and lse.shape == (4, 13)
    for b, n in enumerate(KEYS):
        rows = slice(ends_q[b], ends_q[b + 1])
        held = (rows_of(cache, table)[b, :n] for cache in (k, v))
        expected, expected_lse = naive(q[rows], *held, **options)
        torch.testing.assert_close(out[rows], expected)
        expected_lse = expected_lse.masked_fill(expected_lse == -torch.inf, torch.inf)
        torch.testing.assert_close(lse[:, rows], expected_lse, check_dtype=False)
    assert not out[[0, 12]].any() and (lse[:, [0, 12]] == torch.inf).all()


def test_slopes_of_sequences_and_an_unknown_longest_sequence():
    k, v, table = pages()
    q, slopes = draw(11, 4, 8, grad=False), torch.rand(4, 4)
    ends_q = torch.tensor(QUERIES, dtype=torch.int32)
    ends_k = torch.tensor([0, *torch.tensor(KEYS).cumsum(0)], dtype=torch.int32)
    options = {"alibi_slopes": slopes, "block_table": table}
    out = compat.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 999, 24, **options)
    held = (rows_of(cache, table)[2, :24] for cache in (k, v))
    torch.testing.assert_close(out[5:6], naive(q[5:6], *held, alibi_slopes=slopes[2])[0])


def test_pages_have_no_gradient():
    k, v, table = pages()
    q = draw(11, 4, 8)
    ends = torch.tensor(QUERIES, dtype=torch.int32)
    out = compat.flash_attn_varlen_func(q, k, v, ends, ends, 5, 24, block_table=table)
    with pytest.raises(NotImplementedError, match="block_table.*no backward pass"):
        out.sum().backward()


@torch.no_grad()
def test_rows_of_a_cache_by_index():
    k_cache, v_cache = draw(5, 24, 2, 8, grad=False), draw(5, 24, 2, 8, grad=False)
    held = k_cache.clone(), v_cache.clone()
    q, k, v = draw(2, 3, 4, 8), draw(2, 3, 2, 8), draw(2, 3, 2, 8)
    lens, rows = torch.tensor([5, 17], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    out = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lens, cache_batch_idx=rows, causal=True
    )
    for b, (row, n) in enumerate(zip(rows.tolist(), lens.tolist())):
        for cache, new in zip(held, (k, v)):
            cache[row, n : n + 3] = new[b]
        expected, _ = naive(q[b], *(cache[row, : n + 3] for cache in held), causal=True)
        torch.testing.assert_close(out[b], expected)
    assert torch.equal(k_cache, held[0]) and torch.equal(v_cache, held[1])


def test_a_cache_may_have_more_rows_than_queries_and_require_grad():
    k_cache, v_cache = draw(5, 24, 2, 8), draw(5, 24, 2, 8)
    q = draw(2, 1, 4, 8)
    out = compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)
    assert not out.requires_grad
    rows = [naive(q[b], k_cache[b, :7], v_cache[b, :7])[0] for b in range(2)]
    torch.testing.assert_close(out, torch.stack(rows))


@torch.no_grad()
def test_lse_of_rows_without_keys_is_that_of_flash_attn():
    q = draw(1, 5, 2, 8)
    out, lse, _ = compat.flash_attn_func(q, q[:, :2], q[:, :2], causal=True, return_attn_probs=True)
    assert (lse[..., :3] == torch.inf).all() and lse[..., 3:].isfinite().all()
    assert not out[:, :3].any()
    k_cache, v_cache, _ = caches()
    _, lse = compat.flash_attn_with_kvcache(
        draw(2, 1, 4, 8), k_cache, v_cache, cache_seqlens=0, return_softmax_lse=True
    )
    assert (lse == torch.inf).all()


def dropped(weights, p, q, k, v, out, lse, options):
    """Check the weights of one sequence (H, Sq, Sk) against its results; what was dropped."""
    scores, visible = weights.abs(), weights != 0
    probabilities = scores / scores.sum(-1, keepdim=True).clamp(min=1e-30)
    assert scores.amax(-1).sub(1).abs().max() < 1e-6
    torch.testing.assert_close(naive(q, k, v, **options)[1], lse, check_dtype=False)
    kept = probabilities.where(weights > 0, 0) / (1 - p)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)
    torch.testing.assert_close((kept @ v).transpose(0, 1), out, atol=1e-6, rtol=1e-6)
    return (weights < 0).sum() / visible.sum()


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_weights_say_what_was_dropped(name):
    q, k, v = draw(2, 60, 4, 8), draw(2, 131, 2, 8), draw(2, 131, 2, 8)
    options = options_of(name, 4)
    out, lse, weights = compat.flash_attn_func(q, k, v, 0.25, **options, return_attn_probs=True)
    assert weights.shape == (2, 4, 128, 256) and weights.dtype == q.dtype
    assert not weights[:, :, 60:].any() and not weights[..., 131:].any()
    for b in range(2):
        part = weights[b, :, :60, :131]
        share = dropped(part, 0.25, q[b], k[b], v[b], out[b], lse[b], options)
        assert 0.2 < share < 0.3


@torch.no_grad()
def test_weights_of_packed_sequences():
    q, k, v = draw(40, 4, 8), draw(70, 2, 8), draw(70, 2, 8)
    ends_q, ends_k = ([0, 20, 40], [0, 50, 70])
    ends = (torch.tensor(e, dtype=torch.int32) for e in (ends_q, ends_k))
    out, lse, weights = compat.flash_attn_varlen_func(
        q, k, v, *ends, 20, 50, 0.25, causal=True, return_attn_probs=True
    )
    assert weights.shape == (2, 4, 128, 128)
    for b in range(2):
        i, j = (slice(*e[b : b + 2]) for e in (ends_q, ends_k))
        part = weights[b, :, :20, : j.stop - j.start]
        share = dropped(part, 0.25, q[i], k[j], v[j], out[i], lse[:, i], {"causal": True})
        assert 0.15 < share < 0.35


def test_dropout_with_weights_has_gradients():
    q = draw(1, 9, 2, 8)
    torch.manual_seed(3)
    out, *_ = compat.flash_attn_func(q, q, q, 0.25, return_attn_probs=True)
    torch.manual_seed(3)
    other = compat.flash_attn_func(q, q, q, 0.25)
    for one, two in zip(*(torch.autograd.grad(x.sum(), q) for x in (out, other)), strict=True):
        torch.testing.assert_close(one, two)
