"""flash_attn_interface of FlashAttention 3 against masks that are written out."""

import functools
import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_ops import tracing
from fa_ops.compat import flash_attn_interface as compat
from fa_ops.compat.flash import caches_of
from fa_ops.compat.flash_attn_interface import attention
from tests.compat.test_flash_attn import caches, draw, rows_of

# of the module at the end of 2025
SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size "
    "attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q "
    "seqused_k softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk "
    "softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q "
    "rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size attention_chunk "
    "softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
}
MASKS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "wide window": {"window_size": (23, 2)},  # of every key, for caches of 24 keys and 3 queries
    "chunk": {"attention_chunk": 4},
    "causal chunk": {"attention_chunk": 3, "causal": True},
    "window in a chunk": {"attention_chunk": 5, "window_size": (3, 1)},
    "softcap": {"softcap": 2.0, "causal": True},
}
EACH_MASK = pytest.mark.parametrize("name", MASKS)


def naive(q, k, v, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0):
    """The out and lse of one sequence (S, H, D)."""
    group, (Sq, Sk) = q.shape[1] // k.shape[1], (q.shape[0], k.shape[0])
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    s = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    position, j = torch.arange(Sq)[:, None] + Sk - Sq, torch.arange(Sk)
    left, right = (side if side >= 0 else 10**6 for side in window_size)
    keep = (j - position >= -left) & (j - position <= (0 if causal else right))
    if attention_chunk:
        first = position - position % attention_chunk
        keep &= (j >= first) & (j < first + attention_chunk)
    s = s.masked_fill(~keep, float("-inf"))
    lse = s.logsumexp(-1)
    return ((s - lse[..., None]).exp().nan_to_num() @ v).transpose(0, 1), lse


def assert_same(found, expected, inputs):
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    grads = (torch.autograd.grad(x, inputs, grad) for x in (found, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attention_3(name):
    assert list(inspect.signature(getattr(compat, name)).parameters) == SIGNATURES[name].split()


@EACH_MASK
@pytest.mark.parametrize("Sk", [6, 13])
def test_batches(name, Sk):
    q, k, v = draw(2, 9, 4, 8), draw(2, Sk, 2, 8), draw(2, Sk, 2, 8)
    out, lse = compat.flash_attn_func(q, k, v, **MASKS[name], return_attn_probs=True)
    rows = [naive(*row, **MASKS[name]) for row in zip(q, k, v)]
    torch.testing.assert_close(lse, torch.stack([row[1] for row in rows]), check_dtype=False)
    assert_same(out, torch.stack([row[0] for row in rows]), (q, k, v))


@EACH_MASK
@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences(name, used):
    ends_q, ends_k = [0, 4, 4, 11], [0, 6, 8, 17]
    q, k, v = draw(11, 4, 8), draw(17, 2, 8), draw(17, 2, 8)
    used_q, used_k = ([3, 0, 2], [4, 2, 9]) if used else ([4, 0, 7], [6, 2, 9])
    options = dict(MASKS[name])
    if used:
        options |= {
            "seqused_q": torch.tensor(used_q).int(),
            "seqused_k": torch.tensor(used_k).int(),
        }
    ends = (torch.tensor(e, dtype=torch.int32) for e in (ends_q, ends_k))
    out, lse = compat.flash_attn_varlen_func(
        q, k, v, *ends, max(used_q), max(used_k), **options, return_attn_probs=True
    )
    expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for a, n, c, m in zip(ends_q, used_q, ends_k, used_k):
        row, row_lse = naive(q[a : a + n], k[c : c + m], v[c : c + m], **MASKS[name])
        expected[a : a + n], expected_lse[:, a : a + n] = row, row_lse.float()
    torch.testing.assert_close(lse, expected_lse)
    assert_same(out, expected, (q, k, v))


def test_more_unused_queries_than_used_ones():
    """What lies between two segments may be longer than max_seqlen_q."""
    q, k, v = draw(16, 4, 8), draw(6, 2, 8), draw(6, 2, 8)
    ends_q, ends_k, used = (torch.tensor(x).int() for x in ([0, 12, 16], [0, 4, 6], [2, 3]))
    out, lse = compat.flash_attn_varlen_func(
        q, k, v, ends_q, ends_k, 3, 4, seqused_q=used, return_attn_probs=True
    )
    expected = torch.zeros_like(out)
    expected[:2] = naive(q[:2], k[:4], v[:4])[0]
    expected[12:15] = naive(q[12:15], k[4:], v[4:])[0]
    assert_same(out, expected, (q, k, v))
    assert (lse[:, 2:12] == -torch.inf).all() and lse[:, :2].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_values_with_more_features_than_a_kernel_takes(packed, monkeypatch):
    monkeypatch.setattr(attention, "is_limited", lambda device: True)
    q, k, v = draw(2, 9, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 600)
    if packed:
        ends = torch.tensor([0, 9, 18], dtype=torch.int32)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = compat.flash_attn_varlen_func(
            *flat, ends, ends, 9, 9, causal=True, return_attn_probs=True
        )
        out, lse = out.view(2, 9, 4, 600), lse.view(4, 2, 9).transpose(0, 1)
    else:
        out, lse = compat.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        assert torch.equal(compat.flash_attn_func(q, k, v, causal=True), out)
    rows = [naive(*row, causal=True) for row in zip(q, k, v)]
    torch.testing.assert_close(lse, torch.stack([row[1] for row in rows]), check_dtype=False)
    assert_same(out, torch.stack([row[0] for row in rows]), (q, k, v))


def test_query_key_and_value_in_one_tensor():
    q, k, v = draw(2, 9, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8)
    out = compat.flash_attn_func(q, k, v, causal=True)
    found = compat.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=4)
    assert torch.equal(found, out)
    found = compat.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2))
    assert torch.equal(found, compat.flash_attn_func(q, q, q))


