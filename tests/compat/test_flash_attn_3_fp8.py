"""fp8 inputs of FlashAttention 3's functions: the results are those of the numbers and scales."""

import pytest
import torch
import torch.nn.functional as F

from fa_ops.compat import flash_attn_interface as compat
from fa_ops.compat.flash_attn_interface import attention as fp8

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
    with pytest.raises(
        ValueError, match=r"k_descale must .* \(2, 4\), got \(2, 2\): pass a factor for"
    ):
        compat.flash_attn_func(q, q, q, k_descale=HALVED)
    with pytest.raises(TypeError, match="q_descale is for inputs in float8_e4m3fn, but q is"):
        compat.flash_attn_func(*[q.bfloat16()] * 3, q_descale=HALVED)
    with pytest.raises(
        TypeError, match=r"v_descale must be float32, got float64: pass v_descale.float\(\)"
    ):
        compat.flash_attn_func(q, q, q, v_descale=torch.ones(2, 4).double())
    lens = torch.tensor([0, 1], dtype=torch.int32)
    for dtypes, match in (
        ((E4M3, torch.half, E4M3), "k_cache is float16, but q is float8_e4m3fn"),
        ((E4M3, E4M3, torch.half), "k is float16, but q is float8_e4m3fn"),
        ((torch.half, E4M3, torch.half), "q_descale is for inputs in float8_e4m3fn, but q is"),
    ):
        query, cache, new = (q.half().to(dtype) for dtype in dtypes)
        held = cache.clone()
        with pytest.raises(TypeError, match=match):
            compat.flash_attn_with_kvcache(query[:, :2], cache, cache.clone(), new[:, :2],
                                           new[:, :2], cache_seqlens=lens,
                                           q_descale=torch.ones(2, 4))  # fmt: skip
        assert torch.equal(cache.view(torch.uint8), held.view(torch.uint8))
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 4, which with 2 new keys"):
        compat.flash_attn_with_kvcache(q, q.clone(), q.clone(), q[:, :2], q[:, :2],
                                       cache_seqlens=lens + 3)  # fmt: skip
    with pytest.raises(ValueError, match="k has 3 heads, which does not divide query's 4"):
        compat.flash_attn_func(q, q[:, :, :3], q[:, :, :3], qv=q)


FACTORS = [torch.rand(2, 2, generator=torch.Generator().manual_seed(n)) + 0.3 for n in range(3)]
NAMES = "q_descale", "k_descale", "v_descale"
ALL = (True, True, True)


def dense(q, k, v, row, given, causal=False, qv=None, first=0, chunk=0, left=-1):
    """float64 out and lse of one sequence of numbers, of which the first keys are padding."""
    q, k, v = q.double(), k.double(), v.double()
    factors = [
        f[row].double() if is_given else torch.ones(2) for f, is_given in zip(FACTORS, given)
    ]
    width = q.shape[-1] + (0 if qv is None else v.shape[-1])
    group = q.shape[1] // k.shape[1]
    qd, kd, vd = (f[: k.shape[1]].double() for f in factors)
    k, v = ((x * f[:, None]).repeat_interleave(group, 1) for x, f in ((k, kd), (v, vd)))
    qd = qd.repeat_interleave(group)[:, None]
    scores = torch.einsum("qhd,khd->hqk", q * qd, k)
    if qv is not None:
        scores += torch.einsum("qhd,khd->hqk", qv.double() * qd, v)
    key = torch.arange(len(k))
    query = (torch.arange(len(q)) + len(k) - len(q))[:, None]
    seen = (key >= first).expand(len(q), -1)
    if causal:
        seen = seen & (key <= query)
    if left >= 0:
        seen = seen & (key >= query - left)
    if chunk:
        of = lambda x: (x - first).div(chunk, rounding_mode="floor")  # noqa: E731
        seen = seen & (of(key) == of(query))
    scores = (scores / width**0.5).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


def assert_exact(found, wanted, products=8):
    """Equal up to the rounding of products in so many bits."""
    assert found.dtype == torch.bfloat16
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < (0.05 if products == 8 else 0.006), error


def descales(given, heads=2):
    return {n: f[:, :heads].contiguous() for n, f, g in zip(NAMES, FACTORS, given) if g}


