"""flex_attention: results, gradients, BlockMask, torch's transforms, and errors."""

from __future__ import annotations

import functools
import math
import os
import random
import subprocess
import sys
import time
import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fa_ops
from fa_ops.functions import flex
from fa_ops.functions.tile_cache import MaskedCall
from fa_ops.ops import programmed
from tests.programs import functions as f

BACKENDS = ["cpu", "reference"]
SHAPE = (f.B, f.H, f.S, 8)


def tensors(dtype=torch.float64, kv_heads: int = f.H, grad: bool = True) -> list[Tensor]:
    shapes = SHAPE, (f.B, kv_heads, f.S, 8), (f.B, kv_heads, f.S, 12)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def dense(q, k, v, score_mod=None, mask_mod=None) -> Tensor:
    """The same by all scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if score_mod is not None:
        s = score_mod(s, *f.indices()).expand(s.shape)
    if mask_mod is not None:
        s = s.masked_fill(~f.dense_mask(mask_mod), -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v


def assert_same(score_mod, mask_mod, backend: str, **options) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(kv_heads=2)
    out = fa_ops.flex_attention(
        q, k, v, score_mod, mask_mod=mask_mod, enable_gqa=True, backend=backend, **options
    )
    expected = dense(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)  # terms may be float32
    grad, leaves = torch.randn_like(out), [q, k, v, *f.TRAINED]
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    wanted = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", f.MASKS)
def test_masks(name):
    assert_same(None, f.MASKS[name], "cpu")


@pytest.mark.parametrize("name", f.SCORES)
def test_scores(name):
    assert_same(f.SCORES[name], None, "cpu")


@pytest.mark.parametrize("name", ["gates", "t5", "scaled bias of pairs", "sigmoid"])
def test_the_oracle(name):
    assert_same(f.SCORES[name], f.MASKS["blocks of heads"], "reference")


def random_call(seed: int):
    """A call of random functions with random sizes and options, and the same by all scores."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    B, Hkv, group = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 1, 3])
    Sq, Sk = (rng.choice([1, 7, 130, 257, 300]) for _ in range(2))
    sizes, trained = (B, Hkv * group, Sq, Sk), []
    score_mod, mask_mod = (
        f.random_function(seed + at, is_score, sizes, trained if is_score else None)
        if rng.random() < 0.8 else None
        for at, is_score in ((0, True), (10**6, False))
    )  # fmt: skip
    shapes = (*sizes[:3], 8), (B, Hkv, Sk, 8), (B, Hkv, Sk, 5)
    q, k, v = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in shapes)
    window = rng.choice([None, None, (rng.randrange(200), rng.randrange(200))])
    options = {"is_causal": rng.random() < 0.3, "window": window}
    if rng.random() < 0.3:
        options["kv_lens"] = torch.randint(0, Sk + 1, (B,), dtype=torch.int32)
    if rng.random() < 0.3:
        options["sinks"] = torch.randn(sizes[1], dtype=torch.float64, requires_grad=True)
        trained.append(options["sinks"])
    out, lse = fa_ops.flex_attention(
        q, k, v, score_mod, mask_mod=mask_mod, enable_gqa=True, return_lse=True, **options
    )
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(sizes[1]).view(-1, 1, 1)
    i, j = torch.arange(Sq).view(-1, 1), torch.arange(Sk)
    s = q @ k.repeat_interleave(group, 1).mT / math.sqrt(8)
    s = s if score_mod is None else score_mod(s, b, h, i, j).expand(s.shape)
    keep = torch.ones(s.shape, dtype=torch.bool) if mask_mod is None else mask_mod(b, h, i, j)
    ends = options.get("kv_lens", torch.full((1,), Sk)).view(-1, 1, 1, 1)
    left, right = (10**6, 10**6) if window is None else window
    right = 0 if options["is_causal"] else right
    distance = i + ends - Sq - j
    keep = keep & (j < ends) & (distance <= left) & (distance >= -right)
    s = s.masked_fill(~keep, -math.inf)
    if "sinks" in options:
        s = torch.cat([s, options["sinks"].view(-1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = torch.where(s.isneginf().all(-1, keepdim=True), 0.0, torch.softmax(s, -1))
    expected = p[..., :Sk] @ v.repeat_interleave(group, 1), s.logsumexp(-1)
    return (out, lse), expected, [q, k, v, *trained]


CALLS = range(max(40, int(os.environ.get("FA_OPS_PROGRAMS", "0"))))


def test_random_calls(monkeypatch):
    """With tiles of masks that are found in the first call, in a later one, or not at all."""
    for seed in CALLS:
        calls = (0.0, 1.0, math.inf)[seed % 3]
        monkeypatch.setattr(MaskedCall, "seconds_of_analysis", lambda _, calls=calls: calls)
        found, expected, leaves = random_call(seed)
        grads = []
        for results in (found, expected):
            loss = (results[0] * torch.arange(5)).sum() + results[1].clamp(min=-99).sin().sum()
            grads.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        named = zip((*found, *grads[0]), (*expected, *grads[1]), strict=True)
        for n, (a, e) in enumerate(named):
            a, e = (torch.zeros(()) if x is None else x.detach() for x in (a, e))
            a, e = torch.broadcast_tensors(a, e.nan_to_num(0.0) if n > 1 else e)
            scale = 1.0 + float(e.nan_to_num(0.0, 0.0, 0.0).abs().max())
            message = lambda text, n=n: f"call {seed}, result {n}: {text}"  # noqa: B023, E731
            torch.testing.assert_close(
                a.double(), e.double(), atol=1e-5 * scale, rtol=0, msg=message
            )


def test_torch_gives_the_same():
    torch.manual_seed(0)
    q, k, v = tensors(torch.float32, grad=False)
    for score, mask in (("gates", "documents"), ("t5", "window"), ("softcap", "prefix")):
        score_mod, mask_mod = f.SCORES[score], f.MASKS[mask]
        block_mask = torch_flex.create_block_mask(mask_mod, f.B, None, f.S, f.S, device="cpu")
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            expected = torch_flex.flex_attention(q, k, v, score_mod, block_mask)
        torch.testing.assert_close(fa_ops.flex_attention(q, k, v, score_mod, block_mask), expected)


# The forms of a call.


def test_lse_and_aux():
    q, k, v = tensors(grad=False)
    score_mod = f.SCORES["alibi"]
    out, lse = fa_ops.flex_attention(q, k, v, score_mod, return_lse=True)
    again, aux = fa_ops.flex_attention(
        q, k, v, score_mod, return_aux=torch_flex.AuxRequest(lse=True)
    )
    s = score_mod(q @ k.transpose(-1, -2) / math.sqrt(8), *f.indices())
    torch.testing.assert_close(lse, s.logsumexp(-1))
    assert torch.equal(lse, aux.lse) and torch.equal(out, again) and aux.max_scores is None


def test_runs_of_tiles_beside_a_mask_that_becomes_a_window():
    q, k, v = tensors(torch.float32, grad=False)
    runs = fa_ops.mask_tiles(f.MASKS["causal"], 1, 1, f.S, f.S)
    args = f.SCORES["sigmoid"], runs
    out = fa_ops.flex_attention(q, k, v, *args, mask_mod=f.MASKS["causal"])
    torch.testing.assert_close(out, dense(q, k, v, args[0], f.MASKS["causal"]))


def test_options_beside_functions():
    q, k, v = tensors(grad=False)
    sinks, lens = torch.randn(f.H, dtype=torch.float64), torch.tensor([50, 96], dtype=torch.int32)
    score_mod, mask_mod = f.SCORES["gates"], f.MASKS["prefix"]
    results = [
        fa_ops.flex_attention(
            q, k, v, score_mod, mask_mod=mask_mod, is_causal=True, window=(40, 0), kv_lens=lens,
            sinks=sinks, backend=backend,
        )
        for backend in BACKENDS
    ]  # fmt: skip
    torch.testing.assert_close(*results)
    j, i = torch.arange(f.S), torch.arange(f.S).view(-1, 1)
    diagonal = i + lens.view(-1, 1, 1, 1) - f.S
    keep = f.dense_mask(mask_mod) & (j <= diagonal) & (diagonal - j <= 40)
    s = score_mod(q @ k.transpose(-1, -2) / math.sqrt(8), *f.indices())
    s = s.masked_fill(~(keep & (j < lens.view(-1, 1, 1, 1))), -torch.inf)
    s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(f.B, -1, f.S, 1)], -1)
    torch.testing.assert_close(results[0], torch.softmax(s, -1)[..., :-1] @ v)


@pytest.mark.parametrize("Sq, Sk", [(5, 9), (9, 5), (1, 7)])
def test_indices_count_from_the_first_query(Sq, Sk):
    q, k, v = (torch.randn(1, 2, n, 8) for n in (Sq, Sk, Sk))
    i, j = torch.arange(Sq).view(-1, 1), torch.arange(Sk)
    for keep, mask_mod in (
        (i >= j, lambda b, h, i, j: i >= j),
        ((i - j).abs() < 3, lambda b, h, i, j: (i - j).abs() < 3),
        ((i + 2 >= j) & (j >= 1), lambda b, h, i, j: (i + 2 >= j) & (j >= 1)),
    ):
        out = fa_ops.flex_attention(q, k, v, mask_mod=mask_mod)
        torch.testing.assert_close(out, fa_ops.attention(q, k, v, keep))
    slopes = torch.tensor([0.5, 0.25])
    out = fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    bias = -slopes.view(-1, 1, 1) * (i - j).abs()
    torch.testing.assert_close(out, fa_ops.attention(q, k, v, bias))


def test_buffers_come_behind_the_indices():
    q, k, v = tensors(torch.float32, grad=False)
    bias = torch.randn(f.H, requires_grad=True)
    given = fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j, t: s * t[h], buffers=(bias,))
    captured = fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: s * bias[h])
    assert torch.equal(given, captured)
    grads = [torch.autograd.grad(x.square().sum(), bias)[0] for x in (given, captured)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("place", ["buffer", "mask", "closure"])
def test_one_tensor_in_two_places_and_then_two(place):
    q, k, v = tensors(torch.float32, grad=False)
    a, b = torch.randn(2, f.S)

    def attend(first, second):
        if place == "buffer":
            added = lambda s, b, h, i, j, t: s + first[i] * t[j]  # noqa: E731
            return fa_ops.flex_attention(q, k, v, added, buffers=(second,))
        if place == "closure":
            return fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: s + first[i] * second[j])
        return fa_ops.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + first[i],
            mask_mod=lambda b, h, i, j: second[j] < 0.5,
        )  # fmt: skip

    def expected(first, second):
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if place != "mask":
            return torch.softmax(s + first.view(-1, 1) * second, -1) @ v
        kept = second < 0.5
        return torch.softmax(s.masked_fill(~kept, -torch.inf), -1).nan_to_num(0.0) @ v

    for first, second in ((a, a), (a, b), (b, b), (b, a)):
        torch.testing.assert_close(attend(first, second), expected(first, second))


