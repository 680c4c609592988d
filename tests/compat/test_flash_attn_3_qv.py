"""qv of FlashAttention 3, queries of the values, against scores that are written out."""

import pytest
import torch

from fa_ops.compat import flash_attn_interface as compat
from fa_ops.compat.flash_attn_interface import attention as values
from tests.compat.test_flash_attn import caches, draw, rows_of
from tests.compat.test_flash_attn_3 import MASKS, naive

EACH_MASK = pytest.mark.parametrize("name", ["causal", "window", "causal chunk", "softcap"])


def expected(q, qv, k, v, **mask):
    """out and lse of one sequence, with D + Dv features in a product."""
    return naive(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, **mask)


@EACH_MASK
def test_batches(name):
    q, k, v, qv = (draw(2, *shape) for shape in ((9, 4, 8), (13, 2, 8), (13, 2, 16), (9, 4, 16)))
    out, lse = compat.flash_attn_func(q, k, v, qv=qv, **MASKS[name], return_attn_probs=True)
    rows = [expected(*row, **MASKS[name]) for row in zip(q, qv, k, v)]
    torch.testing.assert_close(out, torch.stack([row[0] for row in rows]))
    torch.testing.assert_close(lse, torch.stack([row[1] for row in rows]), check_dtype=False)
    assert torch.equal(compat.flash_attn_func(q, k, v, qv=qv, **MASKS[name]), out)
    with pytest.raises(NotImplementedError, match="attention with qv has no backward pass"):
        out.sum().backward()


@EACH_MASK
@pytest.mark.parametrize("used", [False, True])
@torch.no_grad()
def test_packed_sequences(name, used):
    ends_q, ends_k = [0, 4, 4, 11], [0, 6, 8, 17]
    q, k, v, qv = draw(11, 4, 8), draw(17, 2, 8), draw(17, 2, 16), draw(11, 4, 16)
    used_q, used_k = ([3, 0, 5], [4, 2, 9]) if used else ([4, 0, 7], [6, 2, 9])
    options, mask = {}, MASKS[name]
    if used:
        options = {"seqused_q": torch.tensor(used_q).int(), "seqused_k": torch.tensor(used_k).int()}
    ends = (torch.tensor(e, dtype=torch.int32) for e in (ends_q, ends_k))
    out, lse = compat.flash_attn_varlen_func(
        q, k, v, *ends, 7, 9, qv=qv, **options, **mask, return_attn_probs=True
    )
    wanted, wanted_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for a, n, c, m in zip(ends_q, used_q, ends_k, used_k):
        rows, keys = slice(a, a + n), slice(c, c + m)
        wanted[rows], row_lse = expected(q[rows], qv[rows], k[keys], v[keys], **mask)
        wanted_lse[:, rows] = row_lse.float()
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


@EACH_MASK
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [0, 4])
@torch.no_grad()
def test_caches_and_new_keys(name, packed, page_size):
    k_cache, v_cache, table = caches(page_size)
    lens, angle = torch.tensor([5, 17], dtype=torch.int32), torch.rand(24, 4) * 6
    q, qv, k, v = (draw(2, 2, H, 8) for H in (4, 4, 2, 2))
    inputs, options = [q, qv], {}
    if packed:
        inputs = [x.flatten(0, 1) for x in inputs]
        options = {"cu_seqlens_q": torch.tensor([0, 2, 4], dtype=torch.int32), "max_seqlen_q": 2}
    out = compat.flash_attn_with_kvcache(
        inputs[0], k_cache, v_cache, k, v, inputs[1], angle.cos(), angle.sin(), lens,
        page_table=table, **options, **MASKS[name],
    )  # fmt: skip
    plain = compat.flash_attn_with_kvcache(  # of the same rotated queries, keys already written
        inputs[0], k_cache.clone(), v_cache.clone(), k, v, None, angle.cos(), angle.sin(), lens,
        page_table=table, **options, **MASKS[name],
    )  # fmt: skip
    assert plain.shape == out.shape and not torch.allclose(plain, out)
    queries = rotated(q, angle, lens, MASKS[name])
    for b in range(2):
        total = int(lens[b]) + 2
        held = (rows_of(cache, table)[b, :total] for cache in (k_cache, v_cache))
        wanted = expected(queries[b], qv[b], *held, **MASKS[name])[0]
        torch.testing.assert_close(out.view_as(qv)[b], wanted)


def rotated(q, angle, lens, mask):
    """Interleaved features of q (B, Sq, H, 8) rotated to the positions behind the cache."""
    differ = mask.get("causal") or mask.get("window_size", (-1, -1)) != (-1, -1)
    steps = torch.arange(q.shape[1]) if differ else torch.zeros(q.shape[1], dtype=torch.long)
    cos, sin = (t[lens[:, None] + steps, None].to(q.dtype) for t in (angle.cos(), angle.sin()))
    x, y = q[..., ::2], q[..., 1::2]
    return torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2)


@torch.no_grad()
def test_sizes_of_zero():
    q, k, v, qv = (torch.randn(2, *s) for s in ((5, 4, 8), (7, 2, 8), (7, 2, 16), (5, 4, 16)))
    out, lse = compat.flash_attn_func(q, k[:, :0], v[:, :0], qv=qv, return_attn_probs=True)
    assert not out.any() and (lse == -torch.inf).all()
    assert compat.flash_attn_func(q[:0], k[:0], v[:0], qv=qv[:0]).shape == (0, 5, 4, 16)
    assert compat.flash_attn_func(q[:, :0], k, v, qv=qv[:, :0]).shape == (2, 0, 4, 16)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    out = compat.flash_attn_varlen_func(q[0], k[0, :0], v[0, :0], ends, ends * 0, 5, 0, qv=qv[0])
    assert out.shape == qv[0].shape and not out.any()


@torch.no_grad()
def test_latent_caches_are_not_copied():
    latent = torch.randn(2, 24, 1, 24)
    v_cache, k_cache = latent.split([16, 8], -1)
    assert values.joined(k_cache, v_cache).data_ptr() == latent.data_ptr()
    q, qv, lens = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 16), torch.tensor([5, 24]).int()
    results = [
        compat.flash_attn_with_kvcache(q, *pair, qv=qv, cache_seqlens=lens)
        for pair in ((k_cache, v_cache), (k_cache.clone(), v_cache.clone()))
    ]
    assert torch.equal(*results)
    first = expected(q[0], qv[0], k_cache[0, :5], v_cache[0, :5])[0]
    torch.testing.assert_close(results[0][0], first)
    for k, v in ((v_cache[..., :8], k_cache), (k_cache, v_cache[..., :8])):
        assert torch.equal(values.joined(k, v), torch.cat((v, k), -1))
