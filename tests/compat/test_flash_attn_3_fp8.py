"""fp8 inputs of FlashAttention 3's functions: the results are those of the numbers and scales."""

import pytest
import torch

from fa_ops.compat import flash_attn_interface as compat

E4M3 = torch.float8_e4m3fn
HALVED = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)
ENDS_K = torch.tensor([0, 9, 30], dtype=torch.int32)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(E4M3)


def scaled(x, scale, rows):
    """The 16-bit tensor that fp8 numbers stand for; `rows`: the sequence of each."""
    scale = scale.repeat_interleave(x.shape[-2] // scale.shape[1], 1)[rows]
    return (x.float() * scale.unsqueeze(-1)).bfloat16()


def assert_near(found, wanted):
    assert found.dtype == torch.bfloat16
    assert (found - wanted).float().norm() < 0.06 * wanted.float().norm()


def test_batches():
    q, k, v = numbers(2, 7, 4, 16), numbers(2, 9, 2, 16, seed=1), numbers(2, 9, 2, 16, seed=2)
    rows = torch.arange(2)[:, None]
    exact = [scaled(x, HALVED, rows) for x in (q, k, v)]
    scales = dict(q_descale=HALVED, k_descale=HALVED, v_descale=HALVED)
    found, lse = compat.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **scales)
    wanted, wanted_lse = compat.flash_attn_func(*exact, causal=True, return_attn_probs=True)
    assert_near(found, wanted)
    torch.testing.assert_close(lse, wanted_lse, atol=0.07, rtol=0)  # of rounded weights
    plain = compat.flash_attn_func(q, k, v, causal=True)
    assert_near(plain, compat.flash_attn_func(*(x.bfloat16() for x in (q, k, v)), causal=True))


def test_packed_sequences():
    q, k, v = numbers(12, 4, 16), numbers(30, 2, 16, seed=1), numbers(30, 2, 16, seed=2)
    tokens = [torch.repeat_interleave(ends.diff()) for ends in (ENDS, ENDS_K, ENDS_K)]
    exact = [scaled(x, HALVED, rows) for x, rows in zip((q, k, v), tokens)]
    packing = ENDS, ENDS_K, 7, 21
    scales = dict(q_descale=HALVED, k_descale=HALVED, v_descale=HALVED)
    found = compat.flash_attn_varlen_func(q, k, v, *packing, causal=True, **scales)
    assert_near(found, compat.flash_attn_varlen_func(*exact, *packing, causal=True))


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_caches(is_paged, is_packed):
    q = numbers(12, 4, 16) if is_packed else numbers(2, 6, 4, 16)
    k, v = (numbers(2, 32, 2, 16, seed=seed) for seed in (1, 2))
    rows = torch.repeat_interleave(ENDS.diff()) if is_packed else torch.arange(2)[:, None]
    cached = [scaled(x, HALVED, torch.arange(2)[:, None]) for x in (k, v)]
    options = {"cache_seqlens": torch.tensor([32, 20], dtype=torch.int32), "causal": True}
    if is_packed:
        options |= {"cu_seqlens_q": ENDS, "max_seqlen_q": 7}
    wanted = compat.flash_attn_with_kvcache(scaled(q, HALVED, rows), *cached, **options)
    if is_paged:
        k, v = (x.unflatten(1, (2, 16)).flatten(0, 1) for x in (k, v))
        options["page_table"] = torch.arange(4, dtype=torch.int32).view(2, 2)
    scales = dict(q_descale=HALVED, k_descale=HALVED, v_descale=HALVED)
    assert_near(compat.flash_attn_with_kvcache(q, k, v, **options, **scales), wanted)


def test_packed_projections_keep_the_order_of_their_factors():
    qkv = numbers(2, 7, 3, 2, 16)
    names = ("q_descale", "k_descale", "v_descale")
    scales = {n: HALVED * factor for n, factor in zip(names, (2.0, 1.0, 4.0))}
    rows = torch.arange(2)[:, None]
    exact = [scaled(x, scales[n], rows) for x, n in zip(qkv.unbind(2), names)]
    wanted = compat.flash_attn_func(*exact, causal=True)
    assert_near(compat.flash_attn_qkvpacked_func(qkv, causal=True, **scales), wanted)
    joined = qkv.flatten(2, 3)
    found = compat.flash_attn_qkvpacked_func(joined, causal=True, num_heads_q=2, **scales)
    assert_near(found, wanted)


def test_errors():
    q = numbers(2, 5, 4, 16)
    with pytest.raises(ValueError, match=r"k_descale must have shape \(2, 4\), got \(2, 2\)"):
        compat.flash_attn_func(q, q, q, k_descale=HALVED)
    with pytest.raises(TypeError, match="q_descale is for inputs in float8_e4m3fn, but q is"):
        compat.flash_attn_func(*[q.bfloat16()] * 3, q_descale=HALVED)
    with pytest.raises(NotImplementedError, match="q must be in 16 bits or more with qv"):
        compat.flash_attn_func(q, q, q, qv=q)
    with pytest.raises(NotImplementedError, match="q_descale must be None with k, got"):
        compat.flash_attn_with_kvcache(q.half(), q, q, q.half(), q.half(), q_descale=HALVED)