def test_kernel_options_warn_once():
    q, k, v = tensors(torch.float32, grad=False)
    flex._warned.discard("kernel_options")
    with pytest.warns(UserWarning, match="do not apply"):
        fa_ops.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa_ops.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})


def test_captured_values_are_read_anew():
    """A tensor that is written to, replaced, or a number that changes."""
    q, k, v = tensors(torch.float32, grad=False)

    def attend(t, n):
        return fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: s * t[h] + n)

    t = torch.ones(f.H)
    before = attend(t, 0.0)
    t.mul_(2.0)
    doubled = attend(t, 0.0)
    assert not torch.equal(before, doubled)
    torch.testing.assert_close(doubled, fa_ops.attention(q, k, v, scale=2 / math.sqrt(8)))
    assert torch.equal(attend(torch.ones(f.H), 0.0), before)


@pytest.mark.filterwarnings("ignore:.*is read in every call")
def test_functions_that_draw_numbers_or_read_modes_are_read_in_every_call():
    q, k, v = tensors(torch.float32, grad=False)
    drawn = random.Random(0).uniform
    for score_mod in (
        lambda s, b, h, i, j: s * random.random(),
        lambda s, b, h, i, j, draw=drawn: s * draw(0.0, 2.0),
        lambda s, b, h, i, j: s * (time.perf_counter() % 2.0),
        lambda s, b, h, i, j: s * (2.0 if torch.is_grad_enabled() else 1.0),
    ):
        with torch.no_grad():
            before = fa_ops.flex_attention(q, k, v, score_mod)
        assert not torch.equal(fa_ops.flex_attention(q, k, v, score_mod), before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "Sq"), [(1, 1), (2, 5)])
