"""Broken borders, lengths, tables and ranges: nothing outside of the results is written, nothing
outside of the inputs is used, and what is computed is that of the clamped ones."""

import random

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing.caches import CacheCase
from fa_ops.testing.inputs import Arena

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) of dead rows
]

EXTREMES = (-(2**31), -7, 2**31 - 1, 2**31 - 130, 10**6)


def ends_of(r: random.Random, batch: int, total: int) -> torch.Tensor:
    """Borders, of which some decrease, are negative or lie behind the last token."""
    ends = [r.randint(-20, total + 40) for _ in range(batch + 1)]
    if r.random() < 0.6:
        ends.sort()
    for b in range(batch + 1):
        if r.random() < 0.15:
            ends[b] = r.choice(EXTREMES)
    return torch.tensor(ends, dtype=torch.int32)


def clamped(ends: torch.Tensor, total: int) -> torch.Tensor:
    return ends.clamp(0, total).cummax(0).values.int()


def assert_same(actual, expected):
    for name, x, y in zip(("out or dq", "lse or dk", "dv"), actual, expected):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4, msg=lambda m, name=name: name + m)


@pytest.mark.parametrize("seed", range(16))
def test_broken_borders_of_packed_sequences(seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    batch, Tq, Tk = r.choice([1, 3, 5]), r.choice([1, 40, 150]), r.choice([1, 47, 140])
    q, k = torch.randn(Tq, 2, 16), torch.randn(Tk, 1, 16)
    v, grad = torch.randn(Tk, 1, 24), torch.randn(Tq, 2, 24)
    is_causal, left = r.random() < 0.5, r.choice([-1, -1, 9])
    sinks = torch.randn(2) if r.random() < 0.4 else None
    lens = torch.tensor([r.choice([-3, 5, 2**31 - 1]) for _ in range(batch)]).int()
    lens = lens if r.random() < 0.4 else None
    ends_q, ends_k = ends_of(r, batch, Tq), ends_of(r, batch, Tk)
    right = attention_call(
        q, k, v, is_causal=is_causal, window_left=left, sinks=sinks, kv_lens=lens,
        cu_seqlens_q=clamped(ends_q, Tq), cu_seqlens_k=clamped(ends_k, Tk),
    )  # fmt: skip
    longest = r.choice([None, 1, 10**6])
    expected = reference.varlen_forward(right)
    grads = reference.varlen_backward(right._replace(saved=Saved(grad, None, *expected)))
    arena = Arena()
    q, k, v, grad_out = (arena.placed(x) for x in (q, k, v, grad))
    wrong = right.changed(
        query=q, key=k, value=v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=longest,
        max_seqlen_k=longest,
    )  # fmt: skip
    with arena.outputs("triton"):
        out, lse = backend.varlen_forward(wrong)
        found = backend.varlen_backward(wrong._replace(saved=Saved(grad_out, None, out, lse)))
    arena.check()
    assert_same((out, lse), expected)
    assert_same(found[:3], grads[:3])
    if sinks is not None:
        torch.testing.assert_close(found.sinks, grads.sinks, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_broken_lengths_and_ranges(seed):
    """Beyond the keys, negative, reversed; also near the ends of int32."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    B, Sq, Sk = 2, r.choice([3, 40, 140]), r.choice([5, 70, 520])
    q, grad = torch.randn(B, 2, Sq, 16), torch.randn(B, 2, Sq, 16)
    k, v = torch.randn(B, 1, Sk, 16), torch.randn(B, 1, Sk, 16)
    lens = torch.tensor([r.choice([-1, 30, Sk + 9, *EXTREMES]) for _ in range(B)]).int()
    shape = (B, 1, 1 if Sq == 3 else Sq, 2)
    ranges = torch.randint(-20, Sk + 20, shape).int()
    strange = torch.rand(shape) < 0.2
    ranges[strange] = torch.tensor(r.choices(EXTREMES, k=int(strange.sum()))).int()
    call = attention_call(
        q, k, v, is_causal=r.random() < 0.5, key_ranges=ranges if seed % 3 else None,
        kv_lens=None if seed % 3 == 1 else lens,
    )  # fmt: skip
    expected = reference.forward(call)
    grads = reference.backward(call._replace(saved=Saved(grad, None, *expected)))
    arena = Arena()
    q, k, v, grad_out = (arena.placed(x) for x in (q, k, v, grad))
    call = call._replace(query=q, key=k, value=v)
    with arena.outputs("triton"):
        out, lse = backend.forward(call)
        found = backend.backward(call._replace(saved=Saved(grad_out, None, out, lse)))
    arena.check()
    assert_same((out, lse), expected)
    assert_same(found[:3], grads[:3])


@pytest.mark.parametrize("seed", range(12))
def test_broken_caches(seed):
    r = random.Random(seed)
    case = CacheCase(
        B=3, S=96, Sq=r.choice([1, 3]), is_causal=True, page_size=r.choice([0, 8, 32]),
        new=r.choice([0, 2]), rotary=r.choice([0, 8]), num_splits=r.choice([0, 2]),
        lens=(20, 50, 90), sinks=r.random() < 0.5, seed=seed, ranges=r.random() < 0.4,
    )  # fmt: skip
    call = case.fresh()
    q, k, v = call.query, call.key.nan_to_num(0.5), call.value.nan_to_num(0.5)
    t = call.operands
    lens = torch.tensor([r.choice([-1, -(2**31), 95, 96, 97, 2**31 - 1, 40]) for _ in range(3)])
    if t.page_table is not None:
        table = t.page_table.clone()
        some = torch.rand(table.shape) < 0.3
        table[some] = torch.tensor(r.choices((-1, k.shape[0], *EXTREMES), k=int(some.sum()))).int()
        call = call.changed(page_table=table)
    if t.key_ranges is not None:
        ranges = torch.tensor(r.choices((-5, 3, 70, 200, *EXTREMES), k=6)).int().view(3, 1, 1, 2)
        call = call.changed(key_ranges=ranges)
    arena = Arena()
    q, k, v = (arena.placed(x, read_only=False) for x in (q, k, v))
    key, value = (x if x is None else arena.placed(x) for x in (t.new_key, t.new_value))
    call = call.changed(
        query=q, key=k, value=v, kv_lens=lens.int(), new_key=key, new_value=value
    )  # fmt: skip
    with arena.outputs("triton"):
        out, lse = backend.cache_forward(call)
    arena.check()
    assert bool(out.isfinite().all()) and not lse.isnan().any()


def test_lengths_that_overflow_with_new_keys_are_those_of_a_full_cache():
    call = CacheCase(S=40, lens=(37, 37), new=3).fresh()
    call = call._replace(key=call.key.nan_to_num(0.5), value=call.value.nan_to_num(0.5))
    full = torch.tensor([40, 40], dtype=torch.int32)
    expected = reference.forward(attention_call(*call[:3], kv_lens=full))
    lens = torch.tensor([2**31 - 1, 2**31 - 2], dtype=torch.int32)
    assert_same(backend.cache_forward(call.changed(kv_lens=lens)), expected)
