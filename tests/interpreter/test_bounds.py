"""Broken borders, lengths, tables and ranges: nothing outside of the results is written, nothing
outside of the inputs is used, and what is computed is that of the clamped ones."""

import random

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.call import Saved
from fa_ops.testing.allocators import Arena
from fa_ops.testing.caches import CacheCase
from tests.groups import Packing, Spec, call_of, groups

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
    spec = Spec(
        is_causal=r.random() < 0.5,
        window_left=r.choice([-1, -1, 9]),
        sinks=torch.randn(2) if r.random() < 0.4 else None,
        kv_lens=torch.tensor([r.choice([-3, 5, 2**31 - 1]) for _ in range(batch)]).int()
        if r.random() < 0.4
        else None,
    )
    ends_q, ends_k = ends_of(r, batch, Tq), ends_of(r, batch, Tk)
    right = Packing(clamped(ends_q, Tq), clamped(ends_k, Tk))
    wrong = Packing(ends_q, ends_k, *r.choice([(None, None), (1, 1), (10**6, 10**6)]))
    expected = reference.varlen_forward(call_of(q, k, v, spec, packing=right))
    grads = reference.varlen_backward(
        call_of(q, k, v, spec, packing=right, saved=Saved(grad, None, *expected))
    )
    arena = Arena()
    *inputs, grad_out = (arena.placed(x) for x in (q, k, v, grad))
    with arena.outputs("triton"):
        out, lse = backend.varlen_forward(call_of(*inputs, spec, packing=wrong))
        found = backend.varlen_backward(
            call_of(*inputs, spec, packing=wrong, saved=Saved(grad_out, None, out, lse))
        )
    arena.check()
    assert_same((out, lse), expected)
    assert_same(found[:3], grads[:3])
    if spec.sinks is not None:
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
    spec = Spec(is_causal=r.random() < 0.5, key_ranges=ranges if seed % 3 else None, kv_lens=lens)
    if seed % 3 == 1:
        spec = spec._replace(kv_lens=None)
    expected = reference.forward(call_of(q, k, v, spec))
    grads = reference.backward(call_of(q, k, v, spec, saved=Saved(grad, None, *expected)))
    arena = Arena()
    *inputs, grad_out = (arena.placed(x) for x in (q, k, v, grad))
    with arena.outputs("triton"):
        out, lse = backend.forward(call_of(*inputs, spec))
        found = backend.backward(call_of(*inputs, spec, saved=Saved(grad_out, None, out, lse)))
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
    q, k, v, cache, spec = groups(case.fresh())
    k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)
    lens = torch.tensor([r.choice([-1, -(2**31), 95, 96, 97, 2**31 - 1, 40]) for _ in range(3)])
    if cache.page_table is not None:
        table = cache.page_table.clone()
        some = torch.rand(table.shape) < 0.3
        table[some] = torch.tensor(r.choices((-1, k.shape[0], *EXTREMES), k=int(some.sum()))).int()
        cache = cache._replace(page_table=table)
    if spec.key_ranges is not None:
        ranges = torch.tensor(r.choices((-5, 3, 70, 200, *EXTREMES), k=6)).int().view(3, 1, 1, 2)
        spec = spec._replace(key_ranges=ranges)
    arena = Arena()
    q, k, v = (arena.placed(x, read_only=False) for x in (q, k, v))
    new = {name: getattr(cache, name) for name in ("key", "value")}
    new = {name: x if x is None else arena.placed(x) for name, x in new.items()}
    spec = spec._replace(kv_lens=lens.int())
    with arena.outputs("triton"):
        out, lse = backend.cache_forward(call_of(q, k, v, spec, cache=cache._replace(**new)))
    arena.check()
    assert bool(out.isfinite().all()) and not lse.isnan().any()


def test_lengths_that_overflow_with_new_keys_are_those_of_a_full_cache():
    q, k, v, cache, spec = groups(CacheCase(S=40, lens=(37, 37), new=3).fresh())
    cache = cache._replace(key=cache.key[:, :, :3], value=cache.value[:, :, :3])
    k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)
    full = torch.tensor([40, 40], dtype=torch.int32)
    expected = reference.forward(call_of(q, k, v, spec._replace(kv_lens=full)))
    lens = torch.tensor([2**31 - 1, 2**31 - 2], dtype=torch.int32)
    assert_same(
        backend.cache_forward(call_of(q, k, v, spec._replace(kv_lens=lens), cache=cache)), expected
    )
