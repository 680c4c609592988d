"""The operators over a key-value cache: what torch needs of them, what they refuse, mutation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.ops import kv_cache
from fa_ops.testing.caches import CacheCase

CASES = {
    "read": CacheCase(S=20),
    "paged": CacheCase(S=20, page_size=4, Sq=3, is_causal=True, sinks=True, alibi="heads"),
    "append": CacheCase(S=20, new=2, Sq=2, is_causal=True),
    "append to pages": CacheCase(S=20, new=2, Sq=2, page_size=4, rotary=8),
    "ranges": CacheCase(S=20, new=2, Sq=2, is_causal=True, ranges=True, unified_max=2.0),
    "fp8, scales of pages": CacheCase(
        S=20, new=1, fp8=True, dtype=torch.bfloat16, page_size=4, page_scales=True
    ),
    "fp8": CacheCase(S=20, new=1, fp8=True, dtype=torch.bfloat16),
}


def operator(case):
    return kv_cache.APPEND if case.new else kv_cache.READ


@pytest.mark.parametrize("name", [name for name in CASES if "fp8" not in name])
def test_opcheck(name):
    call = CASES[name].fresh()
    schema = kv_cache.APPENDING if CASES[name].new else kv_cache.READING
    (q, k, v), (args, options) = call[:3], schema.arguments(call)
    k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)  # opcheck compares what was written
    opcheck(operator(CASES[name]), (q, k, v, *args), options)


def by_function(case: CacheCase = CASES["append"], **changes):
    """The typed function on a case, with arguments changed."""
    call = case.fresh()
    (q, k, v), t = call[:3], call.operands
    given = {
        "query": q, "key_cache": k, "value_cache": v, "kv_lens": t.kv_lens,
        "page_table": t.page_table, "is_causal": call.options.is_causal, "key": t.new_key,
        "value": t.new_value, "k_scale": t.k_scale, "v_scale": t.v_scale,
        "rotary_cos": t.rotary_cos, "rotary_sin": t.rotary_sin,
    }  # fmt: skip
    return fa_ops.attention_with_kv_cache(**(given | changes))


def lens(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


PAGED = CASES["paged"]
ODD = dataclasses.replace(CASES["append"], D=5, Dv=5)  # no row starts at a multiple of 16 bytes
FP8_PAGED = CASES["fp8, scales of pages"]
WRONG = {
    "key_cache must have shape (B, Hkv, S, D), got (2, 20, 16)":
        {"key_cache": torch.zeros(2, 20, 16)},
    "key_cache must have shape (pages, page_size, Hkv, D), got (13, 2, 16)":
        {"case": PAGED, "key_cache": torch.zeros(13, 2, 16)},
    "value_cache has pages of 5 keys, but key_cache of 4":
        {"case": PAGED, "value_cache": torch.zeros(13, 5, 2, 16)},
    "value_cache has 12 pages, but key_cache has 13":
        {"case": PAGED, "value_cache": torch.zeros(12, 4, 2, 16)},
    "page_table has 3 rows, but query has batch size 2":
        {"case": PAGED, "page_table": torch.zeros(3, 5, dtype=torch.int32)},
    "page_table[1, 0] is 13, but key_cache has 13 pages":
        {"case": PAGED, "kv_lens": lens(0, 4), "page_table": lens(13, 13).view(2, 1)},
    "kv_lens[1] is -1, which is negative": {"kv_lens": lens(0, -1)},
    "kv_lens[0] is 19, which with 2 new keys is past the cache's 20": {"kv_lens": lens(19, 0)},
    "kv_lens must have shape (2,), got (3,)": {"kv_lens": lens(1, 2, 3)},
    "key_cache has 3 heads, which does not divide query's 4":
        {"key_cache": torch.zeros(2, 3, 20, 16), "value_cache": torch.zeros(2, 3, 20, 16)},
    "key must have shape (2, 2, 2, 16), got (2, 2, 2, 8)": {"key": torch.zeros(2, 2, 2, 8)},
    "key and value must be given together": {"value": None},
    "rotary_cos and rotary_sin must be given together": {"rotary_cos": torch.ones(20, 8)},
    "rotary_cos is for 18 features, but query has 16":
        {"rotary_cos": torch.ones(20, 9), "rotary_sin": torch.ones(20, 9)},
    "rotary_sin must have shape (20, 8), got (20, 1)":
        {"rotary_cos": torch.ones(20, 8), "rotary_sin": torch.ones(20, 1)},
    "key must be contiguous in its last dimension, got strides (128, 64, 32, 2)":
        {"key": torch.zeros(2, 2, 2, 32)[..., ::2]},
    "value must be contiguous in its last dimension, got strides (128, 64, 32, 2)":
        {"value": torch.zeros(2, 2, 2, 32)[..., ::2]},
    "rotary_cos has 9 positions, but sequence 0 has 10 keys":
        {"kv_lens": lens(8, 0), "rotary_cos": torch.ones(9, 8), "rotary_sin": torch.ones(9, 8)},
    "k_scale is for caches in float8_e4m3fn, but key_cache is float32":
        {"k_scale": torch.ones(2, 2)},
    "k_scale must have shape (13, 4, 2), got (13, 2, 1)":
        {"case": FP8_PAGED, "k_scale": torch.ones(13, 2, 1)},
    "k_scale must have shape (13, 1, 2), got (12, 1, 2)":
        {"case": FP8_PAGED, "k_scale": torch.ones(12, 1, 2)},
    "k_scale must have shape (2, 2), got (13, 2)":
        {"case": FP8_PAGED, "k_scale": torch.ones(13, 2)},
    "k_scale must have shape (2, 2, 20), got (2, 1, 2)":
        {"case": CASES["fp8"], "k_scale": torch.ones(2, 1, 2)},
    "k_scale and v_scale must both be for rows, (B, Hkv), for pages, or for tokens":
        {"case": FP8_PAGED, "k_scale": torch.ones(2, 2)},
    "for tokens, got (13, 4, 2) and (13, 1, 2)":
        {"case": FP8_PAGED, "k_scale": torch.ones(13, 4, 2)},
    "unified_max must have shape (4,), got (2,)": {"unified_max": torch.zeros(2)},
    "num_splits must not be negative, got -1": {"num_splits": -1},
    "key_ranges must have shape (B or 1, 1, 1, 2) with B = 2, got (2, 4, 1, 2)":
        {"key_ranges": torch.zeros(2, 4, 1, 2, dtype=torch.int32)},
    "key_ranges must have shape (B or 1, 1, 1, 2) with B = 2, got (3, 1, 1, 2)":
        {"key_ranges": torch.zeros(3, 1, 1, 2, dtype=torch.int32)},
    "key_ranges must have shape (B or 1, 1, 1, 2) with B = 2, got (2, 2)":
        {"key_ranges": torch.zeros(2, 2, dtype=torch.int32)},
    "num_splits must be 0, got 2": {"num_splits": 2, "batch_invariant": True},
    "num_splits must be an integer of 64 bits, got 18446744073709551616": {"num_splits": 2**64},
    "has no gradient": {"query": torch.zeros(2, 4, 2, 16, requires_grad=True)},
    "contiguous in its last dimension":
        {"key_cache": torch.zeros(2, 2, 16, 20).transpose(2, 3)},
    "value_cache is written to, so no two of its elements may share memory, got strides (0, ":
        {"value_cache": torch.zeros(1, 2, 20, 16).expand(2, -1, -1, -1)},
    "key_cache is written to, so no two of its elements may share memory, got strides (100, 0, ":
        {"case": ODD, "key_cache": torch.zeros(2, 1, 20, 5).expand(-1, 2, -1, -1)},
    "value_cache is written to, so no two of its elements may share memory, got strides (48, 24, 1":
        {"case": ODD, "value_cache": torch.zeros(2, 2, 24).unfold(2, 5, 1)},
    "backend must be 'auto' or one of": {"backend": "magic"},
}  # fmt: skip
WRONG_TYPES = {
    "key_cache must be query's float32 (or float8_e4m3fn for a half-precision query), got float16":
        {"key_cache": torch.zeros(2, 2, 20, 16).half(),
         "value_cache": torch.zeros(2, 2, 20, 16).half()},
    "value_cache is float64, but key_cache is float32":
        {"value_cache": torch.zeros(2, 2, 20, 16).double()},
    "kv_lens must be int32, got int64": {"kv_lens": lens(1, 2, dtype=torch.int64)},
    "key is float16, but query is float32": {"key": torch.zeros(2, 2, 2, 16).half()},
    "unified_max must be float32, got float64": {"unified_max": torch.zeros(4).double()},
    "unified_max must be a Tensor, got float": {"unified_max": 3.0},
    "key_ranges must be int32, got int64": {"key_ranges": torch.zeros(2, 1, 1, 2).long()},
    "key_ranges must be a Tensor, got list": {"key_ranges": [0, 5]},
    "kv_lens must be a Tensor, got list": {"kv_lens": [1, 2]},
    "key_cache must be a Tensor, got NoneType": {"key_cache": None},
    "value_cache must be a Tensor, got list": {"value_cache": [1.0]},
    "num_splits must be an int, got 1.5": {"num_splits": 1.5},
    "num_splits must be an int, got None": {"num_splits": None},
    "batch_invariant must be a bool, got 1": {"batch_invariant": 1},
}  # fmt: skip


@pytest.mark.parametrize("message", [*WRONG, *WRONG_TYPES])
def test_errors_name_the_argument_and_the_rule(message):
    error = TypeError if message in WRONG_TYPES else ValueError
    with pytest.raises(error) as raised:
        by_function(**(WRONG | WRONG_TYPES)[message])
    assert message in str(raised.value)


def test_backends_without_caches_say_so():
    with pytest.raises(NotImplementedError, match="hopper"):
        by_function(backend="hopper")


def test_appending_bumps_versions_and_reading_does_not():
    call = CASES["append"].fresh()
    q, k, v = call[:3]
    t = call.operands
    before = k._version, v._version
    fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens)
    assert (k._version, v._version) == before
    fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, key=t.new_key, value=t.new_value)
    assert k._version > before[0] and v._version > before[1]


def test_inference_tensors_have_no_version():
    call = CASES["append"].fresh()
    q, k, v = call[:3]
    t = call.operands
    with torch.inference_mode():
        caches = k.clone(), v.clone()
        out = by_function(key_cache=caches[0], value_cache=caches[1])
    wanted = fa_ops.attention_with_kv_cache(
        q, k, v, t.kv_lens, is_causal=True, key=t.new_key, value=t.new_value
    )
    assert torch.equal(out, wanted)
    for written, usual in zip(caches, (k, v)):
        torch.testing.assert_close(written, usual, rtol=0, atol=0, equal_nan=True)


def test_an_inference_tensor_beside_it_keeps_no_cache_from_its_new_version():
    call = CASES["append"].fresh()
    q, k, v = call[:3]
    t = call.operands
    with torch.inference_mode():
        other = v.clone()
    before = k._version
    fa_ops.attention_with_kv_cache(q, k, other, t.kv_lens, key=t.new_key, value=t.new_value)
    assert k._version > before


@pytest.mark.parametrize("window", [[3, 0], (3, 0), [None, -1]])
def test_a_window_may_be_a_list(window):
    call = CASES["append"].fresh()
    q, k, v = call[:3]
    t = call.operands
    out = fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, window=window)
    named = fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, window=tuple(window))
    assert torch.equal(out, named)


@pytest.mark.parametrize("name", ["append", "append to pages"])
def test_compiled_append_clones_no_cache(name):
    call = CASES[name].fresh()
    q, k, v = call[:3]
    t = call.operands
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    plain = [x.clone() for x in (k, v)]

    def step(q, k, v, lens, key, value):
        out = fa_ops.attention_with_kv_cache(
            q * 2, k, v, lens, t.page_table, True, key=key * 2, value=value
        )
        return out + 1

    args = (t.kv_lens, t.new_key, t.new_value)
    expected = step(q, *plain, *args)
    from torch._inductor.utils import run_and_get_code

    result, code = run_and_get_code(torch.compile(step, fullgraph=True), q, k, v, *args)
    torch.testing.assert_close(result, expected)
    assert torch.equal(k, plain[0]) and torch.equal(v, plain[1])
    text = "\n".join(code)
    assert "attention_with_kv_cache_append" in text and "clone" not in text
    shape = ", ".join(str(n) for n in k.shape)
    assert f"empty_strided_cpu(({shape})" not in text


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_views_of_a_latent_cache_that_compiled_code_takes(dynamic, page_size):
    """The view is read after the append; torch loses that where it is an input of its own."""
    case = CacheCase(S=20, new=2, Sq=2, Dv=8, is_causal=True, shared=True, page_size=page_size)
    call = case.fresh()
    q, k = call[:2]
    t = call.operands
    k, other = k.nan_to_num(0.0), k.nan_to_num(0.0)

    def step(q, k, lens, table, key):
        out = fa_ops.attention_with_kv_cache(
            q, k, k[..., :8], lens, table, True, key=key, value=key[..., :8]
        )
        return out, k.sum(), k[..., :8].sum()

    args = t.kv_lens, t.page_table, t.new_key
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(q, k, *args), step(q, other, *args))
    assert torch.equal(k, other)


def test_compiled_append_to_a_layer_of_a_larger_tensor():
    """Inductor must write at the offset of a view whose sizes are symbolic."""
    q, key = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)

    def of_layer(layers, key):
        k, v = layers[1].unbind(0)
        return fa_ops.attention_with_kv_cache(q * 2, k, v, lens(0, 3), key=key, value=-key)

    def of_parts(k, v, key):
        return fa_ops.attention_with_kv_cache(q * 2, k, v, lens(0, 3), key=key, value=-key)

    for step, parts in ((of_layer, lambda t: (t,)), (of_parts, lambda t: t[1].unbind(0))):
        layers = torch.randn(3, 2, 2, 2, 8, 16)
        other = layers.clone()
        with torch._inductor.config.patch(force_disable_caches=True):
            out = torch.compile(step, fullgraph=True, dynamic=True)(*parts(layers), key)
        torch.testing.assert_close(out, step(*parts(other), key))
        assert torch.equal(layers, other)


def test_lengths_compile_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    q, k, v = CASES["read"].fresh()[:3]
    step = torch.compile(fa_ops.attention_with_kv_cache, fullgraph=True, backend=counter)
    for first in (1, 5, 9):
        step(q, k, v, lens(first, 3))
    assert counter.frame_count == 1


def test_autocast_follows_the_cache():
    call = dataclasses.replace(CASES["append"], dtype=torch.bfloat16).fresh()
    q, k, v = call[:3]
    t = call.operands
    with torch.autocast("cpu", torch.float16):
        out = fa_ops.attention_with_kv_cache(
            q.float(), k, v, t.kv_lens, key=t.new_key.float(), value=t.new_value.float()
        )
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_flops(name):
    case = CASES[name]
    length = int((case.fresh().operands.kv_lens + case.new).sum())
    with FlopCounterMode(display=False) as counter:
        by_function(case)
    assert counter.get_total_flops() == 2 * case.Hq * case.Sq * length * (case.D + case.Dv)


def test_zero_sized():
    call = CASES["append"].fresh()
    q, k, v = call[:3]
    t = call.operands
    out, lse = fa_ops.attention_with_kv_cache(q, k[:, :, :0], v[:, :, :0], lens(0, 0),
                                              return_lse=True)  # fmt: skip
    assert not out.any() and bool((lse == float("-inf")).all())
    none = fa_ops.attention_with_kv_cache(q[:, :, :0], k, v, t.kv_lens)
    assert none.shape == (2, 4, 0, 16)
    before = k.clone()
    fa_ops.attention_with_kv_cache(q[:, :, :0], k, v, t.kv_lens, key=t.new_key, value=t.new_value)
    assert not torch.equal(before.nan_to_num(0.0), k.nan_to_num(0.0))


@pytest.mark.parametrize("name", ["read", "append"])
def test_vmap(name):
    samples = [dataclasses.replace(CASES[name], seed=seed).fresh() for seed in range(3)]
    loop = [[t.clone() for t in sample[:3]] for sample in samples]
    lens = [sample.operands.kv_lens for sample in samples]
    new = [(sample.operands.new_key, sample.operands.new_value) for sample in samples]

    def step(q, k, v, lens, key, value):
        return fa_ops.attention_with_kv_cache(q, k, v, lens, None, True, key=key, value=value)

    expected = [step(*given, n, *added) for given, n, added in zip(loop, lens, new)]
    q, k, v = (torch.stack(x) for x in zip(*(sample[:3] for sample in samples)))
    key, value = (None, None) if name == "read" else (torch.stack(x) for x in zip(*new))
    dims = (0, 0, 0, 0, *(None if key is None else 0,) * 2)
    out = torch.func.vmap(step, dims)(q, k, v, torch.stack(lens), key, value)
    torch.testing.assert_close(out, torch.stack(expected))
    for n, (_, k1, v1) in enumerate(loop):
        torch.testing.assert_close(k[n], k1, equal_nan=True)
        torch.testing.assert_close(v[n], v1, equal_nan=True)


def test_vmap_does_not_share_a_cache_that_is_written():
    call = CASES["append"].fresh()
    q, k, v = call[:3]
    t = call.operands

    def step(q):
        new = {"key": t.new_key, "value": t.new_value}
        return fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, **new)

    with pytest.raises(ValueError, match="key_cache and value_cache mapped"):
        torch.func.vmap(step)(torch.stack([q, q]))


def test_scales_of_tokens_are_checked_for_every_number_of_keys():
    """Calls over caches of about as many keys share checks, but not those of such scales."""
    q, lens = torch.randn(1, 2, 1, 16).bfloat16(), torch.tensor([20], dtype=torch.int32)
    scale = torch.ones(1, 2, 20)
    for keys in (20, 21):
        cache = torch.zeros(1, 2, keys, 16).to(torch.float8_e4m3fn)
        call = lambda c=cache: fa_ops.attention_with_kv_cache(q, c, c, lens, k_scale=scale)  # noqa: E731
        if keys == 20:
            assert call().isfinite().all()
            continue
        with pytest.raises(ValueError, match=r"k_scale must have shape \(1, 2, 21\)"):
            call()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_read_may_not_be_overwritten(name):
    """Neither in a first call nor in repeated ones; memory between elements is free."""
    memory = torch.randn(2, 2, 20, 48)
    before = memory.clone()
    caches = memory[..., :16], memory[..., 16:32]
    lens, at = torch.zeros(2, dtype=torch.int32), (slice(None), slice(None), slice(1))
    tensors = dict.fromkeys(("query", "key", "value"), memory[..., 32:][at])

    def call(**changes):
        query, key, value = (tensors | changes).values()
        return fa_ops.attention_with_kv_cache(query, *caches, lens, key=key, value=value)

    for _ in range(2):
        for cache, of in zip(caches, ("key_cache", "value_cache")):
            with pytest.raises(ValueError, match=f"{name} shares memory with {of}"):
                call(**{name: cache[at]})
        assert torch.equal(memory, before)
    out = call()
    torch.testing.assert_close(out, tensors["value"])
    assert torch.equal(memory[..., :1, :16], before[..., :1, 32:])