@pytest.fixture(autouse=True)
def silent():
    fp8._said.update(("qv", "cache_leftpad", "attention_chunk"))


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("given", [ALL, (True, False, False), (False, True, False), (False,) * 3])
def test_queries_of_values(given, chunk):
    q, k, v = numbers(2, 7, 4, 16), numbers(2, 9, 2, 16, seed=1), numbers(2, 9, 2, 32, seed=2)
    qv = numbers(2, 7, 4, 32, seed=3)
    options = dict(causal=True, attention_chunk=chunk, return_attn_probs=True, **descales(given))
    found, lse = compat.flash_attn_func(q, k, v, qv=qv, **options)
    rows = [dense(q[b], k[b], v[b], b, given, True, qv[b], chunk=chunk) for b in range(2)]
    assert_exact(found, torch.stack([out for out, _ in rows]), 16)
    wanted = torch.stack([lse for _, lse in rows])
    torch.testing.assert_close(lse.double(), wanted, atol=0.02, rtol=0.01)
    if not chunk:
        q, k, v, qv = (x.flatten(0, 1) for x in (q, k, v, qv))
        ends = [torch.arange(3, dtype=torch.int32) * n for n in (7, 9)]
        packed = compat.flash_attn_varlen_func(q, k, v, *ends, 7, 9, causal=True, qv=qv,
                                               **descales(given))  # fmt: skip
        assert torch.equal(packed.view_as(found), found)


USED_Q, USED_K = (torch.tensor(x, dtype=torch.int32) for x in ((3, 6), (9, 5)))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("used_q", [None, USED_Q])
@pytest.mark.parametrize("used_k", [None, USED_K])
@pytest.mark.parametrize("chunk", [0, 3])
def test_used_parts_and_chunks(used_q, used_k, chunk, heads):
    q = numbers(12, 4, 16)
    k, v = (numbers(30, heads, 16, seed=seed) for seed in (1, 2))
    found, lse = compat.flash_attn_varlen_func(
        q, k, v, ENDS, ENDS_K, 7, 21, used_q, used_k, causal=True, attention_chunk=chunk,
        return_attn_probs=True, num_splits=3, **descales(ALL, heads),
    )  # fmt: skip
    wanted, wanted_lse = torch.zeros(12, 4, 16).double(), torch.full((4, 12), -torch.inf).double()
    for b in range(2):
        queries = slice(ENDS[b], ENDS[b] + (ENDS.diff() if used_q is None else used_q)[b])
        keys = slice(ENDS_K[b], ENDS_K[b] + (ENDS_K.diff() if used_k is None else used_k)[b])
        wanted[queries], wanted_lse[:, queries] = dense(
            q[queries], k[keys], v[keys], b, ALL, True, chunk=chunk
        )
    assert_exact(found, wanted, 16 if chunk else 8)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=0.07, rtol=0)