def test_scores_that_are_all_a_captured_tensor(heads, Sq, backend):
    """Masks are not written into the tensor, and one number may be all scores of a column."""
    q, k, v = (torch.randn(1, heads, n, 8) for n in (Sq, 7, 7))
    t = torch.randn(7, requires_grad=True)
    before, keep = t.detach().clone(), torch.arange(7) % 3 != 0
    out = fa_ops.flex_attention(
        q, k, v, lambda s, b, h, i, j: t[j], mask_mod=lambda b, h, i, j: keep[j], backend=backend
    )
    expected = (torch.softmax(t.masked_fill(~keep, -torch.inf), 0) @ v).unsqueeze(2)
    expected = expected.expand(out.shape)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(x.square().sum(), t)[0] for x in (out, expected))
    torch.testing.assert_close(found, wanted)
    assert torch.equal(t, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_small_integers_wrap_around(dtype):
    q, k, v = tensors(torch.float32, grad=False)
    info = torch.iinfo(dtype)
    t = torch.randint(info.min, info.max + 1, (f.S,), dtype=dtype)
    functions = (
        lambda b, h, i, j: t[i] - t[j] < 20,
        lambda b, h, i, j: (t[i] * t[j] + 100 > 50) | (-t[i] < ~t[j]),
        lambda b, h, i, j: (7 * i - 300 * j).to(dtype) < 20,
        lambda b, h, i, j: (t[j] == -1) | (t[i] % -3 < t[j] // -4),
    )
    for mask_mod in functions:
        out = fa_ops.flex_attention(q, k, v, mask_mod=mask_mod)
        torch.testing.assert_close(out, dense(q, k, v, mask_mod=mask_mod))


def test_captured_integers_above_32_bits_are_refused():
    """Times in milliseconds, for one."""
    q, k, v = tensors(torch.float32, grad=False)
    times = 1_700_000_000_000 + torch.arange(f.S)
    with pytest.raises(ValueError, match=r"needs integers of 32 bits, got 1700000000000: subtract"):
        fa_ops.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: times[i] - times[j] < 9)
    out = fa_ops.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: times[i] >= 0)
    torch.testing.assert_close(out, fa_ops.attention(q, k, v))


