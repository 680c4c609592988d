"""The decoding kernels in the interpreter against the oracle of caches (TRITON_INTERPRET=1)."""

import dataclasses
import importlib

import pytest
import torch

from fa_ops.backends import reference, triton
from fa_ops.backends.triton import launch
from fa_ops.call.call import attention_call
from fa_ops.testing import assert_close_to_oracle, make_case
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case
from tests.kernels import assert_batch_invariant

decode = importlib.import_module("fa_ops.backends.triton.decode")
forward = importlib.import_module("fa_ops.backends.triton.forward")

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

FEATURES = {
    "one token": {},
    "one short row": {"B": 1, "Hq": 1, "Hkv": 1, "lens": (1,)},
    "rows of very different lengths": {"B": 5, "S": 300, "lens": (1, 300, 0, 33, 32)},
    "causal": {"Sq": 5, "is_causal": True, "lens": (2, 150)},
    "several blocks of rows": {"Sq": 16, "Hq": 5, "Hkv": 1, "S": 40, "B": 1, "is_causal": True},
    "window": {"Sq": 3, "window": (70, 0), "S": 300, "lens": (300, 60)},
    "window that the first query enters a tile earlier": {
        "Sq": 3, "window": (74, 0), "S": 300, "lens": (300, 70),
    },
    "even splits": {"num_splits": 3, "S": 300, "lens": (300, 0)},
    "one split": {"num_splits": 1, "lens": (0, 150), "sinks": True},
    "fixed splits": {"batch_invariant": True, "S": 1100, "lens": (1100, 5), "D": 8, "Dv": 8},
    "pages of one": {"page_size": 1, "S": 70},
    "pages of five": {"page_size": 5, "S": 70},
    "pages of a tile": {"page_size": 32, "S": 200},
    "pages of several tiles": {"page_size": 256, "S": 300},
    "append": {"new": 3, "Sq": 3, "is_causal": True, "bshd": False},
    "append to pages": {"new": 20, "Sq": 2, "page_size": 8, "rotary": 16},
    "rotary pairs": {"new": 2, "Sq": 2, "rotary": 8, "interleaved": True},
    "fp8": {"fp8": True, "dtype": torch.float16, "page_size": 8},
    "fp8, scales of pages": {
        "fp8": True, "dtype": torch.float16, "page_size": 8, "page_scales": True, "S": 300,
    },
    "fp8, shared, scales of pages": {
        "fp8": True, "dtype": torch.float16, "page_size": 64, "page_scales": True, "shared": True,
        "Hkv": 1, "Sq": 2, "ranges": True,
    },
    "fp8, scales of tokens": {
        "fp8": True, "dtype": torch.float16, "token_scales": True, "S": 90, "Sq": 2, "bshd": False,
        "lens": (90, 0), "is_causal": True,
    },
    "fp8, scales of tokens in pages": {
        "fp8": True, "dtype": torch.float16, "page_size": 8, "token_scales": True, "S": 90,
    },
    "a maximum that is near": {"unified_max": 2.0, "S": 300, "sinks": True, "Sq": 2},
    "a maximum that is too low": {"unified_max": -90.0, "S": 300, "lens": (300, 0)},
    "a maximum that is too high": {"unified_max": 1e4, "num_splits": 2, "S": 100},
    "a maximum that is not a number": {"unified_max": float("nan"), "S": 100},
    "scores of 1e4": {"unified_max": 3.0, "magnitude": 1e4, "S": 300},
    "fp8 with a maximum": {
        "unified_max": 3.0, "fp8": True, "dtype": torch.float16, "page_size": 64, "S": 300,
        "page_scales": True, "magnitude": 4.0,
    },
    "everything": {
        "Sq": 4, "is_causal": True, "window": (50, 3), "softcap": 3.0, "alibi": "batch_heads",
        "sinks": True, "page_size": 16, "scale": -0.4, "D": 40, "Dv": 24,
    },
    "ranges": {"ranges": True, "B": 4, "S": 300, "lens": (300, 90, 0, 33)},
    "ranges of pages": {
        "ranges": True, "S": 300, "page_size": 8, "new": 3, "Sq": 3, "is_causal": True,
        "window": (70, 0), "alibi": "heads", "sinks": True,
    },
    "ranges in even splits": {"ranges": True, "num_splits": 3, "S": 300, "lens": (300, 40)},
    "ranges in fixed splits": {"ranges": True, "batch_invariant": True, "S": 1100, "lens": (1100,),
                               "B": 1, "D": 8, "Dv": 8},
    "shared value": {"shared": True, "D": 32, "Dv": 24, "Hkv": 1},
    "append to a shared value": {
        "shared": True, "D": 32, "Dv": 24, "Hkv": 1, "new": 3, "Sq": 3, "page_size": 8, "S": 40,
    },
    "keys wider than a product": {"D": 288, "Dv": 256, "shared": True, "Hkv": 1, "S": 40},
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    assert_cache_close(CacheCase(**FEATURES[feature]), "triton")


@pytest.mark.parametrize("seed", range(1000, 1016))
def test_random(seed):
    case = random_cache_case(seed, B=2, S=70)
    # the interpreter does not round to fp8 as a GPU does
    assert_cache_close(dataclasses.replace(case, fp8=case.fp8 and not case.new), "triton")


def test_more_sequences_than_a_chunk(monkeypatch):
    monkeypatch.setattr(decode, "_CHUNKS", (16,))
    monkeypatch.setattr(decode, "_launches", {})
    lens = tuple((7 * b) % 9 * (b % 3 == 0) for b in range(40))
    assert_cache_close(CacheCase(B=40, Hq=1, Hkv=1, S=9, D=8, Dv=8, lens=lens), "triton")


@pytest.mark.parametrize("page_size", [4, 32])
def test_pages_that_do_not_exist_are_not_touched(page_size):
    """Their keys count as absent: nothing is read, nothing is written."""
    case = CacheCase(page_size=page_size, S=96, lens=(60, 60), new=1, B=2)
    for wrong in (-1, case.fresh().key.shape[0], 2**31 - 1):
        call = case.fresh()
        k, table = call.key, call.operands.page_table.clone()
        table[0, 0] = wrong
        table[1, 60 // page_size] = wrong
        before = k.clone()
        out, _ = decode.cache_forward(call.changed(page_table=table))
        assert bool(out.isfinite().all())
        appended = ~((k == before) | (k.isnan() & before.isnan()))
        assert int(appended.any(-1).any(-1).sum()) == 1  # row 0's token alone


@pytest.mark.parametrize("new", [0, 2])
def test_queries_are_rotated_at_positions_inside_the_cache(new):
    case = CacheCase(B=3, S=40, Sq=3, lens=(40 - new, 5, 0), new=new, rotary=8)
    call = case.fresh()
    q = call.query
    expected = decode.prepare_cache(call)
    lens = torch.tensor([2**31 - 1, 5, -9], dtype=torch.int32)
    found = decode.prepare_cache(call.changed(kv_lens=lens))
    assert torch.equal(found[:2], expected[:2])
    at_zero = reference.rotate(q[2].double(), call, torch.zeros(3).long())
    torch.testing.assert_close(found[2], at_zero.float())


def test_lengths_beyond_the_cache_are_clamped():
    call = CacheCase(S=40, lens=(40, 40)).fresh()
    expected = decode.cache_forward(call)
    lens = torch.tensor([10**6, 41], dtype=torch.int32)
    found = decode.cache_forward(call.changed(kv_lens=lens))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    lens = torch.tensor([-5, -(2**31)], dtype=torch.int32)
    out, lse = decode.cache_forward(call.changed(kv_lens=lens))
    assert not out.any() and bool((lse == float("-inf")).all())


def test_batch_invariance():
    assert_batch_invariant(decode, CacheCase(B=3, S=1100, D=8, Dv=8, lens=(1100, 30, 700)))


def test_lengths_compile_nothing_new():
    compiled = set()
    for S in (40, 100, 300):
        call = CacheCase(S=S).fresh()
        decode.cache_forward(call)
        compiled.add(len(decode._launches))
    assert len(compiled) == 1


@pytest.mark.parametrize("name", ["plain", "lengths", "ranges", "one range", "everything"])
def test_attention_with_few_queries_is_decoding(name, monkeypatch):
    options = {
        "plain": {},
        "lengths": {"kv_lens": True, "is_causal": True},
        "ranges": {"key_ranges": (1, 0, 0), "is_causal": True, "kv_lens": True},
        "one range": {"key_ranges": (0, 0, 0), "window": (300, 0)},
        "everything": {
            "kv_lens": True, "is_causal": True, "window": (300, 0), "softcap": 3.0, "sinks": True,
            "alibi": "batch_heads",
        },
    }[name]  # fmt: skip
    calls, prepare = [], triton.prepare_cached

    def prepare_and_note(call):
        run = prepare(call)
        return lambda *args: calls.append(args) or run(*args)

    monkeypatch.setattr(triton, "prepare_cached", prepare_and_note)
    monkeypatch.setattr(triton, "forward", None)
    assert_close_to_oracle(make_case(Sq=3, Sk=520, **options), "triton", gradients=False)
    assert len(calls) == 1


def test_ranges_per_head_or_query_do_not_decode(monkeypatch):
    monkeypatch.setattr(triton, "prepare_cached", None)
    monkeypatch.setattr(forward, "decode", None)
    for axes in ((1, 1, 0), (0, 0, 1)):
        case = make_case(B=1, Hq=2, Hkv=1, Sq=2, Sk=520, key_ranges=axes)
        assert_close_to_oracle(case, "triton", gradients=False)


def test_padding_in_front_is_not_read():
    q, k, v = CacheCase(B=2, Hq=1, Hkv=1, S=4096, D=16, Dv=16, lens=(4096, 4096)).fresh()[:3]
    lens = torch.tensor([4096, 4096], dtype=torch.int32)
    ranges = torch.tensor([[4000, 4096], [0, 0]], dtype=torch.int32).view(2, 1, 1, 2)
    k[:, :, :4000], v[:, :, :4000] = float("nan"), float("nan")
    call = attention_call(q, k, v, kv_lens=lens, key_ranges=ranges, over_cache=True)
    out, lse = decode.cache_forward(call)
    seen = (x[:1].double() for x in (q, k[:, :, 4000:], v[:, :, 4000:]))
    expected = reference.dense(attention_call(*seen))[0]
    torch.testing.assert_close(out[:1].double(), expected, atol=1e-5, rtol=1e-5)
    assert not out[1].any() and bool((lse[1] == float("-inf")).all())


def test_attention_reads_no_tail_of_the_cache():
    q, k, v = make_case(Sq=1, Sk=600).fresh()[:3]
    lens = torch.tensor([7, 512], dtype=torch.int32)
    for b in range(2):
        k[b, :, lens[b] :] = float("nan")
        v[b, :, lens[b] :] = float("inf")
    out, lse = forward.forward(attention_call(q, k, v, kv_lens=lens))
    assert bool(out.isfinite().all() and lse.isfinite().all())


@pytest.mark.parametrize("changes", [{}, {"new": 2, "Sq": 2, "rotary": 8}, {"page_size": 8}])
def test_a_prepared_call_takes_other_tensors(changes):
    case = CacheCase(**changes, S=70)
    run = decode.prepare_cached(case.fresh())
    for seed in range(3):
        call = dataclasses.replace(case, seed=seed).fresh()
        q, k, v = call[:3]
        if seed == 2:  # an address of its own kind
            q = torch.cat([q.flatten()[:1], q.flatten()])[1:].view_as(q)
        expected = reference.cache_forward(call._replace(key=k.clone(), value=v.clone()))
        results = run(q, k, v, call.operands)
        for found, wanted in zip(results, expected):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_prepared_call_follows_torchs_fp32_precision(monkeypatch):
    call = CacheCase(S=70).fresh()
    compiled, real = [], decode.constants

    def spy(*args):
        compiled.append(real(*args)[0]["PRECISION"])
        return real(*args)

    monkeypatch.setattr(decode, "_launches", {})
    monkeypatch.setattr(decode, "constants", spy)
    run = decode.prepare_cached(call)
    for switch in ("ieee", "tf32", "tf32", "ieee"):
        monkeypatch.setattr(decode, "precision", lambda dtype, switch=switch: switch)
        run(*call[:3], call.operands, False)
    assert compiled == ["ieee", "tf32"]


def test_a_prepared_call_refuses_fp8_caches_at_odd_addresses_before_it_writes(monkeypatch):
    case = CacheCase(fp8=True, dtype=torch.float16, new=1, S=40, lens=(3, 20))
    call = case.fresh()
    q, k, v = call[:3]

    def moved(x, by):
        data = torch.zeros(x.numel() + 16, dtype=torch.uint8).view(x.dtype)
        return data.as_strided(x.shape, x.stride(), by).copy_(x)

    run = decode.prepare_cached(call)
    monkeypatch.setattr(decode, "_bind", lambda call: lambda *args: "attended")
    assert run(q, moved(k, 2), moved(v, 2), call.operands, False) == "attended"
    for name, by in (("key_cache", (1, 2)), ("value_cache", (2, 1))):
        caches = [moved(x, offset) for x, offset in zip((k, v), by)]
        with pytest.raises(NotImplementedError, match=f"even strides and addresses, {name}"):
            run(q, *caches, call.operands, False)
        for found, before in zip(caches, (k, v)):
            assert torch.equal(found.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("page_size, token_scales", [(4, False), (4, True), (0, True)])
def test_new_keys_are_divided_by_the_scales_of_their_pages(page_size, token_scales):
    """Exactly where the interpreter can round: powers of two times numbers that e4m3 has."""
    call = CacheCase(
        fp8=True, dtype=torch.float16, page_size=page_size, page_scales=True, new=6, S=40,
        lens=(3, 20), token_scales=token_scales,
    ).fresh()  # fmt: skip
    t = call.operands
    call = call.changed(
        k_scale=2.0 ** t.k_scale.log2().round(), v_scale=2.0 ** t.v_scale.log2().round(),
        new_key=t.new_key.sign() * 1.5, new_value=t.new_value.sign() * 1.5,
    )  # fmt: skip
    first, second = (call._replace(key=call.key.clone(), value=call.value.clone()) for _ in "ab")
    decode.cache_forward(first)
    reference.cache_forward(second)
    for found, wanted in zip(first[1:3], second[1:3]):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_scales_of_values_far_apart_keep_their_precision():
    """fp16 weights are in units of the largest scale so far, whether it comes first or last."""
    case = CacheCase(B=1, fp8=True, dtype=torch.float16, page_size=64, page_scales=True, S=320,
                     lens=(320,))  # fmt: skip
    call = case.fresh()
    q, table = call.query, call.operands.page_table
    for exponents in ([-20, -15, -18, -9, -20], [0, -12, -24, -30, 9]):
        scale = torch.ones_like(call.operands.v_scale)
        scale[table[0].long()] = 2.0 ** torch.tensor(exponents).float().view(-1, 1, 1)
        one = call.changed(v_scale=scale)
        out, _ = decode.cache_forward(one._replace(query=q.float().half()))
        expected, _ = reference.cached(one)
        assert (out.double() - expected).abs().max() < 2e-3 * expected.abs().max()


def dense_plan(call):
    """The plan of a call, and what that prepares for it."""
    plan = triton.plan(call)
    return plan.kernel, plan.prepare(call)


def test_a_prepared_dense_call():
    q, k, v = make_case(Sq=2, Sk=520).fresh()[:3]
    call = attention_call(q, k, v, is_causal=True)
    kernel, run = dense_plan(call)
    assert kernel == "split-KV decoding"
    expected = reference.forward(call._replace(query=2 * q))[0]
    found, lse = run(2 * q, k, v, call.operands, False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert lse is None
    kernel, _ = dense_plan(call._replace(key=k[:, :, :100], value=v[:, :, :100]))
    assert kernel == "forward"


@pytest.mark.parametrize("names", [("kv_lens",), ("key_ranges",), ("kv_lens", "key_ranges")])
def test_a_prepared_dense_call_reads_lengths_and_ranges_anew(names):
    q, k, v = make_case(Sq=2, Sk=520).fresh()[:3]
    run = None
    for last in (519, 30):
        lens = torch.tensor([last, 7], dtype=torch.int32)
        bounds = {"kv_lens": lens, "key_ranges": torch.stack([lens // 2, lens], -1)[:, None, None]}
        given = {name: bounds[name] for name in names}
        call = attention_call(q, k, v, is_causal=True, **given)
        kernel, first = dense_plan(call)
        assert kernel == "split-KV decoding"
        run = run or first
        expected = reference.forward(call)[0]
        found, _ = run(q, k, v, call.operands, False)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    kernel, _ = dense_plan(call._replace(key=k[:, :, :100], value=v[:, :, :100]))
    assert kernel == "forward"
