"""Code that resembles something else: each case keeps its numbers, fused or not."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import compile_passes
from tests.compile_passes.cases import D, S, triangle
from tests.compile_passes.helpers import assert_same, check, fuse, qkv

INF = float("inf")


def product_into_a_buffer(q, k, v):
    buffer = q.new_zeros(2, 4, S, S)
    return torch.matmul(q, k.mT, out=buffer).softmax(-1) @ v, buffer + 1


def scores_into_a_buffer(q, k, v):
    buffer = q.new_zeros(2, 4, S, S)
    return torch.mul(q @ k.mT, 0.5, out=buffer).softmax(-1) @ v, buffer + 1


def weights_into_a_buffer(q, k, v):
    buffer = q.new_zeros(2, 4, S, S)
    return torch.softmax(q @ k.mT, -1, out=buffer) @ v, buffer + 1


def result_into_a_buffer(q, k, v):
    buffer = q.new_zeros(2, 4, S, D)
    torch.matmul((q @ k.mT).softmax(-1), v, out=buffer)
    return buffer * 2


def product_added_to_a_buffer(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    buffer = q.new_zeros(8, S, S)
    return buffer.baddbmm_(q, k.mT).softmax(-1) @ v, buffer + 1


@pytest.mark.parametrize(
    "function",
    [
        product_into_a_buffer,
        scores_into_a_buffer,
        weights_into_a_buffer,
        result_into_a_buffer,
        product_added_to_a_buffer,
    ],
    ids=lambda f: f.__name__,
)
def test_writes_to_out_buffers_are_kept(function):
    fusion = fuse(function)
    assert_same(function, qkv(), fusion, train=False)
    assert fusion.fused == 0


def shift_that_varies_along_the_keys(q, k, v, bias):
    scores = q @ k.mT
    weights = (scores - torch.maximum(scores.amax(-1, keepdim=True), bias)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def shift_clamped_along_the_keys(q, k, v, bias):
    scores = q @ k.mT
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=bias)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize(
    "function", [shift_that_varies_along_the_keys, shift_clamped_along_the_keys]
)
def test_shifts_that_vary_along_the_keys_are_refused(function):
    fusion = fuse(function)
    assert_same(function, (*qkv(), torch.randn(S, S)), fusion)
    assert fusion.fused == 0
    check(function, (*qkv(), torch.randn(S, 1)))


def shift_of_each_key(q, k, v):
    scores = q @ k.mT
    weights = (scores - scores.amax(-2, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def shift_of_each_key_before_a_softmax(q, k, v):
    scores = q @ k.mT
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v


def shift_of_each_key_divided_after_the_value(q, k, v):
    scores = q @ k.mT
    weights = (scores - scores.amax(-2, keepdim=True)).exp()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def shift_of_each_key_and_a_sum(q, k, v):
    scores = q @ k.mT
    scores = scores - scores.amax(-2, keepdim=True)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def shift_without_the_sink(q, k, v):
    scores = q @ k.mT
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.cat([scores, scores.new_ones(2, 4, S, 1)], -1).softmax(-1)[..., :-1] @ v


SHIFTS = (
    shift_of_each_key, shift_of_each_key_before_a_softmax, shift_of_each_key_divided_after_the_value,
    shift_of_each_key_and_a_sum, shift_without_the_sink,
)  # fmt: skip


@pytest.mark.parametrize("function", SHIFTS, ids=lambda f: f.__name__)
def test_shifts_over_another_dimension_are_refused(function):
    fusion = fuse(function)
    assert_same(function, qkv(), fusion)
    assert fusion.fused == 0


def test_views_in_another_dtype_keep_their_values():
    def attend(q, k, v):
        q, k = (x.view(torch.float16) for x in (q, k))
        return (q @ k.mT).softmax(-1) @ v.to(torch.float16)

    inputs = qkv(torch.bfloat16)
    fusion = fuse(attend)
    torch.testing.assert_close(fusion.run(*inputs), attend(*inputs), rtol=0, atol=0.02)


def arange_with_an_end(i, j):
    return torch.arange(1, end=S + 1)[:, None] >= j


def arange_with_a_step(i, j):
    return torch.arange(0, 2 * S, step=2)[:, None] >= j


def bytes_compared_with_minus_one(i, j):
    return (torch.ones(S, S, dtype=torch.uint8).tril() - 1) >= 0


def bits_of_a_float(i, j):
    return torch.ones(S, S).tril().view(torch.int32) > 1


def negated_bytes(i, j):
    return -torch.ones(S, S, dtype=torch.uint8).tril() >= 0


MASKS = (
    arange_with_an_end, arange_with_a_step, bytes_compared_with_minus_one, bits_of_a_float,
    negated_bytes,
)  # fmt: skip


@pytest.mark.parametrize("keep", MASKS, ids=lambda f: f.__name__)
def test_masks_match_torch(keep):
    def attend(q, k, v):
        i = torch.arange(S)
        return (q @ k.mT).masked_fill(~keep(i[:, None], i), -INF).softmax(-1) @ v

    check(attend, qkv())


def test_rounded_positions_match_torch():
    def attend(q, k, v):
        i = torch.arange(q.shape[2], dtype=torch.bfloat16)
        return (q @ k.mT).masked_fill(i > i[:, None], -INF).softmax(-1) @ v

    check(attend, qkv(Hq=2, Hkv=2, Sq=300, Sk=300))


def added_copy(q, k, v, mask):
    return (q @ k.mT + torch.zeros(S, S).copy_(mask)).softmax(-1) @ v


def filled_copy(q, k, v, mask):
    keep = triangle().copy_(mask > -1)
    return (q @ k.mT).masked_fill(~keep, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("function", [added_copy, filled_copy])
def test_masks_filled_by_copy_match_eager(function):
    check(function, (*qkv(), torch.randn(S, S)))


def two_fills(q, k, v, mask):
    low = torch.finfo(q.dtype).min
    scores = (q @ k.mT).masked_fill(mask < 0, -1e30).masked_fill(mask > 1, low)
    return scores.softmax(-1) @ v


def fill_before_a_mask(q, k, v, mask):
    scores = (q @ k.mT).masked_fill(mask > 1, torch.finfo(q.dtype).min)
    return (scores + torch.where(triangle(), 0.0, -INF)).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fills_at_the_limit_of_the_dtype_match_eager(dtype):
    inputs = (*qkv(dtype), torch.randn(2, 1, 1, S).clamp(max=0.9))
    inputs[3][:, ..., 5:] = 2.0
    fusion = fuse(fill_before_a_mask)
    assert_same(fill_before_a_mask, inputs, fusion, train=False)
    assert fusion.fused == 1


def test_fills_that_overflow_are_infinite():
    def attend(q, k, v, mask):
        scores = (q @ k.mT).masked_fill(mask > 1, torch.finfo(q.dtype).min) * 2.0
        return scores.masked_fill(mask < -1, -1e9).softmax(-1) @ v

    check(attend, (*qkv(), torch.randn(2, 1, 1, S)))


@pytest.mark.parametrize("dtype, default", [("float64", "float32"), ("float32", "float16")])
def test_fills_have_the_dtype_of_the_scores(dtype, default):
    inputs = (*qkv(getattr(torch, dtype)), torch.randn(2, 1, 1, S))
    inputs[3][1] = -1.0  # rows without keys
    torch.set_default_dtype(getattr(torch, default))
    try:
        check(two_fills, inputs)
    finally:
        torch.set_default_dtype(torch.float32)


def test_symbolic_numbers_after_a_fill_are_refused():
    def attend(q, k, v, shift):
        scores = (
            (q @ k.mT).masked_fill(~triangle(), -1e9).masked_fill(k[:, :, None, :, 0] > 2, -2e9)
        )
        return (scores + shift).softmax(-1) @ v

    fusion = fuse(attend, dynamic=True)
    assert_same(attend, (*qkv(), 1.5), fusion)
    assert not fusion.fused and "symbolic number" in fusion.reasons[0]


@pytest.mark.parametrize("times", [1, 2])
def test_inverted_integer_masks_are_bool(times):
    def attend(q, k, v, mask):
        for _ in range(times):
            mask = torch.logical_not(mask)
        return (q @ k.mT).masked_fill(mask, -INF).softmax(-1) @ v

    check(attend, (*qkv(), torch.tensor([0] * 4 + [2] * 8)))


def moved_key(q, k, v, mask):
    return (q @ k.mT.to(q.device)).softmax(-1) @ v.mT.to(q.device).mT


def moved_mask(q, k, v, mask):
    k, v = k.to(q.device), v.to(q.device)
    return (q @ k.mT + mask.mT.to(q.device)).softmax(-1) @ v


def mask_of_lengths_elsewhere(q, k, v, mask):
    k, v = k.to(q.device), v.to(q.device)
    short = (torch.arange(S) < mask[:1, :1].to(torch.int32)).to(q.device)
    return (q @ k.mT).masked_fill(short.logical_not(), -INF).softmax(-1) @ v


@pytest.mark.parametrize(
    "function", [moved_key, moved_mask, mask_of_lengths_elsewhere], ids=lambda f: f.__name__
)
def test_tensors_moved_to_the_gpu_are_read_there(function):
    with FakeTensorMode():
        devices = ("cuda", "cpu", "cpu")
        inputs = [torch.empty(2, S, D, device=d, dtype=torch.bfloat16) for d in devices]
        graph = make_fx(function)(*inputs, torch.empty(S, S, dtype=torch.bfloat16))
    (finding,) = compile_passes.fuse_module(graph)
    assert finding.fused, finding
    (call,) = (n for n in graph.graph.nodes if "fa.attention" in str(n.target))
    tensors = [n.meta["val"] for n in call.all_input_nodes]
    assert {t.device.type for t in tensors if isinstance(t, torch.Tensor)} == {"cuda"}