@pytest.mark.parametrize(("Sq", "Sk"), [(0, 0), (0, 3), (3, 0)])
def test_terms_of_distances_without_queries_or_keys(Sq, Sk):
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (Sq, Sk, Sk))
    table = torch.randn(2, 9, requires_grad=True)
    out = fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) + table[h, i - j + 4])
    out.sum().backward()
    assert out.shape == q.shape and not out.any() and not table.grad.any()


def test_functions_that_dynamo_cannot_trace_break_the_graph():
    q, k, v = tensors(torch.float32, grad=False)
    seen = []

    def score_mod(s, b, h, i, j):
        seen.append(id(s))
        sys.stdout.write("")
        return torch.tanh(s)

    def refused(s, b, h, i, j):
        return s if sys.stdout.write("") or i > j else -s

    compiled = torch.compile(lambda f: fa_ops.flex_attention(q, k, v, f), backend="eager")
    torch.testing.assert_close(compiled(score_mod), fa_ops.flex_attention(q, k, v, score_mod))
    assert seen
    mask_mod = functools.partial(lambda n, b, h, i, j: (sys.stdout.write(""), i - j < n)[1], 3)
    block_mask = torch_flex.create_block_mask(mask_mod, None, None, f.S, f.S, device="cpu")
    out = torch.compile(lambda: fa_ops.flex_attention(q, k, v, None, block_mask), backend="eager")()
    torch.testing.assert_close(out, fa_ops.flex_attention(q, k, v, None, block_mask))
    with pytest.raises(
        NotImplementedError, match=r"refused' \(test_flex.py, line \d+\) depends on"
    ):
        compiled(refused)


def test_a_block_mask_whose_function_reads_another_number_is_compared_anew():
    q, k, v = (torch.randn(1, 1, 256, 8) for _ in range(3))
    numbers = [3]
    block_mask = torch_flex.create_block_mask(
        lambda b, h, i, j: i - j < numbers[0], None, None, 256, 256, device="cpu"
    )
    fa_ops.flex_attention(q, k, v, None, block_mask)
    numbers[0] = -128  # the lists have one full block more
    given = flex.Arguments(q, k, v, None, block_mask)
    assert flex._table_of(given, block_mask) is not None


def test_a_function_is_read_once(monkeypatch):
    q, k, v = tensors(torch.float32, grad=False)
    reads, read = [], flex.read
    monkeypatch.setattr(flex, "read", lambda *a, **o: reads.append(1) or read(*a, **o))
    n = 0.123

    def make(t):
        return lambda s, b, h, i, j: s * t[h] * n

    for _ in range(3):
        fa_ops.flex_attention(q, k, v, make(torch.randn(f.H)))
    assert len(reads) == 1


def test_a_number_that_changes_is_no_new_program():
    """A program that differs by numbers alone reads them as terms."""
    q, k, v = tensors(torch.float64, grad=False)
    texts = []
    for n, m in ((0.3, 5), (0.7, 5), (-1.25, 5), (0.3, 5), (0.3, 7), (2.0, 9)):
        score_mod = lambda s, b, h, i, j: torch.tanh(s * n) + s  # noqa: B023, E731
        mask_mod = lambda b, h, i, j: (i - j) % m < 3  # noqa: B023, E731
        given = flex.Arguments(q, k, v, score_mod, mask_mod=mask_mod)
        texts.append(flex.described(given).scalars[-1])
        out = fa_ops.flex_attention(q, k, v, score_mod, mask_mod=mask_mod)
        torch.testing.assert_close(out, dense(q, k, v, score_mod, mask_mod), atol=1e-6, rtol=1e-5)
    assert texts[1] == texts[2] != texts[0] and texts[4] == texts[5]