def rotate(x, cos, sin, first, interleaved):
    """x (S, H, D) rotated from a position on, rounded to e4m3."""
    from fa_ops.backends.rotary import rotated

    positions = torch.arange(first, first + len(x))[None]
    x = rotated(x.float()[None].transpose(1, 2), cos.float(), sin.float(), interleaved, positions)
    return x.transpose(1, 2)[0].clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize(
    "rotary,leftpad,chunk,has_qv,causal",
    [(False, False, 0, False, True), (True, False, 0, False, True), (False, True, 0, False, True),
     (True, True, 0, False, False), (False, False, 5, False, True), (True, True, 5, False, True),
     (False, False, 0, True, True), (True, True, 4, True, True)],
)  # fmt: skip
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("given", [ALL, (False, False, True)])
def test_appending(rotary, leftpad, chunk, has_qv, causal, is_paged, is_packed, heads, given):
    lens, pads, new = torch.tensor([13, 6], dtype=torch.int32), (3, 1), torch.tensor([4, 2])
    most = torch.tensor([3, 3]) if not is_packed else torch.tensor([4, 1])
    new = new if is_packed else torch.tensor([3, 3])
    queries = [numbers(n, 4, 16, seed=b) for b, n in enumerate(most.tolist())]
    values = [numbers(n, 4, 16, seed=b + 7) for b, n in enumerate(most.tolist())]
    keys = [[numbers(n, heads, 16, seed=s + b) for b, n in enumerate(new.tolist())] for s in (2, 4)]
    caches = [numbers(2, 32, heads, 16, seed=seed) for seed in (8, 9)]
    cos, sin = (f(torch.rand(32, 8) * 6).to(E4M3) for f in (torch.cos, torch.sin))
    join = torch.cat if is_packed else torch.stack
    options = dict(
        cache_seqlens=lens, causal=causal, attention_chunk=chunk, **descales(given, heads)
    )
    if is_packed:
        ends = [F.pad(n.cumsum(0), (1, 0)).int() for n in (most, new)]
        options |= dict(cu_seqlens_q=ends[0], cu_seqlens_k_new=ends[1], max_seqlen_q=4)
    if rotary:
        options |= dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=is_paged)
    if leftpad:
        options["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if has_qv:
        options["qv"] = join(values)
    given_caches, table = [x.clone() for x in caches], torch.tensor([[3, 0], [1, 2]])
    if is_paged:
        for x, cache in zip(given_caches, caches):
            x.flatten(0, 1).unflatten(0, (4, 16))[table.flatten()] = cache.view(4, 16, heads, 16)
        given_caches = [x.view(4, 16, heads, 16) for x in given_caches]
        options["page_table"] = table.int()
    out, lse, *_ = compat.flash_attn_with_kvcache(
        join(queries), *given_caches, *map(join, keys), return_softmax_lse=True, **options
    )
    found = [x[table].view(2, 32, heads, 16) if is_paged else x for x in given_caches]
    wanted = []
    for b in range(2):
        start, end = int(lens[b]), int(lens[b] + new[b])
        q, k = queries[b], keys[0][b]
        if rotary:
            k = rotate(k, cos, sin, start, is_paged)
            parts = [q] if causal or chunk else q.split(1)
            q = torch.cat([rotate(x, cos, sin, start, is_paged) for x in parts])
        for cache, x in zip(caches, (k, keys[1][b])):
            cache[b, start:end] = x
        row = (cache[b, :end] for cache in caches)
        qv = values[b] if has_qv else None
        first = pads[b] if leftpad else 0
        wanted.append(dense(q, *row, b, given, causal, qv, first, chunk)[0])
    for cache, x in zip(caches, found):
        assert torch.equal(cache.view(torch.uint8), x.view(torch.uint8))
    assert_exact(out, join(wanted), 16 if leftpad or chunk or has_qv else 8)


def test_rotated_keys_are_clamped_and_rows_chosen():
    q, new = numbers(2, 1, 4, 16), torch.full((2, 1, 2, 16), 440.0).to(E4M3)
    k, v = (numbers(5, 8, 2, 16, seed=seed) for seed in (1, 2))
    angle = torch.full((8, 8), 0.8)
    index = torch.tensor([4, 1], dtype=torch.int32)
    out = compat.flash_attn_with_kvcache(
        q, k, v, new, new, rotary_cos=angle.cos(), rotary_sin=angle.sin(), cache_seqlens=3,
        cache_batch_idx=index,
    )  # fmt: skip
    assert k[index.long(), 3].float().max() == 448 and out.isfinite().all()
    assert torch.equal(v[index.long(), 3].float(), new[:, 0].float())


def test_appending_16_bits_to_numbers_is_clamped():
    q, new = torch.randn(3, 4, 16).half(), torch.full((3, 2, 16), 600.0).half()
    k, v = (numbers(2, 8, 2, 16, seed=seed) for seed in (1, 2))
    ends = torch.tensor([0, 1, 3], dtype=torch.int32)
    out = compat.flash_attn_with_kvcache(
        q, k, v, new, new, cache_seqlens=3, cu_seqlens_q=ends, cu_seqlens_k_new=ends
    )
    assert (k[1, 3:5].float() == 448).all() and out.isfinite().all()


@pytest.mark.parametrize("has_qv", [False, True])
def test_backward_raises(has_qv):
    q, k, v = numbers(2, 7, 2, 16), numbers(2, 9, 2, 16, seed=1), numbers(2, 9, 2, 16, seed=2)
    k.requires_grad_()
    qv = numbers(2, 7, 2, 16, seed=3) if has_qv else None
    scale = torch.ones(2, 2, requires_grad=True)
    ends = [torch.arange(3, dtype=torch.int32) * n for n in (7, 9)]
    packed = [x if x is None else x.flatten(0, 1) for x in (q, k, v, qv)]
    for found in (
        compat.flash_attn_func(q, k, v, qv=qv),
        compat.flash_attn_func(q, k.detach(), v, qv=qv, return_attn_probs=True, q_descale=scale)[1],
        compat.flash_attn_varlen_func(*packed[:3], *ends, 7, 9, qv=packed[3]),
        compat.flash_attn_varlen_func(*packed[:3], *ends, 7, 9, attention_chunk=3),
    ):
        assert found.requires_grad
        with pytest.raises(NotImplementedError, match="float8_e4m3fn tensors has no backward"):
            found.sum().backward()
    with torch.no_grad():
        assert not compat.flash_attn_func(q, k, v, qv=qv).requires_grad
    assert not compat.flash_attn_with_kvcache(q, k, v).requires_grad


def test_warnings_come_once_for_each_reason():
    fp8._said.clear()
    q = numbers(1, 4, 2, 16)
    pad = torch.zeros(1, dtype=torch.int32)
    with pytest.warns(RuntimeWarning, match="no kernel has 8-bit products with") as found:
        for _ in range(2):
            compat.flash_attn_func(q, q, q, qv=q)
            compat.flash_attn_with_kvcache(q, q, q, cache_leftpad=pad)
            compat.flash_attn_with_kvcache(q, q, q, attention_chunk=2)
            compat.flash_attn_func(q, q, q, attention_chunk=2)  # has 8-bit products
            compat.flash_attn_with_kvcache(q, q.clone(), q.clone(), q[:, :1], q[:, :1],
                                           cache_seqlens=2)  # fmt: skip
    assert [str(w.message).split()[6] for w in found] == [
        "qv:", "cache_leftpad:", "attention_chunk:"
    ]  # fmt: skip
    assert {w.filename for w in found} == {__file__}


def test_compiled():
    q, k, v = numbers(2, 3, 4, 16), numbers(2, 16, 2, 16, seed=1), numbers(2, 16, 2, 16, seed=2)
    pad, lens = (torch.tensor(x, dtype=torch.int32) for x in ([2, 0], [9, 4]))

    def f(q, k, v, new):
        out = compat.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lens, causal=True,
                                             **descales(ALL))  # fmt: skip
        return out, compat.flash_attn_with_kvcache(q, k, v, cache_leftpad=pad)

    fp8._said.clear()
    found = [k.clone(), v.clone()]
    with pytest.warns(RuntimeWarning, match="with cache_leftpad: products"):
        outs = torch.compile(f, backend="aot_eager", fullgraph=True)(q, *found, v[:, :3])
    for a, b in zip((*outs, *found), (*f(q, k, v, v[:, :3].clone()), k, v)):
        assert torch.equal(a.float(), b.float())


def test_no_sequences_and_no_keys():
    q, none = numbers(4, 4, 16), torch.zeros(1, dtype=torch.int32)
    k = numbers(0, 2, 16)
    empty = torch.ones(0, 2)
    out = compat.flash_attn_varlen_func(q, q, q, none, none, 0, 0, seqused_q=none[:0],
                                        attention_chunk=2, k_descale=torch.ones(0, 4))  # fmt: skip
    assert not out.any()
    ends = torch.tensor([0, 4], dtype=torch.int32)
    zero = torch.zeros(2, dtype=torch.int32)
    for options in ({}, {"qv": q}, {"attention_chunk": 2}, {"seqused_q": ends[1:]}):
        out = compat.flash_attn_varlen_func(q, k, k, ends, zero, 4, 0, **options)
        assert out.shape == (4, 4, 16) and not out.any(), options
    out = compat.flash_attn_func(q[None], k[None], k[None], qv=q[None])
    assert not out.any() and empty.numel() == 0