@EACH_MASK
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("rotated", [False, True])
@torch.no_grad()
def test_caches(name, packed, page_size, rotated):
    """Rows and packed queries, new keys, left padding and positions of their own."""
    k_cache, v_cache, table = caches(page_size)
    held = [rows_of(cache, table).clone() for cache in (k_cache, v_cache)]
    before = [cache.clone() for cache in (k_cache, v_cache)]
    lens, pad = torch.tensor([5, 17], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    (Sq, Sn), mask = (([2, 3], [1, 3]) if packed else ([3, 3], [2, 2])), MASKS[name]
    q, k, v = draw(sum(Sq), 4, 8), draw(sum(Sn), 2, 8), draw(sum(Sn), 2, 8)
    ends_q, ends_n = (torch.tensor([0, n[0], sum(n)], dtype=torch.int32) for n in (Sq, Sn))
    angle, first = torch.rand(24, 4) * 6, torch.tensor([1, 12], dtype=torch.int32)
    options = {"cu_seqlens_q": ends_q, "cu_seqlens_k_new": ends_n, "max_seqlen_q": 3}
    inputs = (q, k, v) if packed else (q.view(2, 3, 4, 8), k.view(2, 2, 2, 8), v.view(2, 2, 2, 8))
    if rotated:
        tables = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_seqlens": first}
    out, lse, *_ = compat.flash_attn_with_kvcache(
        inputs[0], k_cache, v_cache, *inputs[1:], cache_seqlens=lens, cache_leftpad=pad,
        page_table=table, rotary_interleaved=False, return_softmax_lse=True, **mask,
        **(options if packed else {}), **(tables if rotated else {}),
    )  # fmt: skip
    out = out if packed else out.flatten(0, 1)
    lse = lse if packed else lse.transpose(0, 1).flatten(1)
    differ = name not in ("plain", "wide window")
    for b in range(2):
        rows, new = (slice(int(e[b]), int(e[b + 1])) for e in (ends_q, ends_n))
        queries, keys, total = q[rows], k[new], int(lens[b]) + Sn[b]
        if rotated:
            steps = torch.arange(Sq[b]) if differ else torch.zeros(Sq[b]).long()
            queries = rotated_halves(queries, angle, first[b] + steps)
            keys = rotated_halves(keys, angle, first[b] + torch.arange(Sn[b]))
        held[0][b, lens[b] : total], held[1][b, lens[b] : total] = keys, v[new]
        expected = naive(queries, *(x[b, pad[b] : total] for x in held), **mask)
        torch.testing.assert_close(out[rows], expected[0])
        torch.testing.assert_close(lse[:, rows], expected[1], check_dtype=False)
    for cache, wanted, old in zip((k_cache, v_cache), held, before):
        torch.testing.assert_close(rows_of(cache, table), wanted)
        assert not torch.equal(cache, old)


def rotated_halves(x, angle, positions):
    """x (S, H, 8), its halves rotated."""
    a, b = x.chunk(2, -1)
    cos, sin = (t[positions, None].double() for t in (angle.cos(), angle.sin()))
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@torch.no_grad()
def test_rows_of_a_page_table_by_index():
    k_cache, v_cache, table = caches(4)
    q, rows = draw(1, 1, 4, 8), torch.tensor([1], dtype=torch.int32)
    out = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=9, page_table=table, cache_batch_idx=rows
    )
    held = (rows_of(cache, table)[1, :9] for cache in (k_cache, v_cache))
    torch.testing.assert_close(out[0], naive(q[0], *held)[0])