def test_rows_may_share_keys():
    q, k, v = tensors(torch.float32)
    k, v = k[:1].detach().requires_grad_(), v[:1].detach().requires_grad_()
    out = fa_ops.flex_attention(q, k, v, torch_tan)
    expected = dense(q, k.expand(f.B, -1, -1, -1), v.expand(f.B, -1, -1, -1), torch_tan)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), (k, v)) for x in (out, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def torch_tan(s, b, h, i, j):
    return torch.sin(torch.cos(s)) + torch.tan(b)


# BlockMask.


def test_lists_of_a_block_mask_are_honoured():
    q, k, v = tensors(torch.float32, grad=False)
    rows = -(-f.S // 32)
    kept = torch.rand(rows, rows) < 0.6
    kept[0, 0] = True
    count = kept.sum(-1, dtype=torch.int32)[None, None]
    order = torch.argsort((~kept).int(), dim=-1, stable=True).int()[None, None]
    mask_mod = f.MASKS["causal"]
    block_mask = torch_flex.BlockMask.from_kv_blocks(
        count, order, None, None, BLOCK_SIZE=32, mask_mod=mask_mod, seq_lengths=(f.S, f.S)
    )
    dense_kept = kept.repeat_interleave(32, 0).repeat_interleave(32, 1) & f.dense_mask(mask_mod)
    for backend in BACKENDS:
        out = fa_ops.flex_attention(q, k, v, block_mask=block_mask, backend=backend)
        torch.testing.assert_close(out, fa_ops.attention(q, k, v, dense_kept))


def test_full_blocks_skip_the_mask():
    q, k, v = tensors(torch.float32, grad=False)
    full = torch.ones(1, 1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    block_mask = torch_flex.BlockMask.from_kv_blocks(
        torch.zeros(1, 1, 1, dtype=torch.int32), full[1], full[0][..., 0], full[1], BLOCK_SIZE=128,
        mask_mod=f.MASKS["causal"], seq_lengths=(f.S, f.S),
    )  # fmt: skip
    out = fa_ops.flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(out, fa_ops.attention(q, k, v))


@pytest.mark.parametrize("name", ["causal", "window", "documents", "prefix", "chunks"])
def test_lists_made_of_the_mask_change_nothing(name):
    """So that they do not keep options from being used."""
    q, k, v = tensors(torch.float32, grad=False)
    made = torch_flex.create_block_mask(f.MASKS[name], f.B, None, f.S, f.S, "cpu", BLOCK_SIZE=16)
    given = flex.Arguments(q, k, v, block_mask=made)
    assert flex._masks(given)[1] is None
    out = fa_ops.flex_attention(q, k, v, block_mask=made)
    torch.testing.assert_close(out, fa_ops.flex_attention(q, k, v, mask_mod=f.MASKS[name]))


def test_runs_of_tiles_change_nothing():
    q, k, v = (torch.randn(1, 2, 600, 8, requires_grad=True) for _ in range(3))
    documents = torch.arange(600) // 150
    mask_mod = lambda b, h, i, j: (documents[i] == documents[j]) & ((i - j) % 3 == 0)  # noqa: E731
    runs = fa_ops.mask_tiles(mask_mod, 1, 2, 600, 600)
    results = [
        fa_ops.flex_attention(q, k, v, None, tiles, mask_mod=mask_mod) for tiles in (None, runs)
    ]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in results]
    assert all(map(torch.equal, *grads))
    kept = programmed.OPERATORS.forward  # and they are used: with none, all is masked out
    call = flex.described(flex.Arguments(q, k, v, block_mask=runs.zero_(), mask_mod=mask_mod))
    empty, _ = kept.run(kept.signature.call(q, k, v, call.operands, call.scalars))
    assert not empty.any()


# torch's transforms, on a function with terms of every domain.

_PROGRAM = f.SCORES["gates"], f.SCORES["relative"], f.SCORES["scale and offset"]


def mixed(s, b, h, i, j):
    for score_mod in _PROGRAM:
        s = score_mod(s, b, h, i, j)
    return s


def call_of_mixed(dtype=torch.float64, grad: bool = True):
    """The arguments of the operator for `mixed`, with a mask, a bias and sinks."""
    q, k, v = tensors(dtype, grad=grad)
    score = lambda s, b, h, i, j: mixed(s, b, h, i, j) + f.PAIR_BIAS[h, i, j]  # noqa: E731
    sinks = torch.randn(f.H, dtype=dtype, requires_grad=grad)
    call = flex.described(
        flex.Arguments(q, k, v, score, mask_mod=f.MASKS["documents of rows"], sinks=sinks)
    )
    schema = programmed.OPERATORS.forward
    made = schema.signature.call(q, k, v, call.operands, call.scalars)
    args, options = schema.arguments(made)
    return (q, k, v, *args), options


def test_opcheck():
    args, options = call_of_mixed()
    args = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args
    ]
    options = {
        n: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for n, x in options.items()
    }
    torch.library.opcheck(programmed.PROGRAMMED_ATTENTION, args, options)
    torch.library.opcheck(programmed.WITH_MAX, args, options)
    out, lse = programmed.PROGRAMMED_ATTENTION(*args, **options)
    saved = torch.randn_like(out), torch.randn_like(lse), *args[:3], out, lse, *args[3:]
    saved = [x.detach() if isinstance(x, Tensor) else x for x in saved]
    options = {n: x.detach() if isinstance(x, Tensor) else x for n, x in options.items()}
    torch.library.opcheck(programmed.BACKWARD, saved, options | {"mask_grad": True})


def test_gradients_of_captured_tensors_repeat_bitwise():
    torch.manual_seed(0)
    q, k, v = tensors(torch.float32)
    leaves = [q, k, v, f.GATE, f.RELATIVE, f.FACTOR, f.OFFSET]
    found = []
    for _ in range(2):
        out = fa_ops.flex_attention(q, k, v, mixed, deterministic=True)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(map(torch.equal, *found))


def test_vmap_over_captured_tensors():
    q, k, v = tensors(grad=False)
    factors = torch.randn(3, f.H, dtype=torch.float64)

    def attend(factor):
        return fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: s * factor[h])

    torch.testing.assert_close(torch.vmap(attend)(factors), torch.stack([*map(attend, factors)]))
    mapped = torch.vmap(lambda q: fa_ops.flex_attention(q, k, v, f.SCORES["gates"]))
    several = torch.stack([q, q + 1])
    expected = [fa_ops.flex_attention(x, k, v, f.SCORES["gates"]) for x in several]
    torch.testing.assert_close(mapped(several), torch.stack(expected))


