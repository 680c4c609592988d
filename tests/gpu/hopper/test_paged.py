"""Packed queries over pages on a Hopper GPU, by one kernel, against the oracle."""

import random

import pytest
import torch

import fa_ops
from fa_ops.backends.hopper import forward
from fa_ops.functions import varlen
from fa_ops.plans import planning
from tests.gpu.cases import few_processors

DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (40, 40))


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """The calls that one kernel has run."""
    ran, prepare = [], forward.prepare_paged

    def noted(call):
        run = prepare(call)
        return lambda *args: ran.append(1) or run(*args)

    monkeypatch.setattr(forward, "prepare_paged", noted)
    planning.forget()
    yield ran
    planning.forget()


def drawn(seed, D, Dv, page, group, Hkv=2, counts=None):
    """Arguments of attention_varlen: some tokens are in no sequence, some sequences are empty."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = counts or [
        r.choice((0, 1, 1, 1, 5, 33, 130, 300)) for _ in range(r.choice((1, 7, 70)))
    ]
    keys = [r.choice((0, 1, n, n + 3, n + 200, 700)) for n in counts]
    width = -(-max(*keys, 1) // page) + 1
    pages = len(counts) * width + 3
    table = torch.randperm(pages, generator=g)[: len(counts) * width].view(-1, width).int()
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    draw = lambda *s: torch.randn(s, generator=g).to("cuda", dtype)  # noqa: E731
    q = draw(sum(counts) + 9, group * Hkv, D)
    k, v = draw(pages, page, Hkv, D), draw(pages, page, Hkv, Dv)
    ends = torch.tensor([0, *counts]).cumsum(0).int() + 4
    for b, n in enumerate(keys):  # what no sequence has must not matter
        last = table[b, n // page].long()
        k[last, n % page :], v[last, n % page :] = torch.nan, torch.nan
        table[b, n // page + 1 :] = (-1, 10**6)[b % 2]
    options = {"kv_lens": torch.tensor(keys).int().cuda(), "page_table": table.cuda()}
    return (q, k, v, ends.cuda(), None), options | {"return_lse": True}, len(counts)


def options_of(seed, Hq, sequences):
    r, g = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    found = {"is_causal": r.random() < 0.6, "softcap": r.choice((0.0, 0.0, 15.0))}
    if r.random() < 0.3:
        found["window"] = (r.choice((3, 100)), r.choice((0, None)))
    if r.random() < 0.3:
        found["sinks"] = torch.randn(Hq, device="cuda", generator=g)
    if r.random() < 0.3:
        shape = (Hq,) if r.random() < 0.5 else (sequences, Hq)
        found["alibi_slopes"] = torch.rand(shape, device="cuda", generator=g)
    return found


def assert_as_the_oracle(args, options):
    out, lse = fa_ops.attention_varlen(*args, **options)
    expected, expected_lse = fa_ops.attention_varlen(*args, **options, backend="reference")
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse.float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("seed", range(36))
def test_random(seed, native):
    D, Dv = DIMS[seed % 6]
    group, page = (1, 4, 7, 8, 3)[seed % 5], (16, 64, 32, 128)[seed % 4]
    args, options, sequences = drawn(seed, D, Dv, page, group)
    options |= options_of(seed, args[0].shape[1], sequences)
    with few_processors((132, 5)[seed % 2]):
        assert_as_the_oracle(args, options)
    assert native


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_the_keys(seed, native, monkeypatch):
    choose = forward.tiling_of

    def cut(config, shape, processors, can_pack, can_split):
        chosen = choose(config, shape, processors, can_pack, can_split)
        return chosen._replace(splits=2 + seed % 4) if can_split else chosen

    monkeypatch.setattr(forward, "tiling_of", cut)
    D, Dv = DIMS[seed % 6]
    args, options, sequences = drawn(seed, D, Dv, 16 << seed % 3, (4, 1, 7)[seed % 3])
    options |= options_of(seed, args[0].shape[1], sequences)
    with few_processors((132, 5)[seed % 2]):
        assert_as_the_oracle(args, options)
    assert native


def test_a_batch_of_prompts_and_steps_in_a_graph(native):
    args, options, _ = drawn(0, 128, 128, 16, 4, counts=[600, 1, 1, 130, *[1] * 40])
    options |= {"is_causal": True}
    fa_ops.attention_varlen(*args, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fa_ops.attention_varlen(*args, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, lse = fa_ops.attention_varlen(*args, **options)
    args[3][1:4] -= 50
    options["kv_lens"].clamp_(max=300)
    graph.replay()
    expected, _ = fa_ops.attention_varlen(*args, **options, backend="reference")
    torch.testing.assert_close(captured, expected, atol=2e-2, rtol=2e-2)
    assert native


def test_other_backends_attend_tiles_of_a_cache(native):
    args, options, _ = drawn(1, 64, 64, 16, 4)
    fa_ops.attention_varlen(*args, **options, backend="triton")
    assert not native
    args, options, _ = drawn(1, 64, 64, 8, 4)  # pages that the kernel does not take
    assert_as_the_oracle(args, options)
    assert not native and varlen._refused


def test_autocast_keeps_the_kernel(native):
    args, options, _ = drawn(4, 128, 128, 64, 4, counts=[300, 7, 0, 130])
    expected = fa_ops.attention_varlen(*args, **options)
    with torch.autocast("cuda", torch.bfloat16):
        found = fa_ops.attention_varlen(*args, **options)
    assert len(native) == 2 and all(map(torch.equal, found, expected))