@torch.no_grad()
def test_rows_that_a_page_table_lacks_hold_no_pages_on_a_gpu(monkeypatch):
    monkeypatch.setattr(tracing, "can_read", lambda *_: False)
    k_cache, v_cache, table = caches(4)
    rows = torch.tensor([1, -1, 7], dtype=torch.int32)
    found = caches_of(3, k_cache, v_cache, "page_table", table, rows).table
    assert torch.equal(found[0], table[1]) and (found[1:] == -1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_of_any_size(packed):
    tensors = draw(1, 5, 4, 8), draw(1, 9, 2, 8), draw(1, 9, 2, 8)
    call = compat.flash_attn_func
    if packed:
        tensors = tuple(x[0] for x in tensors)
        ends = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 9))
        call = functools.partial(compat.flash_attn_varlen_func, *tensors, *ends, 5, 9)
        tensors = ()
    for size in (2**31, 2**40, 2**62):
        torch.testing.assert_close(call(*tensors, attention_chunk=size), call(*tensors))


@pytest.mark.parametrize("D", [64, 512])
def test_combine(D):
    q, k, v = draw(2, 5, 4, 8), draw(2, 12, 4, 8), draw(2, 12, 4, D)
    parts = [
        compat.flash_attn_func(q, k[:, i : i + 4], v[:, i : i + 4], return_attn_probs=True)
        for i in range(0, 12, 4)
    ]
    outs = torch.stack([part[0] for part in parts]).float()
    lses = torch.stack([part[1] for part in parts]).float().transpose(2, 3)
    whole, lse = compat.flash_attn_func(q, k, v, return_attn_probs=True)
    out, found_lse = compat.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), whole.float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found_lse.transpose(1, 2), lse.float())
    buffer = torch.empty_like(whole, dtype=torch.float32)
    assert compat.flash_attn_combine(outs, lses, buffer)[0] is buffer
    torch.testing.assert_close(buffer, whole.float())


@pytest.mark.parametrize("packed", [False, True])
def test_private_functions(packed):
    q, k, v = draw(2, 9, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8)
    mask = {"window_size": (4, 1)}
    keywords = {"softmax_scale": 8**-0.5, "window_size_left": 4, "window_size_right": 1}
    ends = {}
    if packed:
        q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
        border = torch.tensor([0, 11, 18], dtype=torch.int32)
        ends = {"cu_seqlens_q": border, "cu_seqlens_k": border, "max_seqlen_q": 11,
                "max_seqlen_k": 11}  # fmt: skip
        out = compat.flash_attn_varlen_func(q, k, v, **ends, **mask)
    else:
        out = compat.flash_attn_func(q, k, v, **mask)
    found, lse, *_ = compat._flash_attn_forward(q, k, v, **ends, **keywords)
    assert torch.equal(found, out) and not found.requires_grad
    grad, buffers = torch.randn_like(out), [torch.empty_like(x) for x in (q, k, v)]
    dq, dk, dv = buffers
    sums = compat._flash_attn_backward(
        grad, q, k, v, found, lse, **ends, dq=dq, dk=dk, dv=dv, **keywords
    )
    for one, two in zip(buffers, torch.autograd.grad(out, (q, k, v), grad), strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(sums.transpose(-1, -2), (grad * out).sum(-1).float())


def test_the_private_function_reads_caches():
    k_cache, v_cache, table = caches(4)
    q, lens = draw(2, 1, 4, 8, grad=False), torch.tensor([3, 9], dtype=torch.int32)
    out, *_ = compat._flash_attn_forward(q, k_cache, v_cache, seqused_k=lens, page_table=table)
    expected = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lens, page_table=table
    )
    assert torch.equal(out, expected)