def test_func_grad():
    q, k, v = tensors(grad=False)
    factor = torch.randn(f.H, dtype=torch.float64)

    def loss(q, factor):
        score_mod = lambda s, b, h, i, j: s * factor[h]  # noqa: E731
        return fa_ops.flex_attention(q, k, v, score_mod, mask_mod=f.MASKS["window"]).square().sum()

    grads = torch.func.grad(loss, argnums=(0, 1))(q, factor)
    leaves = q.clone().requires_grad_(), factor.clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_other_derivatives_are_refused():
    args, options = call_of_mixed(grad=False)
    with pytest.raises(NotImplementedError, match="attention_programmed"):
        torch.func.jvp(
            lambda q: programmed.PROGRAMMED_ATTENTION(q, *args[1:], **options)[0],
            (args[0],), (torch.ones_like(args[0]),),
        )  # fmt: skip
    q, k, v = tensors()
    out = fa_ops.flex_attention(q, k, v, mixed)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()


def test_checkpointing_and_autocast():
    q, k, v = tensors(torch.float32)
    run = lambda q: fa_ops.flex_attention(q, k, v, mixed)  # noqa: E731
    out = run(q)
    kept = checkpoint(run, q, use_reentrant=False)
    leaves = [q, f.GATE, f.RELATIVE]
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (out, kept)]
    assert all(map(torch.equal, *grads))
    with torch.autocast("cpu", torch.bfloat16):
        half = run(q)
        torch.autograd.grad(half.float().sum(), leaves)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), out, atol=0.05, rtol=0.05)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(f.H, 2 * f.S - 1))
        self.documents = torch.nn.Buffer(f.DOCUMENTS[0].clone())

    def score(self, s, b, h, i, j):
        return torch.tanh(s) + self.bias[h, i - j + f.S - 1]

    def forward(self, q, k, v):
        S = q.shape[2]
        mask_mod = lambda b, h, i, j: (self.documents[i] == self.documents[j]) | (j == S - 2)  # noqa: E731
        return fa_ops.flex_attention(q, k, v, self.score, mask_mod=mask_mod)


