"""The functions of flash_attn: its published signatures, and the results that it documents."""

import inspect

import numpy as np
import pytest
import torch

from fa_ops.compat import flash_attn as compat

# of flash-attn 2.8
SIGNATURES = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) "
    "softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False block_table=None",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None "
    "softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 rotary_interleaved=True "
    "alibi_slopes=None num_splits=0 return_softmax_lse=False",
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.4},
    "window": {"window_size": (3, 2)},
    "window of one side": {"window_size": (4, -1), "causal": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "ALiBi": {"alibi_slopes": True, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    empty = inspect.Parameter.empty
    found = [p.name + ("" if p.default is empty else f"={p.default}") for p in parameters]
    assert " ".join(found) == SIGNATURES[name]


def naive(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    """The out and lse of one sequence (S, H, D), computed with a matrix of scores."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    Sq, Sk = q.shape[1], k.shape[1]
    s = q @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)  # from the query's position
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * distance.abs()
    left, right = (side if side >= 0 else 10**6 for side in window_size)
    right = min(right, 0) if causal else right
    s = s.masked_fill((distance < -left) | (distance > right), float("-inf"))
    lse = s.logsumexp(-1)
    return ((s - lse[..., None]).exp().nan_to_num() @ v).transpose(0, 1), lse


@pytest.fixture(autouse=True)
def seeded():
    """lse is float32, so that one draw in thousands would miss a tolerance of float64."""
    torch.manual_seed(0)


def draw(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def options_of(name, heads):
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.1, 0.6, heads)
    return options


def assert_same(found, expected, inputs):
    """Check results and gradients."""
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    grads = (torch.autograd.grad(x, inputs, grad) for x in (found, expected))
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("Sk", [9, 13])
def test_dense_results_and_gradients(name, Sk):
    q, k, v = draw(2, 9, 4, 8), draw(2, Sk, 2, 8), draw(2, Sk, 2, 8)
    options = options_of(name, 4)
    out, lse, weights = compat.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    rows = [naive(*row, **options) for row in zip(q, k, v)]
    assert weights.shape == (0,) and out.is_contiguous()
    torch.testing.assert_close(lse, torch.stack([row[1] for row in rows]), check_dtype=False)
    assert_same(out, torch.stack([row[0] for row in rows]), (q, k, v))
    assert torch.equal(compat.flash_attn_func(q, k, v, **options), out)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_results_and_gradients(name):
    ends_q, ends_k = [0, 4, 4, 11], [0, 6, 8, 17]
    q, k, v = draw(11, 4, 8), draw(17, 2, 8), draw(17, 2, 8)
    options = options_of(name, 4)
    ends = (torch.tensor(e, dtype=torch.int32) for e in (ends_q, ends_k))
    out, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, *ends, 7, 9, **options, return_attn_probs=True
    )
    spans = zip(ends_q, ends_q[1:], ends_k, ends_k[1:])
    rows = [naive(q[a:b], k[c:d], v[c:d], **options) for a, b, c, d in spans]
    torch.testing.assert_close(lse, torch.cat([row[1] for row in rows], -1), check_dtype=False)
    assert_same(out, torch.cat([row[0] for row in rows]), (q, k, v))


def test_joint_tensors_give_the_same_results():
    qkv = draw(2, 9, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    out = compat.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(compat.flash_attn_qkvpacked_func(qkv, causal=True), out)
    assert torch.equal(compat.flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.0, None, True), out)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    flat = [t[0] for t in (q, k, v)]
    out = compat.flash_attn_varlen_func(*flat, ends, ends, 5, 5, causal=True)
    found = compat.flash_attn_varlen_qkvpacked_func(qkv[0], ends, 5, 0.0, None, True)
    assert torch.equal(found, out)
    packing = ends, ends, 5, 5
    found = compat.flash_attn_varlen_kvpacked_func(flat[0], qkv[0, :, 1:], *packing, causal=True)
    assert torch.equal(found, out)


def caches(page_size=0):
    """Caches of two rows with a capacity of 24 keys, and a table if they are paged."""
    if not page_size:
        return draw(2, 24, 2, 8, grad=False), draw(2, 24, 2, 8, grad=False), None
    table = torch.randperm(2 * 24 // page_size).view(2, -1).int()
    shape = (table.numel(), page_size, 2, 8)
    return draw(*shape, grad=False), draw(*shape, grad=False), table


def rows_of(cache, table):
    return cache if table is None else cache[table.long()].flatten(1, 2)


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_a_cache_is_appended_to_and_attended(name, page_size):
    k_cache, v_cache, table = caches(page_size)
    held = [rows_of(cache, table).clone() for cache in (k_cache, v_cache)]
    q, k, v = draw(2, 3, 4, 8), draw(2, 3, 2, 8), draw(2, 3, 2, 8)
    lens, options = torch.tensor([5, 17], dtype=torch.int32), options_of(name, 4)
    out, lse = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, return_softmax_lse=True,
        **options,
    )  # fmt: skip
    for b, n in enumerate(lens.tolist()):
        for cache, new in zip(held, (k, v)):
            cache[b, n : n + 3] = new[b]
        expected = naive(q[b], held[0][b, : n + 3], held[1][b, : n + 3], **options)
        torch.testing.assert_close(out[b], expected[0])
        torch.testing.assert_close(lse[b], expected[1], check_dtype=False)
    for cache, wanted in zip((k_cache, v_cache), held):
        assert torch.equal(rows_of(cache, table), wanted)


@torch.no_grad()
def test_lengths_and_left_padding_of_a_cache_limit_its_keys():
    k_cache, v_cache, _ = caches()
    q = draw(2, 1, 4, 8)
    attend = compat.flash_attn_with_kvcache
    whole = torch.stack([naive(*row)[0] for row in zip(q, k_cache, v_cache)])
    torch.testing.assert_close(attend(q, k_cache, v_cache), whole)
    some = torch.stack([naive(q[b], k_cache[b, :7], v_cache[b, :7])[0] for b in range(2)])
    torch.testing.assert_close(attend(q, k_cache, v_cache, cache_seqlens=7), some)
    pad = torch.tensor([2, 5], dtype=torch.int32)
    rows = [naive(q[b], k_cache[b, n:9], v_cache[b, n:9])[0] for b, n in enumerate([2, 5])]
    found = attend(q, k_cache, v_cache, cache_seqlens=9, cache_leftpad=pad)
    torch.testing.assert_close(found, torch.stack(rows))


@pytest.mark.parametrize("interleaved", [False, True])
@torch.no_grad()
def test_rotary_embedding_rotates_queries_and_new_keys(interleaved):
    k_cache, v_cache, _ = caches()
    q, k, v = draw(2, 3, 4, 8), draw(2, 3, 2, 8), draw(2, 3, 2, 8)
    angle = torch.rand(30, 2, dtype=torch.float64) * 6
    cos, sin = angle.cos(), angle.sin()

    def rotated(x, first):
        pairs = (slice(0, 4, 2), slice(1, 4, 2)) if interleaved else (slice(0, 2), slice(2, 4))
        a, b = (x[..., features] for features in pairs)
        c, s = (t[first : first + x.shape[0], None] for t in (cos, sin))
        x = x.clone()
        x[..., pairs[0]], x[..., pairs[1]] = a * c - b * s, a * s + b * c
        return x

    out = compat.flash_attn_with_kvcache(
        q, k_cache.clone(), v_cache.clone(), k, v, cos.float(), sin.float(), 6, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for b in range(2):
        keys = torch.cat([k_cache[b, :6], rotated(k[b], 6)])
        expected, _ = naive(rotated(q[b], 6), keys, torch.cat([v_cache[b, :6], v[b]]), causal=True)
        torch.testing.assert_close(out[b], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (-1, 0)},
     {"window_size": (24, 99)}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("Sq, Sn", [(1, 1), (1, 4), (4, 1), (3, 3), (2, 4), (4, 2)])
@torch.no_grad()
def test_rotary_positions_are_those_of_flash_attn(Sq, Sn, options, page_size, interleaved):
    """They follow the keys in the cache, padding included; without causality there is only one."""
    k_cache, v_cache, table = caches(page_size)
    held = [rows_of(cache, table).clone() for cache in (k_cache, v_cache)]
    q, k, v = draw(2, Sq, 4, 8), draw(2, Sn, 2, 8), draw(2, Sn, 2, 8)
    angle = torch.rand(24, 3) * 6
    lens, pad = torch.tensor([5, 17], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    pairs = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))

    def rotated(x, positions):
        a, b = (x[..., features] for features in pairs)
        c, s = (t[positions, None].double() for t in (angle.cos(), angle.sin()))
        x = x.clone()
        x[..., pairs[0]], x[..., pairs[1]] = a * c - b * s, a * s + b * c
        return x

    positions_differ = options.get("causal") or options.get("window_size", (-1, -1)) in (
        (3, 2),
        (-1, 0),
    )
    for leftpad in (None, pad):
        out = compat.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, angle.cos(), angle.sin(), lens, block_table=table,
            cache_leftpad=leftpad, rotary_interleaved=interleaved, **options,
        )  # fmt: skip
        for b, n in enumerate(lens.tolist()):
            steps = torch.arange(Sq) if positions_differ else torch.zeros(Sq).long()
            rows = rotated(q[b], n + steps)
            held[0][b, n : n + Sn] = rotated(k[b], n + torch.arange(Sn))
            held[1][b, n : n + Sn] = v[b]
            first = 0 if leftpad is None else int(leftpad[b])
            keys, values = (x[b, first : n + Sn] for x in held)
            torch.testing.assert_close(out[b], naive(rows, keys, values, **options)[0])
            for cache, wanted in zip((k_cache, v_cache), held):
                stored = rows_of(cache, table)[b, : n + Sn]
                torch.testing.assert_close(stored, wanted[b, : n + Sn])


def calls_with(number):
    """Calls with every number and bool converted by a function."""
    g = torch.Generator().manual_seed(0)
    q, packed = (torch.randn(shape, generator=g) for shape in ((2, 9, 2, 8), (9, 2, 8)))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    options = {"softmax_scale": number(0.5), "causal": number(True), "softcap": number(2.0),
               "window_size": (number(3), number(-1))}  # fmt: skip
    lse = {"dropout_p": number(0.0), "return_attn_probs": number(True)}
    yield compat.flash_attn_func(q, q, q, deterministic=number(False), **options, **lse)[:2]
    ends = ends, ends, number(5), number(5)
    yield compat.flash_attn_varlen_func(packed, packed, packed, *ends, **options, **lse)[:2]
    yield compat.flash_attn_with_kvcache(
        q[:, :1], q, q, cache_seqlens=number(7), num_splits=number(1),
        return_softmax_lse=number(True), **options,
    )  # fmt: skip


@pytest.mark.parametrize("number", [torch.tensor, lambda x: np.array(x)[()]], ids=["0-d", "NumPy"])
def test_numbers_may_be_0d_tensors_or_numpy_numbers(number):
    for found, expected in zip(calls_with(number), calls_with(lambda x: x), strict=True):
        assert all(map(torch.equal, found, expected))


def test_bools_may_be_0_or_1():
    q = draw(1, 5, 2, 8)
    out, *_ = compat.flash_attn_func(q, q, q, causal=1, deterministic=0, return_attn_probs=1)
    assert torch.equal(out, compat.flash_attn_func(q, q, q, causal=True))


@pytest.mark.parametrize("window", [(-7, 2), torch.tensor([-1, 2]), [None, torch.tensor(2)]])
def test_negative_sides_of_a_window_are_unbounded(window):
    q = draw(1, 9, 2, 8)
    expected = compat.flash_attn_func(q, q, q, window_size=(-1, 2))
    assert torch.equal(compat.flash_attn_func(q, q, q, window_size=window), expected)


def test_tensors_whose_last_dimension_is_not_contiguous_are_copied():
    tensors = draw(2, 9, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8)
    strided = [t.mT.contiguous().mT for t in tensors]
    assert_same(compat.flash_attn_func(*strided), compat.flash_attn_func(*tensors), tensors)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    found, expected = (
        compat.flash_attn_varlen_func(*(t[0] for t in each), ends, ends, 5, 5)
        for each in (strided, tensors)
    )
    assert_same(found, expected, tensors)
    with torch.no_grad():
        found, expected = (
            compat.flash_attn_with_kvcache(each[0], *caches, *each[1:], cache_seqlens=2)
            for each, caches in (
                (x, torch.zeros(2, 2, 24, 2, 8).double()) for x in (strided, tensors)
            )
        )
    assert torch.equal(found, expected)


@torch.no_grad()
def test_one_length_is_broadcast():
    k_cache, v_cache, _ = caches()
    q = draw(2, 1, 4, 8)
    expected = compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)
    one = torch.tensor([7], dtype=torch.int32)
    for lens in (one, one.expand(2), torch.tensor(7)):
        found = compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens)
        assert torch.equal(found, expected)


def test_values_of_another_width_and_a_side_that_is_none():
    q, k, v = draw(1, 5, 2, 8), draw(1, 5, 2, 8), draw(1, 5, 2, 4)
    out = compat.flash_attn_func(q, k, v, window_size=(None, 0))
    torch.testing.assert_close(out[0], naive(q[0], k[0], v[0], causal=True)[0])


def test_compiled_calls_give_the_same_result():
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    compiled = torch.compile(compat.flash_attn_func, backend="eager", fullgraph=True)
    expected = compat.flash_attn_func(q, k, v, causal=True, window_size=(3, -1))
    assert torch.equal(compiled(q, k, v, causal=True, window_size=(3, -1)), expected)


q, packed, cache = torch.randn(1, 2, 2, 8), torch.randn(4, 2, 8), torch.randn(1, 8, 2, 8)
ends = torch.tensor([0, 4], dtype=torch.int32)
angles, wide = torch.ones(8, 2), torch.ones(8, 8)
long = torch.randn(1, 12, 2, 8)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"q must .*\(4, 2, 8\): pass q\[None\], or packed tokens to a varlen function",
         lambda: compat.flash_attn_func(packed, q, q)),
        (TypeError, "k must be a Tensor, got int", lambda: compat.flash_attn_func(q, 3, q)),
        (ValueError, r"v must have shape \(T, H, D\), got \(1, 2, 2, 8\): pass v.flatten\(0, -3\)",
         lambda: compat.flash_attn_varlen_func(packed, packed, q, ends, ends, 4, 4)),
        (ValueError, r"qkv must .* got \(1, 2, 2, 2, 8\): pass torch.stack\(\[q, k, v\], -3\)",
         lambda: compat.flash_attn_qkvpacked_func(torch.stack([q, q], 2))),
        (ValueError, r"kv must .*D\), got \(4, 2, 8\): pass torch.stack\(\[k, v\], -3\)",
         lambda: compat.flash_attn_varlen_kvpacked_func(packed, packed, ends, ends, 4, 4)),
        (TypeError, r"window_size must be a pair \(left, right\), got 3",
         lambda: compat.flash_attn_func(q, q, q, window_size=3)),
        (TypeError, "causal must be a bool, got 2",
         lambda: compat.flash_attn_func(q, q, q, causal=2)),
        (TypeError, "a side of window_size must be an int, got 2.5",
         lambda: compat.flash_attn_func(q, q, q, window_size=(2.5, 0))),
        (ValueError, r"k must .* \(pages, page_size, H, D\), got \(4, 2, 8\): pass k\[None\]",
         lambda: compat.flash_attn_varlen_func(packed, packed, packed, ends, ends, 4, 4,
                                               block_table=ends[None])),
        (ValueError, r"cu_seqlens_q must have shape \(3,\), got \(2,\)",
         lambda: compat.flash_attn_varlen_func(packed, long, long, ends, ends, 4, 4,
                                               block_table=torch.zeros(2, 1).int())),
        (ValueError, r"cu_seqlens_q\[1\] is 4, but there are 3 tokens",
         lambda: compat.flash_attn_varlen_func(packed[:3], long, long, ends, ends, 4, 4,
                                               block_table=ends[None])),
        (NotImplementedError, "dropout_p must be 0 with block_table, got 0.5",
         lambda: compat.flash_attn_varlen_func(packed, long, long, ends, ends, 4, 4, 0.5,
                                               block_table=ends[None])),
        (ValueError, r"cache_batch_idx must .* \(1,\), got \(2,\): pass a row of the cache",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=ends)),
        (ValueError, "cache_batch_idx has 4, but k_cache has 1 rows: the first one is 0",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=ends[1:])),
        (ValueError, "cache_batch_idx must be None with block_table",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=ends[:1],
                                                block_table=ends[None])),
        (ValueError, "rotary_cos and rotary_sin must be given together",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, rotary_cos=angles)),
        (ValueError, "k must be given with rotary_cos, .* got None: pass k and v",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, rotary_cos=angles,
                                                rotary_sin=angles)),
        (ValueError, "rotary_cos has 8 positions, but 9 are needed: pass a row for each",
         lambda: compat.flash_attn_with_kvcache(q, long, long, q, q, angles, angles, 7)),
        (ValueError, "rotary_cos is for 16 features, but query has 8",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, q, q, wide, wide, 3)),
        (ValueError, "key must have shape",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, q[..., :4], q, angles, angles, 3)),
        (ValueError, "cache_seqlens must be given with k, .* got None: pass the number",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, q, q)),
        (TypeError, "cache_seqlens must be a Tensor or an int, got 2.5",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=2.5)),
        (ValueError, "cache_seqlens must lie within the cache's 8 keys, got 9: pass a longer",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9)),
        (TypeError, "cache_leftpad must be a Tensor, got int",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, cache_leftpad=3)),
        (TypeError, "cache_leftpad must be int32, got float32",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, cache_leftpad=angles[0])),
        (ValueError, r"block_table must .* \(B, max_pages\), got \(2,\): pass block_table\[None\]",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, block_table=ends)),
        (TypeError, "block_table must be int32, got int64",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, block_table=ends[None].long())),
        (TypeError, "block_table must be int32, got bool",
         lambda: compat.flash_attn_varlen_func(packed, long, long, ends, ends, 4, 4,
                                               block_table=ends[None].bool())),
        (ValueError, r"cu_seqlens_k must .* \(B \+ 1,\), got \(\): pass the first token of each",
         lambda: compat.flash_attn_varlen_func(packed, long, long, ends, ends[0], 4, 4,
                                               block_table=ends[None])),
        (ValueError, r"softmax_scale must be finite, got inf: None is 1 / sqrt\(D\)",
         lambda: compat.flash_attn_func(q, q, q, softmax_scale=float("inf"))),
        (TypeError, "window_size must be a strided Tensor, got one of torch.sparse_coo",
         lambda: compat.flash_attn_func(q, q, q, window_size=ends.to_sparse())),
        (ValueError, "window_size must hold numbers, got a Tensor on meta",
         lambda: compat.flash_attn_func(q, q, q, window_size=ends.to("meta"))),
        (TypeError, "rotary_sin must be a Tensor, got float",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, q, q, angles, 1.0, 3)),
        (TypeError, "block_table must be a Tensor, got list",
         lambda: compat.flash_attn_with_kvcache(q, cache, cache, block_table=[0])),
        (ValueError, r"k_cache must have shape \(pages, page_size, H, D\)",
         lambda: compat.flash_attn_with_kvcache(q, packed, packed, block_table=ends[None])),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()
