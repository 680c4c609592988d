"""Packed sequences on a Hopper GPU: repeated calls, and packed queries over pages."""

import random

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.backends.hopper import forward
from fa_ops.call.call import attention_call
from fa_ops.ops import eager
from fa_ops.plans import planning
from fa_ops.testing import assert_within_budget, naive
from tests.gpu.cases import few_processors

# Repeated packed calls on a GPU: what was prepared gives the bits of the first call.

LENGTHS = (5, 0, 140, 51, 300)
TOKENS = sum(LENGTHS) + 4  # two before the first sequence, two behind the last
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (30, None)},
    "lengths": {"is_causal": True, "kv_lens": (2, 0, 140, 0, 77)},
    "sinks": {"sinks": True},
    "ALiBi": {"is_causal": True, "alibi_slopes": True},
    "dropout": {"dropout_p": 0.3},
}


def ends():
    return torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int() + 2


def tensors(offset=0, fused=False):
    """Query, key and value; `fused`: as slices of one tensor, `offset`: elements into memory."""
    if fused:
        return torch.randn(TOKENS, 3, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(1)
    sizes = [TOKENS * heads * 64 for heads in (4, 2, 2)]
    memory = [torch.randn(n + offset, device="cuda", dtype=torch.bfloat16) for n in sizes]
    return [x[offset:].view(TOKENS, -1, 64) for x in memory]


def options_of(name):
    options = dict(OPTIONS[name])
    if "kv_lens" in options:
        options["kv_lens"] = torch.tensor(options["kv_lens"], device="cuda", dtype=torch.int32)
    if "sinks" in options:
        options["sinks"] = torch.randn(4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(len(LENGTHS), 4, device="cuda") * 0.2
    return options


def results(inputs, options, both):
    """out and lse, then all gradients, of a call with torch's seed 0."""
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = fa_ops.attention_varlen(*leaves, both, both, return_lse=True, **options)
    wanted = [*leaves, *([options["sinks"]] if "sinks" in options else [])]
    outputs, given = (out, lse), (torch.ones_like(out), torch.ones_like(lse))
    grads = torch.autograd.grad(outputs, wanted, given)
    return out.detach(), lse.detach(), *grads


@pytest.mark.parametrize("layout", [{}, {"offset": 8}, {"offset": 1}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_repeated_calls_give_the_first_ones_results(name, layout):
    options = options_of(name)
    given = [(tensors(**layout), ends()) for _ in range(3)]
    expected = []
    for inputs, both in given:
        planning.forget()
        expected.append(results(inputs, options, both))
    planning.forget()
    for (inputs, both), first in list(zip(given, expected)) * 2:
        out, lse, *grads = results(inputs, options, both)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])
        for a, b in zip(grads, first[2:]):  # sums of dQ are added in any order
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    assert len(planning._prepared) == 2


def test_plans_agree_with_the_oracle_and_the_operator():
    (q, k, v), both = tensors(), ends()
    exact_call = attention_call(
        *(x.double() for x in (q, k, v)), is_causal=True, cu_seqlens_q=both, cu_seqlens_k=both
    )
    for _ in range(3):
        out, lse = fa_ops.attention_varlen(q, k, v, both, both, is_causal=True, return_lse=True)
        assert lse[:, :2].isneginf().all() and not out[-2:].any()
        exact = reference.varlen_forward(exact_call)[0]
        rounded = naive_packed(q, k, v, both)
        inside = slice(2, TOKENS - 2)
        assert_within_budget("out", out[inside], exact[inside], rounded[inside])
        found = torch.ops.fa.attention_varlen(q, k, v, both, both, is_causal=True)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def naive_packed(q, k, v, both):
    """Attention written out, sequence by sequence."""
    out = torch.zeros_like(q)
    for first, end in zip(both.tolist(), both.tolist()[1:]):
        if end > first:
            one = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
            out[first:end] = naive(attention_call(*one, is_causal=True))[0][0].transpose(0, 1)
    return out


@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_a_captured_call_reads_lengths_when_it_is_replayed(name):
    options, both = OPTIONS[name], ends()
    q, k, v = tensors()

    def call():
        return fa_ops.attention_varlen(q, k, v, both, both, return_lse=True, **options)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for shift in (0, 3):
        both.copy_(ends() + torch.tensor([0, shift, 0, shift, shift, 0], device="cuda"))
        graph.replay()
        fresh = fa_ops.attention_varlen(q, k, v, both, both, return_lse=True, **options)
        torch.cuda.synchronize()
        assert torch.equal(lse, fresh[1])  # which dropout leaves as it is
        if name == "causal":
            assert torch.equal(out, fresh[0])


# Packed queries over pages on a Hopper GPU, by one kernel, against the oracle.

DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (40, 40))


@pytest.fixture
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


def options_over_pages(seed, Hq, sequences):
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
def test_random_over_pages(seed, native):
    D, Dv = DIMS[seed % 6]
    group, page = (1, 4, 7, 8, 3)[seed % 5], (16, 64, 32, 128)[seed % 4]
    args, options, sequences = drawn(seed, D, Dv, page, group)
    options |= options_over_pages(seed, args[0].shape[1], sequences)
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
    options |= options_over_pages(seed, args[0].shape[1], sequences)
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
    assert not native and eager._refused


def test_autocast_keeps_the_kernel(native):
    args, options, _ = drawn(4, 128, 128, 64, 4, counts=[300, 7, 0, 130])
    expected = fa_ops.attention_varlen(*args, **options)
    with torch.autocast("cuda", torch.bfloat16):
        found = fa_ops.attention_varlen(*args, **options)
    assert len(native) == 2 and all(map(torch.equal, found, expected))