_RELOAD = """
import sys, torch, fa_ops
program, inputs, expected = torch.export.load(sys.argv[1]), *torch.load(sys.argv[2])
torch.testing.assert_close(program.module()(*inputs), expected)
"""


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_sizes_that_vary(strict):
    model, (q, k, v) = Model(), tensors(torch.float32, grad=False)
    shapes = ({2: torch.export.Dim("S", min=2, max=f.S)},) * 3
    program = torch.export.export(model, (q, k, v), dynamic_shapes=shapes, strict=strict)
    shorter = [x[:, :, :20] for x in (q, k, v)]
    torch.testing.assert_close(program.module()(*shorter), model(*shorter))


def test_export_and_reload_in_a_new_process(tmp_path):
    model, inputs = Model(), tensors(torch.float32, grad=False)
    expected = model(*inputs).detach()
    program = torch.export.export(model, tuple(inputs), strict=False)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "fa.attention_programmed.default" in targets
    torch.testing.assert_close(program.module()(*inputs).detach(), expected)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((inputs, expected), tmp_path / "inputs.pt")
    files = str(tmp_path / "model.pt2"), str(tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-c", _RELOAD, *files], check=True)


SLOPE = torch.rand(f.H, requires_grad=True)
GIVEN = torch_flex.create_block_mask(f.MASKS["documents of rows"], f.B, None, f.S, f.S, "cpu", 16)


def of_lengths(q, k, v):
    """Sizes are captured, and a tensor of which a row is read first."""
    S, documents = q.shape[2], torch.arange(q.shape[2]) // 5
    score_mod = lambda s, b, h, i, j: (  # noqa: E731
        torch.tanh(s) * SLOPE[h] - f.GATE[b][h][i] * f.OFFSET[2] * (i - j + S) + f.RELATIVE[h, 3]
    )
    mask_mod = lambda b, h, i, j: (documents[i] == documents[j]) | (j < S - 20)  # noqa: E731
    return fa_ops.flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_lse=True)


def of_lists(q, k, v):
    """Blocks that are listed, another mask, buffers, options, and keys that rows share."""
    return fa_ops.flex_attention(
        q, k[:1, :2], v[:1, :2], lambda s, b, h, i, j, t: s + t[h], GIVEN, 0.4, True,
        return_aux=torch_flex.AuxRequest(lse=True), kernel_options={"BLOCK_M": 64},
        mask_mod=lambda b, h, i, j, t: (i + j) % 3 < 2, buffers=(SLOPE,), window=(40, None),
        sinks=torch.ones(f.H), kv_lens=torch.tensor([f.S, f.S - 9], dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("function, dynamic", [(of_lengths, True), (of_lists, False)])
def test_compiled_code_holds_one_call(function, dynamic):
    """No graph break, and the gradients of captured tensors."""
    torch._dynamo.reset()
    graphs: list[torch.fx.Graph] = []

    def record(gm, inputs):
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=boxed_nop)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    # of no length that a captured tensor has, to which it would be bound
    for S in (f.S - 7, f.S - 25) if dynamic else (f.S,):
        given = [x[:, :, :S].detach().clone().requires_grad_() for x in tensors(torch.float32)]
        found = []
        for run in (compiled, function):
            results = tree_leaves(run(*given))
            loss = sum(x.square().sum() for x in results if x is not None)
            grads = torch.autograd.grad(loss, [*given, SLOPE, f.GATE], allow_unused=True)
            found.append([*results, *(x for x in grads if x is not None)])
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    (graph,) = graphs
    calls = [n for n in graph.nodes if n.target is programmed.PROGRAMMED_ATTENTION]
    assert len(calls) == 1


def test_compiled_code_says_what_is_refused():
    """With the function and its line, although a graph stands for it."""
    q, k, v = tensors(torch.float32, grad=False)
    pairs = torch.zeros(f.S, f.S)

    def twisted(s, b, h, i, j):
        return torch.tanh(s + pairs[i, j])

    line = r"'twisted' \(test_flex.py, line \d+\) reads a tensor by query and key"
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=line):
        torch.compile(fa_ops.flex_attention, backend="eager", fullgraph=True)(q, k, v, twisted)


# Errors, and what is explained.


