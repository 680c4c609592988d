"""The Hopper kernels on a GPU: random cases against the oracle, and special cases."""

import contextlib
import dataclasses
import itertools
import random
import threading

import pytest
import torch

import fa_ops
from fa_ops.backends import dropout, hopper
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Arena, Case, PackedCase, assert_right, random_case
from tests.gpu import hopper_calls
from tests.gpu.cases import (
    UNBOUNDED,
    MaskedCase,
    check,
    dropout_case,
    few_processors,
    hopper_case,
    lengthened,
    masked_case,
    random_masked_case,
)

NO_MASK = {"mask": None, "mask_shape": None, "mask_grad": False}
FOR_PACKED = {"mask": None, "mask_grad": False, "key_ranges": None}


@pytest.mark.parametrize("seed", range(400))
def test_random(seed):
    check(lengthened(hopper_case(seed, **NO_MASK, dropout_p=0.0, deterministic=False)))


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 4000), (64, 128), (129, 129), (700, 1300), (1300, 700)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(lengths, is_causal):
    Sq, Sk = lengths
    check(
        Case(
            B=2,
            Hq=6,
            Hkv=2,
            Sq=Sq,
            Sk=Sk,
            D=128,
            Dv=128,
            dtype=torch.bfloat16,
            device="cuda",
            is_causal=is_causal,
        )
    )


def test_more_tiles_than_processors():
    base = Case(B=40, Hq=4, Hkv=4, Sq=300, Sk=300, D=64, Dv=64, dtype=torch.bfloat16, device="cuda")
    for changes in ({}, {"is_causal": True}, {"kv_lens": True}, {"key_ranges": (1, 0, 1)}):
        check(dataclasses.replace(base, **changes))


@pytest.mark.parametrize("seed", range(160))
def test_few_processors(seed):
    with few_processors(1 + seed % 5):
        check(hopper_case(seed + 7000, deterministic=seed % 3 == 0))


