"""The operators' contracts on a GPU: layouts, CUDA graphs, synchronisation, torch.compile."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.library import opcheck

import fa_ops
from fa_ops.ops import dense, merge, varlen
from fa_ops.testing import assert_close_to_oracle, make_case
from tests.ops.cases import CASES as SMALL
from tests.ops.cases import dense_call, packed_call, packed_case, saved_by


def on_gpu(case):
    return dataclasses.replace(case, device="cuda", D=16, Dv=16)


CASES = {name: on_gpu(case) for name, case in SMALL.items()}
PACKED = {name: case for name, case in CASES.items() if packed_case(name)}


def packed_on_gpu(name: str, requires_grad: bool = False):
    args, options = packed_call(PACKED[name], requires_grad)
    move = lambda x: x.cuda() if torch.is_tensor(x) else x  # noqa: E731
    return tuple(map(move, args)), {n: move(x) for n, x in options.items()}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    args, options = dense_call(CASES[name], requires_grad=True)
    opcheck(dense.WITH_LSE, args, options)
    detach = lambda x: x.detach() if torch.is_tensor(x) else x  # noqa: E731
    args, options = tuple(map(detach, args)), {n: detach(x) for n, x in options.items()}
    saved = saved_by(dense.WITH_LSE, args, options)
    opcheck(dense.BACKWARD, saved, options | {"mask_grad": CASES[name].mask_grad})


@pytest.mark.parametrize("name", PACKED)
def test_opcheck_varlen(name):
    args, options = packed_on_gpu(name)
    opcheck(varlen.VARLEN, args, options)
    opcheck(varlen.BACKWARD, saved_by(varlen.VARLEN, args, options), options)


def test_opcheck_merge():
    opcheck(merge.MERGE, (torch.randn(3, 2, 4, 5, 16).cuda(), torch.randn(3, 2, 4, 5).cuda()))


@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_error_budget(name):
    assert_close_to_oracle(CASES[name], "triton")


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_documented_layouts_and_alias_nothing(name):
    case = CASES[name]
    (q, k, v, *rest), options = dense_call(case)
    out, lse = dense.WITH_LSE(q, k, v, *rest, **options)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    assert not out._is_view()
    grads = dense.BACKWARD(out, lse.sin(), q, k, v, out, lse, *rest, **options)
    for grad, x in zip(grads, (q, k, v), strict=False):
        assert grad.stride() == torch.empty_like(x).stride()
    pointers = [t.data_ptr() for t in (q, k, v, out, lse, *grads) if t.numel()]
    assert len(set(pointers)) == len(pointers)


def dense_problem():
    shapes = [(2, 4, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64)]
    inputs = [torch.randn(s, device="cuda", dtype=torch.half, requires_grad=True) for s in shapes]
    lens = torch.tensor([100, 128], dtype=torch.int32, device="cuda")
    sinks = torch.randn(4, device="cuda")
    return inputs, lambda q, k, v: fa_ops.attention(
        q, k, v, is_causal=True, kv_lens=lens, sinks=sinks, window=(64, None)
    )


def packed_problem():
    shapes = [(200, 4, 64), (200, 2, 64), (200, 2, 64)]
    inputs = [torch.randn(s, device="cuda", dtype=torch.half, requires_grad=True) for s in shapes]
    ends = torch.tensor([0, 30, 150, 200], dtype=torch.int32, device="cuda")
    return inputs, lambda q, k, v: fa_ops.attention_varlen(q, k, v, ends, ends, is_causal=True)


def ranges_problem():
    inputs, _ = dense_problem()
    start = torch.arange(128, dtype=torch.int32, device="cuda").view(1, 1, 128, 1)
    ranges = torch.cat([(start - 32).clamp(min=0), start + 1], -1)
    return inputs, lambda q, k, v: fa_ops.attention(q, k, v, key_ranges=ranges)


PROBLEMS = [dense_problem, packed_problem, ranges_problem]


def forward_and_backward(function, inputs):
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_cuda_graphs(problem):
    """Forward and backward are captured in one CUDA graph, which is replayed on new inputs."""
    inputs, function = problem()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward_and_backward(function, inputs)  # compile before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(function, inputs)
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for actual, expected in zip(captured, forward_and_backward(function, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_calls_do_not_synchronise(problem):
    inputs, function = problem()
    forward_and_backward(function, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_backward(function, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_torch_compile(problem, mode):
    inputs, function = problem()
    expected = forward_and_backward(function, inputs)
    compiled = torch.compile(function, fullgraph=True, mode=mode)
    for _ in range(3):
        actual = forward_and_backward(compiled, inputs)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def test_autocast():
    inputs, function = dense_problem()
    inputs = [x.float() for x in inputs]
    with torch.autocast("cuda", torch.bfloat16):
        assert function(*inputs).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert function(*inputs).dtype == torch.float32


def test_backward_passes_inside_and_outside_an_autocast_region():
    """Autograd's thread is told of autocast's keys, not of its dtype."""
    inputs, function = dense_problem()
    inputs = [x.float().requires_grad_() for x in inputs]
    with torch.autocast("cuda", torch.bfloat16):
        out = function(*inputs)
        inside = torch.autograd.grad(out.float().square().sum(), inputs, retain_graph=True)
    outside = torch.autograd.grad(out.float().square().sum(), inputs)
    for x, y in zip(inside, outside, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_deterministic_backward():
    inputs, function = dense_problem()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (forward_and_backward(function, inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


def test_dropout_is_the_same_on_every_device():
    case = make_case(B=1, Hq=2, Hkv=1, Sq=33, Sk=40, D=16, Dv=16, dropout_p=0.4)
    (q, k, v, *rest), options = dense_call(case)
    expected = dense.ATTENTION(q, k, v, *rest, **options)
    args, options = dense_call(on_gpu(case))
    torch.testing.assert_close(
        dense.ATTENTION(*args, **options).cpu(), expected, rtol=1e-2, atol=1e-2
    )


def test_errors_across_devices():
    q = torch.randn(1, 2, 4, 16)
    gpu = q.cuda()
    with pytest.raises(ValueError, match="key is on cpu, but query is on cuda:0"):
        fa_ops.attention(gpu, q, q)
    with pytest.raises(ValueError, match="query is on cuda|key is on cuda:0, but query is on cpu"):
        fa_ops.attention(q, gpu, gpu)
    with pytest.raises(ValueError, match="attn_mask is on cpu"):
        fa_ops.attention(gpu, gpu, gpu, torch.zeros(4, 4))
    with pytest.raises(ValueError, match="kv_lens is on cpu"):
        fa_ops.attention(gpu, gpu, gpu, kv_lens=torch.ones(1, dtype=torch.int32))
    with pytest.raises(TypeError, match="float64, which is supported on CPU only"):
        fa_ops.attention(gpu.double(), gpu.double(), gpu.double())
    with pytest.raises(TypeError, match="attention takes it with q_scale"):
        fa_ops.attention(*[gpu.to(torch.float8_e4m3fn)] * 3)
    with pytest.raises(NotImplementedError, match="backend 'cpu' cannot run this call"):
        fa_ops.attention(gpu, gpu, gpu, backend="cpu")


def test_auto_selects_a_gpu_backend():
    q = torch.randn(1, 2, 4, 64, device="cuda", dtype=torch.half)
    assert fa_ops.explain(q, q, q).backend in ("hopper", "triton")
    assert fa_ops.explain(q.float(), q.float(), q.float()).backend == "triton"


@pytest.mark.parametrize("Sq, Sk", [(0, 4), (4, 0)])
def test_zero_sized(Sq, Sk):
    q = torch.randn(2, 2, Sq, 16, device="cuda", requires_grad=True)
    k = torch.randn(2, 2, Sk, 16, device="cuda", requires_grad=True)
    out = fa_ops.attention(q, k, k)
    assert out.shape == (2, 2, Sq, 16) and (out == 0).all()
    out.sum().backward()
    assert (q.grad == 0).all() and (k.grad == 0).all()