def test_the_private_function_copies_keys_that_are_only_read():
    q, k, v = (draw(2, 8, n, 5, grad=False).transpose(1, 3) for n in (4, 2, 2))
    lens = torch.tensor([2, 5], dtype=torch.int32)
    out, *_ = compat._flash_attn_forward(q, k, v, seqused_k=lens)
    for b, n in enumerate(lens.tolist()):
        expected = compat.flash_attn_func(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        torch.testing.assert_close(out[b], expected[0])


q, k_cache = torch.randn(1, 2, 2, 8), torch.randn(1, 4, 2, 8)
v_cache = torch.randn(1, 4, 2, 8)
new, ends = torch.randn(2, 2, 8), torch.tensor([0, 2], dtype=torch.int32)


def test_pages_of_keys_and_values_may_lie_in_one_pool():
    pool, apart = torch.zeros(5, 1, 2, 8), torch.zeros(2, 4, 1, 2, 8)
    x = torch.randn(2, 2, 8)
    table = torch.tensor([[0, 2]], dtype=torch.int32)  # keys in pages 0 and 2, values in 1 and 3
    ends = torch.tensor([0, 2], dtype=torch.int32)
    found, wanted = (
        compat.flash_attn_with_kvcache(
            x, k, v, x, x + 1, cache_seqlens=0, page_table=table, cu_seqlens_q=ends,
            cu_seqlens_k_new=ends, max_seqlen_q=2,
        )
        for k, v in ((pool[:-1], pool[1:]), apart)
    )  # fmt: skip
    assert torch.equal(found, wanted) and wanted.any()
    with pytest.raises(ValueError, match="v_cache shares memory with k_cache"):
        compat.flash_attn_with_kvcache(
            x, pool, pool, x, x, cache_seqlens=0, page_table=table, cu_seqlens_q=ends,
            cu_seqlens_k_new=ends, max_seqlen_q=2,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"cache_leftpad must have shape \(1,\), got \(2,\): pass a number for each",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_leftpad=ends)),
        (ValueError, r"cache_leftpad must have shape \(1,\), got \(2,\): pass a number for each",
         lambda: compat.flash_attn_with_kvcache(new, k_cache, v_cache, new, new, cache_seqlens=1,
                                                cache_leftpad=ends, cu_seqlens_q=ends,
                                                cu_seqlens_k_new=ends)),
        (ValueError, r"rotary_seqlens must have shape \(1,\), got \(2,\): pass the position of",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, new[None], new[None],
                                                rotary_cos=torch.ones(4, 4),
                                                rotary_sin=torch.ones(4, 4), cache_seqlens=1,
                                                rotary_seqlens=ends)),
        (ValueError, r"seqused_q must .* \(1,\), got \(2,\): pass a number for each of the 1",
         lambda: compat.flash_attn_varlen_func(new, new, new, ends, ends, 2, 2, seqused_q=ends)),
        (TypeError, "seqused_k must be int32, got int64",
         lambda: compat.flash_attn_varlen_func(new, new, new, ends, ends, 2, 2,
                                               seqused_k=ends[1:].long())),
        (ValueError, r"dk must have .* got \(2,\): pass dk.new_empty\(1, 2, 2, 8\)",
         lambda: compat._flash_attn_backward(q, q, q, q, q, q[..., 0], dk=ends)),
        (ValueError, r"out_ must have shape \(1, 2, 2, 8\), got \(2,\)",
         lambda: compat._flash_attn_forward(q, q, q, out_=ends)),
        (TypeError, "return_softmax_lse must be a bool, got 'yes'",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, new[None], new[None],
                                                cache_seqlens=1, return_softmax_lse="yes")),
        (TypeError, "q_descale is for inputs in float8_e4m3fn, but q is float32",
         lambda: compat.flash_attn_func(q, q, q, q_descale=q)),
        (ValueError, r"qv must have shape .* got \(1, 2, 2, 7\): pass a vector of v's features",
         lambda: compat.flash_attn_func(q, q, q, qv=q[..., 1:])),
        (ValueError, "qv must have q's dtype float32, got float64",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, new[None], new[None],
                                                qv=q.double(), cache_seqlens=1)),
        (ValueError, "qv must have q's dtype float8_e4m3fn, got float32",
         lambda: compat.flash_attn_func(*[q.to(torch.float8_e4m3fn)] * 3, qv=q)),
        (ValueError, "attention_chunk must not be negative, got -3",
         lambda: compat.flash_attn_func(q, q, q, attention_chunk=-3)),
        (ValueError, r"q must have shape \(T, H, D\), got \(1, 2, 2, 8\): pass q.flatten\(0, -3\)",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, cu_seqlens_q=ends)),
        (ValueError, r"cache_seqlens\[0\] is 3, .* cache's 4: pass a longer cache",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=3,
                                                cu_seqlens_k_new=ends)),
        (ValueError, r"page_table\[0\] has pages \[1\], but there are 1: the first one is 0",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=1,
                                                cu_seqlens_k_new=ends,
                                                page_table=ends[None, 1:] - 1)),
        (ValueError, "max_seqlen_q is 1, but a sequence has 2",
         lambda: compat.flash_attn_varlen_func(new, new, new, ends, ends, 1, 2, attention_chunk=1)),
        (ValueError, "max_seqlen_k is 1, but a sequence has 2",
         lambda: compat.flash_attn_varlen_func(new, new, new, ends, ends, 2, 1, qv=new)),
        (ValueError, "max_seqlen_q must not be negative, got -4: pass the longest length",
         lambda: compat.flash_attn_varlen_func(new, new, new, ends, ends, -4, 2,
                                               attention_chunk=1)),
        (ValueError, r"cu_seqlens_k\[1\] is 0, but must not be less than 2",
         lambda: compat.flash_attn_varlen_func(new, new, new, ends, ends.flip(0), 2, 2, qv=new)),
        (ValueError, r"cu_seqlens_k must have shape \(2,\), got \(1,\): both are of the same",
         lambda: compat.flash_attn_varlen_func(new, new, new, ends, ends[:1], 2, 2,
                                               attention_chunk=1)),
        (ValueError, "k has batch size 1, but q's is 2",
         lambda: compat.flash_attn_func(q.expand(2, -1, -1, -1), q, q, qv=q.expand(2, -1, -1, -1))),
        (ValueError, "cache_batch_idx has -1, but page_table has 1 rows: the first one is 0",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, page_table=ends[None, :1],
                                                cache_batch_idx=ends[1:] - 3)),
        (TypeError, "k is float64, but q is float32: pass k.to",
         lambda: compat.flash_attn_with_kvcache(new, k_cache, v_cache, new.double(), new.double(),
                                                cache_seqlens=1, cu_seqlens_q=ends,
                                                cu_seqlens_k_new=ends)),
        (ValueError, "rotary_cos has 2 positions, but 3 are needed",
         lambda: compat.flash_attn_with_kvcache(new, k_cache, v_cache, new, new, cache_seqlens=1,
                                                cu_seqlens_q=ends, cu_seqlens_k_new=ends,
                                                rotary_cos=torch.ones(2, 4),
                                                rotary_sin=torch.ones(2, 4))),
        (TypeError, "rotary_seqlens must be int32, got float32: pass rotary_seqlens.int",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, new[None], new[None],
                                                rotary_cos=torch.ones(4, 4), cache_seqlens=1,
                                                rotary_sin=torch.ones(4, 4),
                                                rotary_seqlens=torch.ones(1))),
        (ValueError, "cache_leftpad is on meta, but q is on cpu",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, attention_chunk=2,
                                                cache_leftpad=ends[:1].to("meta"))),
        (ValueError, r"cu_seqlens_q must have shape \(B \+ 1,\), got \(0,\): pass the first token",
         lambda: compat.flash_attn_with_kvcache(new, k_cache, v_cache, cu_seqlens_q=ends[:0])),
        (TypeError, "lse_partial must be float32, got float64",
         lambda: compat.flash_attn_combine(new, new[..., 0].double())),
        (ValueError, r"lse_partial must have shape \(2, 2\), got \(2,\)",
         lambda: compat.flash_attn_combine(new, new[:, 0, 0])),
        (ValueError, "k is on meta, but v is on cpu",
         lambda: compat.flash_attn_func(q, q.to("meta"), q, qv=q)),
        (ValueError, r"out_partial must have shape \(N, ..., Dv\), got \(\)",
         lambda: compat.flash_attn_combine(new.sum(), new.sum())),
        (ValueError, r"cu_seqlens_k_new must .* \(2,\), got \(1,\): pass the first token of each",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=1,
                                                cu_seqlens_k_new=ends[:1])),
        (ValueError, "v_cache shares memory with k_cache, and both are written to",
         lambda: compat.flash_attn_with_kvcache(new, k_cache, k_cache, new, new, cache_seqlens=1,
                                                cu_seqlens_q=ends, cu_seqlens_k_new=ends)),
        (ValueError, "value_cache is the first 8 features of key_cache, which is written to",
         lambda: compat.flash_attn_with_kvcache(q, k_cache, k_cache, new[None], new[None].clone(),
                                                cache_seqlens=1)),
    ],
)  # fmt: skip
def test_errors(error, message, call):
    kept = k_cache.clone()
    with pytest.raises(error, match=message):
        call()
    assert torch.equal(k_cache, kept)