def test_nan_beyond_kv_lens_does_not_affect_the_result():
    q, k, v = (torch.randn(2, 4, 200, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lens = torch.tensor([77, 0], device="cuda", dtype=torch.int32)
    k[0, :, 77:], v[0, :, 77:], k[1], v[1] = (float("nan"),) * 4
    out, lse = fa_ops.attention(q, k, v, kv_lens=lens, return_lse=True, backend="hopper")
    assert not out.isnan().any() and not lse.isnan().any()
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()


def test_refusals_name_an_alternative():
    q = torch.randn(1, 2, 64, 128, device="cuda", dtype=torch.bfloat16)
    odd = q[..., :100].contiguous()
    assert "triton" in hopper.support_error(attention_call(odd, odd, odd))
    with pytest.raises(NotImplementedError, match="float32"):
        fa_ops.attention(q.float(), q.float(), q.float(), backend="hopper")


def test_cuda_graphs_replay_with_new_inputs():
    q, k, v = (torch.randn(8, 16, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    fa_ops.attention(q, k, v, is_causal=True, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa_ops.attention(q, k, v, is_causal=True, backend="hopper")
    for t in (q, k, v):
        t.normal_()
    graph.replay()
    torch.testing.assert_close(out, fa_ops.attention(q, k, v, is_causal=True, backend="hopper"))


def test_a_new_thread_can_make_a_call():
    q = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    expected, results = hopper_calls.forward(attention_call(q, q, q)), []

    def run():
        # uses memory cached by the allocator, so that only the call itself initialises CUDA here
        results.append(hopper_calls.forward(attention_call(q, q, q)))

    for _ in range(3):
        thread = threading.Thread(target=run)
        thread.start(), thread.join()
    assert len(results) == 3
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(expected, result))


def test_a_new_thread_can_make_the_first_call_of_a_shape():
    small, large = (
        torch.randn(1, 2, S, 64, device="cuda", dtype=torch.bfloat16) for S in (64, 256)
    )
    results = []

    def run(x):
        out, lse = hopper_calls.forward(attention_call(x, x, x))
        results.append(
            hopper_calls.backward(
                attention_call(x, x, x, saved=Saved(torch.ones_like(out), None, out, lse))
            )
        )

    kept = torch.empty(1 << 24, device="cuda")
    run(small)  # loads the kernels
    del kept  # the thread's allocations come from torch's cache, and do not initialise CUDA
    thread = threading.Thread(target=run, args=(large,))
    thread.start(), thread.join()
    assert len(results) == 2


def test_more_heads_than_the_limit_of_a_grid_dimension():
    q, k, v = (torch.randn(8192, 9, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ranges = torch.tensor([[0, 2], [0, 3], [1, 3]], device="cuda", dtype=torch.int32)[None, None]
    for key_ranges in (None, ranges):
        call = attention_call(q, k, v, key_ranges=key_ranges)
        out, lse = hopper_calls.forward(call)
        grad = torch.randn_like(out)
        whole = hopper_calls.backward(call._replace(saved=Saved(grad, None, out, lse)))
        last = slice(-2, None)
        call = call._replace(query=q[last], key=k[last], value=v[last])
        out, lse = hopper_calls.forward(call)
        part = hopper_calls.backward(call._replace(saved=Saved(grad[last], None, out, lse)))
        for x, y in zip(whole[:3], part[:3]):
            torch.testing.assert_close(x[last], y, rtol=0.02, atol=0.02)


def test_concurrent_streams():
    shapes = [(4, 8, 512, 128), (2, 16, 777, 64), (1, 4, 1500, 256)]
    inputs = [
        [torch.randn(s, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for s in shapes
    ]
    expected = [fa_ops.attention(*qkv, is_causal=True, backend="hopper") for qkv in inputs]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for i in range(3000):
        with torch.cuda.stream(streams[i % 2]):
            results.append(
                (i % 3, fa_ops.attention(*inputs[i % 3], is_causal=True, backend="hopper"))
            )
        if len(results) == 60:
            torch.cuda.synchronize()
            assert all(torch.equal(out, expected[which]) for which, out in results)
            results.clear()


@pytest.mark.parametrize("seed", range(60))
def test_packed(seed):
    features = hopper_case(seed, **FOR_PACKED, dropout_p=0.0, deterministic=False)
    lengths = [(0, 5, 150, 33, 1), (700, 3, 129), (64, 64), (1,)][seed % 4]
    keys = [(4, 9, 70, 0, 47), (300, 900, 129), (64, 64), (500,)][seed % 4]
    check(PackedCase(lengths, keys, (0, 65)[seed // 4 % 2], features))


@pytest.mark.parametrize("seed", range(96))
def test_packed_alibi(seed):
    alibi = ("heads", "batch_heads")[seed // 16 % 2]
    features = hopper_case(seed, **FOR_PACKED, alibi=alibi, deterministic=bool(seed // 8 % 2))
    lengths = [(0, 5, 150, 33, 1), (700, 3, 129), (1, 70, 64)][seed % 3]
    keys = [(4, 9, 70, 0, 47), (300, 900, 129), (500, 90, 64)][seed % 3]
    with few_processors(4) if seed % 5 == 0 else contextlib.nullcontext():
        check(PackedCase(lengths, keys, (0, 65)[seed // 4 % 2], features))


def random_bool_mask(seed):
    fixed = {"mask_grad": False, "deterministic": False, "key_ranges": None}
    fixed["dtype"] = (torch.bfloat16, torch.float16)[seed % 2]
    return random_masked_case(
        seed, "bool", fixed, band=(-UNBOUNDED, (UNBOUNDED, 100)[seed // 2 % 2])
    )


@pytest.mark.parametrize("seed", range(80))
def test_bool_masks(seed):
    check(random_bool_mask(seed), gradients=False)


@pytest.mark.parametrize("seed", range(256))
def test_gradients_under_bool_masks(seed):
    bands = (-200, 60), (9, 320), (0, UNBOUNDED), (-UNBOUNDED, UNBOUNDED)
    check(masked_case(seed, mask_holes=seed % 7 == 0, band=bands[seed // 2 % 4]))


@pytest.mark.parametrize("seed", range(24))
def test_random_gradients_under_bool_masks(seed):
    check(random_bool_mask(seed))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"mask_shape": (1, 0, 0, 1), "band": (300, 1800)},
        {"band": (-9, 600)},
    ],
    ids=str,
)
def test_long_gradients_under_bool_masks(changes):
    base = MaskedCase(
        B=2, Hq=4, Hkv=2, Sq=1500, Sk=2100, D=128, Dv=128, dtype=torch.bfloat16, device="cuda"
    )
    for deterministic in (False, True):
        check(dataclasses.replace(base, deterministic=deterministic, **changes))


@pytest.mark.parametrize("seed", range(240))
def test_gradients_in_two_passes(seed):
    check(lengthened(hopper_case(seed, **NO_MASK, dropout_p=0.0, deterministic=True)))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 4000), (129, 129), (1300, 700), (2048, 2048)])
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"window": (100, 30)}], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
def test_lengths_in_two_passes(dims, changes, lengths):
    D, Dv = dims
    Sq, Sk = lengths
    case = Case(
        B=1, Hq=4, Hkv=2, Sq=Sq, Sk=Sk, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda",
        deterministic=True, **changes,
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize("seed", range(32))
def test_packed_in_two_passes(seed):
    features = hopper_case(
        seed, dtype=torch.bfloat16, **FOR_PACKED, dropout_p=0.0, deterministic=True
    )
    check(PackedCase((700, 3, 129), (300, 900, 129), (0, 65)[seed // 8 % 2], features))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_gradients_are_bitwise_equal(D):
    shapes = (2, 8, 3000, D), (2, 2, 3000, D), (2, 2, 3000, D)
    q, k, v = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
    )
    options = {"is_causal": True, "deterministic": True, "backend": "hopper"}
    grad = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    first, *others = (
        torch.autograd.grad(fa_ops.attention(q, k, v, **options), (q, k, v), grad) for _ in range(5)
    )
    for grads in others:
        assert all(map(torch.equal, grads, first))


GROUPS = pytest.mark.parametrize("heads", [(8, 1), (16, 2), (6, 2), (7, 1), (12, 4)], ids=str)


@GROUPS
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_divided_groups(dims, heads, deterministic):
    """With few processors, groups of query heads are not divided, or into fewer parts."""
    base = Case(
        B=2, Hq=heads[0], Hkv=heads[1], Sq=300, Sk=420, D=dims[0], Dv=dims[1],
        dtype=torch.bfloat16, device="cuda", deterministic=deterministic,
    )  # fmt: skip
    features = {}, {"is_causal": True}, {"kv_lens": True, "window": (150, 60)}, {"sinks": True}
    for count, changes in zip((132, 3, 2, 132), features):
        with few_processors(count):
            check(dataclasses.replace(base, **changes))


@GROUPS
@pytest.mark.parametrize("changes", [{"mask": "bool"}, {"mask": "float"}, {"dropout_p": 0.2}])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_divided_groups_with_features(dims, changes, heads):
    base = Case(
        B=1, Hq=heads[0], Hkv=heads[1], Sq=200, Sk=333, D=dims[0], Dv=dims[1],
        dtype=torch.float16, device="cuda", is_causal=True, alibi="heads",
    )  # fmt: skip
    for deterministic in (False, True):
        check(dataclasses.replace(base, deterministic=deterministic, **changes))


@GROUPS
def test_divided_groups_of_packed_sequences(heads):
    features = Case(
        Hq=heads[0], Hkv=heads[1], D=128, Dv=128, dtype=torch.bfloat16, device="cuda",
        is_causal=True,
    )  # fmt: skip
    for deterministic, alibi in itertools.product((False, True), (None, "batch_heads")):
        features = dataclasses.replace(features, deterministic=deterministic, alibi=alibi)
        check(PackedCase((700, 3, 129), (700, 3, 129), 0, features))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_gradients_of_divided_groups_are_bitwise_equal(D):
    q, k, v = (
        torch.randn(1, H, 3000, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for H in (8, 1, 1)
    )
    grad = torch.randn_like(q)
    options = {"is_causal": True, "deterministic": True, "backend": "hopper"}
    first, *others = (
        torch.autograd.grad(fa_ops.attention(q, k, v, **options), (q, k, v), grad) for _ in range(5)
    )
    for grads in others:
        assert all(map(torch.equal, grads, first))


@pytest.mark.parametrize("seed", range(192))
def test_dropout(seed):
    check(dropout_case(seed))


@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"window": (300, 100)}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_long_dropout(dims, changes):
    D, Dv = dims
    for deterministic in (False, True):
        case = Case(
            B=2, Hq=4, Hkv=2, Sq=1300, Sk=1100, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda",
            dropout_p=0.2, deterministic=deterministic, **changes,
        )  # fmt: skip
        check(case)


@pytest.mark.parametrize("seed", range(48))
def test_packed_dropout(seed):
    features = hopper_case(
        seed, dtype=torch.bfloat16, **FOR_PACKED, dropout_p=(0.1, 0.5)[seed % 2],
        deterministic=bool(seed // 8 % 2),
    )  # fmt: skip
    lengths = [(0, 5, 150, 33, 1), (700, 3, 129), (64, 64)][seed % 3]
    keys = [(4, 9, 70, 0, 47), (300, 900, 129), (64, 64)][seed % 3]
    check(PackedCase(lengths, keys, (0, 65)[seed // 16 % 2], features))


def one_hot(B, H, S, D, first, device="cuda"):
    """(B, H, S, D) zeros, with feature d of token first + d set to one."""
    x = torch.zeros(B, H, S, D, device=device, dtype=torch.bfloat16)
    d = torch.arange(min(D, S - first), device=device)
    x[:, :, first + d, d] = 1.0
    return x


@pytest.mark.parametrize("p", [0.1, 0.5, 0.875])
@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_every_kernel_drops_the_weights_of_keep_mask(D, p):
    """With scores of 0 and one-hot operands, every weight, or gradient of a score, is an element of
    a result, which is positive if the weight was kept."""
    B, H, Sq, Sk = 2, 3, 333, 400
    seed = torch.tensor([2**40 + D], device="cuda")
    heads, i, j = (torch.arange(n, device="cuda") for n in (B * H, Sq, Sk))
    kept = dropout.keep_mask(seed, heads.view(B, H, 1, 1), i.view(-1, 1), j, p)
    zeros = [torch.zeros(B, H, S, D, device="cuda", dtype=torch.bfloat16) for S in (Sq, Sk, Sk)]
    ones = torch.ones(B, H, Sq, D, device="cuda", dtype=torch.bfloat16)
    for deterministic in (False, True):
        options = {"dropout_p": p, "dropout_seed": seed, "deterministic": deterministic}

        def grads(q, k, v, grad_out, options=options):
            call = attention_call(q, k, v, **options)
            out, lse = hopper_calls.forward(call)
            return out, hopper_calls.backward(call._replace(saved=Saved(grad_out, None, out, lse)))

        zero_q, zero_k, zero_v = zeros
        for first in range(0, Sk, D):
            keys = one_hot(B, H, Sk, D, first)
            out, _ = grads(zero_q, zero_k, keys, ones)
            _, of_scores = grads(zero_q, keys, zero_v + 1, ones)
            expected = kept[..., first : first + D]
            for result in (out, of_scores.query):
                assert torch.equal(result[..., : expected.shape[-1]] > 0, expected)
        for first in range(0, Sq, D):
            queries = one_hot(B, H, Sq, D, first)
            _, of_values = grads(zero_q, zero_k, zero_v, queries)
            _, of_scores = grads(queries, zero_k, zero_v + 1, ones)
            expected = kept[..., first : first + D, :].mT
            for result in (of_values.value, of_scores.key):
                assert torch.equal(result[..., : expected.shape[-1]] > 0, expected)


def test_packed_dropout_drops_the_weights_of_keep_mask():
    H, D, p, lengths = 3, 64, 0.4, [70, 0, 200, 64, 1]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    seed = torch.tensor([99], device="cuda")
    T = sum(lengths)
    zeros = torch.zeros(T, H, D, device="cuda", dtype=torch.bfloat16)
    call = attention_call(
        zeros, zeros, zeros, dropout_p=p, dropout_seed=seed, cu_seqlens_q=ends, cu_seqlens_k=ends
    )
    slices = []
    for first in range(0, T, D):
        values = one_hot(1, H, T, D, first)[0].transpose(0, 1)
        slices.append(hopper_calls.varlen_forward(call._replace(value=values))[0] > 0)
    actual = torch.cat(slices, -1)  # (T, H, tokens)
    for b, (start, n) in enumerate(zip(ends.tolist(), lengths)):
        heads, tokens = torch.arange(H, device="cuda") + b * H, torch.arange(n, device="cuda")
        kept = dropout.keep_mask(seed, heads.view(-1, 1), tokens.view(-1, 1, 1), tokens, p)
        assert torch.equal(actual[start : start + n, :, start : start + n], kept)


@pytest.mark.parametrize(
    "sizes",
    [(2, 4, 2, 200, 300, 64), (1, 8, 2, 1024, 1024, 128), (2, 2, 2, 64, 640, 128),
     (1, 4, 4, 129, 513, 256)],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_words_of_rows_drop_what_the_seed_drops(sizes, causal):
    B, Hq, Hkv, Sq, Sk, D = sizes
    q, k, v = (
        torch.randn(B, h, s, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h, s in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk))
    )
    seed = torch.tensor([2**41 + 5], device="cuda")
    words, found = dropout.words_of(seed, B, Hq, Sq), []
    for given in (seed, words, words.mT.contiguous().mT):
        out, lse = torch.ops.fa.attention_with_lse(
            q, k, v, None, 0.3, causal, dropout_seed=given, backend="hopper", deterministic=True
        )
        total = out.float().sin().sum() + lse.sum()
        found.append((out, lse, *torch.autograd.grad(total, (q, k, v))))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_dropout_is_bitwise_equal(D):
    q, k, v = (
        torch.randn(2, h, 1500, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (8, 2, 2)
    )
    grad, results = torch.randn_like(q), []
    for _ in range(4):
        torch.manual_seed(7)
        out = fa_ops.attention(
            q, k, v, is_causal=True, dropout_p=0.1, deterministic=True, backend="hopper"
        )
        results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_cuda_graphs_replay_dropout_with_another_seed():
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    seed = torch.tensor([1], device="cuda")
    call = attention_call(q, k, v, dropout_p=0.5, dropout_seed=seed)
    hopper_calls.forward(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = hopper_calls.forward(call)
    seed.fill_(2)
    graph.replay()
    second = call.changed(dropout_seed=torch.tensor([2], device="cuda"))
    assert torch.equal(out, hopper_calls.forward(second)[0])
    assert not torch.equal(
        out,
        hopper_calls.forward(call.changed(dropout_seed=seed - 1))[0],
    )


# Head dimensions that are no multiple of 64, where products stop at the features that exist.

DIMS = (
    (40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (160, 160),  # of real models
    (8, 8), (24, 40), (48, 16), (88, 88), (104, 120), (80, 96), (96, 72), (112, 64), (144, 136),
    (160, 96), (176, 128), (200, 200), (224, 208), (240, 72),
)  # fmt: skip
MODEL_DIMS = DIMS[:6]


def case_of(seed, dims, **fixed):
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    return random_case(
        seed, **{"D": dims[0], "Dv": dims[1], "dtype": dtype, "device": "cuda"} | fixed
    )


@pytest.mark.parametrize("seed", range(20 * len(DIMS)))
def test_random_head_dims(seed):
    check(lengthened(case_of(seed // len(DIMS), DIMS[seed % len(DIMS)])))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_nothing_outside_the_tensors_is_written(dims):
    for seed in range(3):
        assert_right(case_of(seed + 500, dims), "hopper", Arena())


LENGTHS = pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 700), (129, 129), (300, 1000), (1300, 700), (64, 128)], ids=str
)


@LENGTHS
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"window": (100, 30)}], ids=str)
@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
def test_lengths_of_head_dims(dims, changes, deterministic, lengths):
    check(
        Case(
            B=2, Hq=4, Hkv=2, Sq=lengths[0], Sk=lengths[1], D=dims[0], Dv=dims[1],
            dtype=torch.bfloat16, device="cuda", deterministic=deterministic, **changes,
        )
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"kv_lens": True}, {"key_ranges": (1, 0, 1)}], ids=str)
@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
def test_few_processors_for_head_dims(dims, changes):
    """A CTA walks over several blocks of keys, and groups of query heads are divided or not."""
    base = Case(
        B=3, Hq=8, Hkv=1, Sq=333, Sk=430, D=dims[0], Dv=dims[1], dtype=torch.float16, device="cuda",
        is_causal=True, **changes,
    )  # fmt: skip
    for count in (1, 3, 132):
        with few_processors(count):
            check(base)
            check(dataclasses.replace(base, Hkv=8))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
def test_packed_head_dims(dims, is_causal):
    features = Case(
        Hq=6, Hkv=2, D=dims[0], Dv=dims[1], dtype=torch.bfloat16, device="cuda",
        is_causal=is_causal,
    )  # fmt: skip
    check(PackedCase((700, 3, 129), (700, 3, 129), 0, features))


@pytest.mark.parametrize("D", [40, 80, 96, 112, 160])
def test_features_that_do_not_exist_are_not_read(D):
    """The next head's features follow those of a row, and are NaN."""
    whole = torch.randn(3, 2, 300, 3, D, device="cuda", dtype=torch.bfloat16)
    whole[:, :, :, 1] = float("nan")
    q, k, v = (x[:, :, ::2].transpose(1, 2).requires_grad_() for x in whole)
    out = fa_ops.attention(q, k, v, is_causal=True, backend="hopper")
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("D", [40, 80, 112])
def test_every_number_of_query_blocks(D):
    """The consumers may compute dQ of every second block, and the last one alone."""
    for Sq in range(64, 64 * 8, 64):
        check(
            Case(
                B=1, Hq=3, Hkv=1, Sq=Sq, Sk=260, D=D, Dv=D, dtype=torch.bfloat16, device="cuda",
                is_causal=True,
            )
        )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(8, 8, 256, 160, 160), (1, 2, 64, 256, 256), (1, 1, 1000, 192, 128)], ids=str
)
def test_the_second_pass_reads_row_sums_of_the_same_call(shape, is_causal):
    """It starts while the first pass runs. Twice the gradient of the output has twice the row sums,
    and exactly twice the gradients."""
    B, H, S, D, Dv = shape
    q, k, v = (
        torch.randn(B, H, S, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for d in (D, D, Dv)
    )
    out = fa_ops.attention(q, k, v, is_causal=is_causal)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for i in range(20):
        factor = 2.0 ** (i % 3)
        freed = torch.full((1 << 22,), float("nan"), device="cuda")
        del freed  # what the next call's workspace holds at first
        found = torch.autograd.grad(out, (q, k, v), grad * factor, retain_graph=True)
        for x, y in zip(found, expected):
            assert torch.equal(x, y * factor)


# Short sequences of narrow heads on a Hopper GPU, whose tiles are small.


@pytest.mark.parametrize("seed", range(24))
def test_tiles_of_short_sequences(seed):
    """Several CTAs of a multiprocessor, each with queries of a head."""
    S, r = (50, 64, 77, 100, 128, 257)[seed % 6], random.Random(seed)
    case = Case(
        B=9, Hq=16, Hkv=16, Sq=S, Sk=r.choice((S, S, 33, 300)), D=(64, 40)[seed % 4 == 3],
        Dv=(64, 40)[seed % 4 == 3], dtype=(torch.bfloat16, torch.float16)[seed % 2], device="cuda",
        is_causal=r.random() < 0.5, softcap=r.choice((0.0, 0.0, 20.0)), sinks=r.random() < 0.3,
        kv_lens=r.random() < 0.3, layout=r.choice(("bhsd", "bshd")), seed=seed,
        poison=r.choice((None, "nan key", "inf value")), magnitude=r.choice((1.0, 30.0)),
    )  # fmt: skip
    with few_processors((132, 20)[seed % 2]):
        assert_right(case, "hopper", None)