def test_errors():
    q, k, v = tensors(torch.float32, grad=False)
    with pytest.raises(ValueError, match="query has 4 heads, but key has 2: pass enable_gqa=True"):
        fa_ops.flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(TypeError, match="score_mod must be a function, got int"):
        fa_ops.flex_attention(q, k, v, 3)
    with pytest.raises(TypeError, match="block_mask must be a BlockMask"):
        fa_ops.flex_attention(q, k, v, None, 3)
    with pytest.raises(ValueError, match="pass both"):
        fa_ops.flex_attention(q, k, v, None, torch.zeros(1))
    with pytest.raises(ValueError, match="tile_runs must have shape"):
        mask_mod = f.MASKS["dilated"]
        runs = fa_ops.mask_tiles(mask_mod, 1, 1, 2 * f.S, 2 * f.S)
        fa_ops.flex_attention(q, k, v, None, runs, mask_mod=mask_mod)
    with pytest.raises(ValueError, match=r"block_mask is of lengths \(256, 256\)"):
        made = torch_flex.create_block_mask(f.MASKS["causal"], 1, 1, 256, 256, "cpu")
        fa_ops.flex_attention(q, k, v, block_mask=made)
    with pytest.raises(ValueError, match="both ask for lse"):
        aux = torch_flex.AuxRequest(lse=True)
        fa_ops.flex_attention(q, k, v, return_lse=True, return_aux=aux)
    with pytest.raises(TypeError, match="kernel_options must be a dict or None, got list"):
        fa_ops.flex_attention(q, k, v, kernel_options=[1])
    with pytest.raises(TypeError, match="return_aux must be an AuxRequest, got bool"):
        fa_ops.flex_attention(q, k, v, return_aux=True)
    line = r" '.*' \(test_flex.py, line \d+\) "
    with pytest.raises(TypeError, match=f"^score_mod{line}must take .score, b, h, q_idx, kv_idx."):
        fa_ops.flex_attention(q, k, v, lambda s, b, h, i: s)
    with pytest.raises(TypeError, match=f"^mask_mod{line}must take .b, h, q_idx, kv_idx, .buffers"):
        fa_ops.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j, buffers=(q[0, 0, 0],))
    short, pairs = torch.zeros(3), torch.zeros(f.S, f.S)
    with pytest.raises(IndexError, match=f"^score_mod{line}reads short.k., a tensor of shape .3,"):
        fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) + short[j])
    with pytest.raises(
        NotImplementedError, match=f"^score_mod{line}reads a tensor by query and key"
    ):
        fa_ops.flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s + pairs[i, j]))
    with pytest.raises(
        NotImplementedError, match=f"^mask_mod{line}reads a tensor by query and key"
    ):
        fa_ops.mask_tiles(lambda b, h, i, j: pairs[i, j] > 0, 1, 1, f.S, f.S)
    with pytest.raises(ValueError, match="^Sq must be at least 0, got -1"):
        fa_ops.mask_tiles(f.MASKS["causal"], 1, 1, -1, f.S)
    with pytest.raises(TypeError, match="^Sk must be an int, got 8.0"):
        fa_ops.mask_tiles(f.MASKS["causal"], 1, 1, 8, 8.0)
    with pytest.raises(TypeError, match="^mask_mod must be a function, got int"):
        fa_ops.mask_tiles(3, 1, 1, 8, 8)
    with pytest.raises(ValueError, match="key_ranges and a mask_mod"):
        ranges = torch.tensor([0, 5], dtype=torch.int32).view(1, 1, 1, 2)
        fa_ops.flex_attention(q, k, v, mask_mod=f.MASKS["ancestors"], key_ranges=ranges)


def test_errors_of_the_operator():
    args, options = call_of_mixed(grad=False)
    call = lambda **new: programmed.PROGRAMMED_ATTENTION(*args, **options | new)  # noqa: E731
    with pytest.raises(ValueError, match="term_values must have shape"):
        call(term_values=options["term_values"][:-1])
    with pytest.raises(ValueError, match="term_indices must be given where"):
        call(term_indices=None)
    with pytest.raises(TypeError, match="term_values must be float64"):
        call(term_values=options["term_values"].float())
    with pytest.raises(ValueError, match="program must begin"):
        programmed.PROGRAMMED_ATTENTION(*args[:3], "score", *args[4:], **options)


def test_what_is_explained():
    q, k, v = tensors(torch.float32, grad=False)
    told = str(fa_ops.explain(q, k, v, score_mod=f.SCORES["gates"], mask_mod=f.MASKS["dilated"]))
    for line in (
        "backend: cpu", "window: 49 keys to the left, 0 to the right of a query",
        "term t0, float column bh grad: GATE[b, h, k]",
        "mask in the kernel: eq(mod(sub(q, k), 3), 0)",
        "score in the kernel: sub(add(score, t1), t0)",
        "tiles of the mask: 0 empty, 0 full, 1 mixed", "hopper: ",
    ):  # fmt: skip
        assert line in told