@pytest.mark.parametrize(
    "wrong",
    [
        {"softcap": -1.0}, {"num_splits": "two"}, {"softmax_scale": float("nan")},
        {"max_seqlen_q": -1}, {"page_table": torch.zeros(1, 1, dtype=torch.int64)},
        {"cu_seqlens_q": ends[:1]}, {"cu_seqlens_q": 2 * ends}, {"q": new[:, :, 1:]},
        {"q": new.double()}, {"qv": new[..., 1:]},
    ],
    ids="".join,
)  # fmt: skip
def test_nothing_is_written_before_an_error(wrong):
    pages = torch.randn(1, 4, 2, 8)
    kept, zero = pages.clone(), torch.zeros(1, 1, dtype=torch.int32)
    arguments = {
        "q": new, "k": new, "v": new, "cache_seqlens": 1, "cu_seqlens_q": ends,
        "cu_seqlens_k_new": ends, "page_table": zero, "max_seqlen_q": 2,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)):
        compat.flash_attn_with_kvcache(k_cache=pages, v_cache=2 * pages, **arguments | wrong)
    assert torch.equal(pages, kept)
    compat.flash_attn_with_kvcache(k_cache=pages, v_cache=2 * pages, **arguments)
    assert not torch.equal(pages, kept)


def test_tokens_that_have_no_place_are_not_written():
    """On a GPU nothing is read by the host; a token beyond the cache must not overwrite others."""
    from fa_ops.compat import flash as append

    pages, table = torch.zeros(2, 4, 1, 2), torch.tensor([[1], [7]], dtype=torch.int32)
    caches = append.Caches(pages, pages.clone(), table, 4)
    tokens = torch.arange(1.0, 7).view(6, 1, 1).expand(6, 1, 2).contiguous()
    ends, lens = torch.tensor([1, 4, 5], dtype=torch.int32), torch.tensor([2, 0]).int()
    append.append(caches, tokens, -tokens, ends, lens)
    for cache, sign in ((caches.k, 1), (caches.v, -1)):
        assert cache[..., 0].flatten().tolist() == [0, 0, 0, 0, 0, 0, 2 * sign, 3 * sign]
    append.append(caches, tokens[:1], tokens[:1], ends.clamp(max=1), lens)
    assert caches.k.sum() == 10


def test_packed_new_keys_can_be_fake():
    """Sizes are computed where lengths cannot be read."""
    with FakeTensorMode() as mode:
        tokens, cache = mode.from_tensor(new), mode.from_tensor(k_cache)
        borders, tables = mode.from_tensor(ends), mode.from_tensor(torch.ones(8, 4))
        out = compat.flash_attn_with_kvcache(
            tokens, cache, cache, tokens, tokens, cache_seqlens=borders[:1], cu_seqlens_q=borders,
            cu_seqlens_k_new=borders, cache_leftpad=borders[:1], rotary_cos=tables,
            rotary_sin=tables,
        )  # fmt: skip
        assert out.shape == new.shape
