"""The Triton backward kernels on a GPU: cases against the oracle, memory, CUDA graphs."""

import dataclasses

import pytest
import torch

from fa_ops.backends import triton as backend
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, random_case
from tests.kernels import DTYPES


@pytest.mark.parametrize("seed", range(150))
def test_random(seed):
    case = random_case(seed, dtype=DTYPES[seed % 3], device="cuda")
    grown = dataclasses.replace(case, Sq=case.Sq * (1 + seed % 5), Sk=case.Sk * (1 + seed % 7))
    assert_close_to_oracle(grown, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [(256, 384), (257, 390)], ids=["whole blocks", "ragged"])
def test_head_dims(dtype, dims, causal, S):
    case = Case(
        D=dims[0], Dv=dims[1], Sq=S[0], Sk=S[1], dtype=dtype, is_causal=causal, device="cuda"
    )
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("seed", range(12))
def test_packed(seed):
    features = random_case(seed, dtype=DTYPES[seed % 3], device="cuda", D=64, Dv=64)
    features = dataclasses.replace(features, mask=None, mask_grad=False, key_ranges=None)
    case = PackedCase((5, 0, 517, 33, 260), (9, 4, 600, 0, 190), seed % 2 * 7, features)
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_repeated_gradients_are_bitwise_equal(seed):
    case = random_case(seed, dtype=DTYPES[seed % 3], device="cuda", Sq=300, Sk=700)
    call = case.fresh()
    out, lse = backend.forward(call)
    grad_out, grad_lse = case.grad_outputs(out, lse)
    saved = Saved(grad_out, grad_lse, out, lse, case.mask == "float")
    first, second = (backend.backward(call._replace(saved=saved)) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second))


def compare_in_chunks(grads, grad_out, q, k, v, causal):
    """Compare gradients with a dense computation in fp64, one head at a time."""
    for h in range(q.shape[1]):
        leaves = [x[:, h : h + 1].double().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out = scores.softmax(-1) @ leaves[2]
        expected = torch.autograd.grad(out, leaves, grad_out[:, h : h + 1].double())
        for actual, right in zip(grads, expected):
            error = (actual[:, h : h + 1].double() - right).norm() / right.norm()
            assert error < 1e-2, f"head {h}: relative error {error:.2e}"


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_large(D, causal):
    q, k, v, grad_out = (
        torch.randn(1, 2, 4096, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    call = attention_call(q, k, v, is_causal=causal)
    out, lse = backend.forward(call)
    grads = backend.backward(call._replace(saved=Saved(grad_out, None, out, lse)))
    compare_in_chunks(grads[:3], grad_out, q, k, v, causal)


def test_offsets_beyond_32_bits():
    """Rows are 2**20 elements apart, so that offsets within a head need 64 bits."""
    S, stride = 2304, 1 << 20
    buffer = torch.zeros(S * stride, device="cuda", dtype=torch.bfloat16)
    tensors = []
    for n in range(4):
        x = buffer.as_strided((1, 1, S, 64), (0, 0, stride, 1), n * 64)
        tensors.append(x.copy_(torch.randn(1, 1, S, 64)))
    q, k, v, grad_out = tensors
    out, lse = backend.forward(attention_call(q, k, v))
    grads = backend.backward(attention_call(q, k, v, saved=Saved(grad_out, None, out, lse)))
    compare_in_chunks(grads[:3], grad_out, q, k, v, causal=False)


def test_memory_is_linear_in_the_length():
    peaks = []
    for S in (4096, 8192):
        q, k, v, grad_out = (
            torch.randn(1, 4, S, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        out, lse = backend.forward(attention_call(q, k, v))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backend.backward(attention_call(q, k, v, saved=Saved(grad_out, None, out, lse)))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.1 * peaks[0]


def test_cuda_graphs():
    q, k, v, grad_out = (
        torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    call = attention_call(q, k, v, is_causal=True)
    out, lse = backend.forward(call)
    expected = backend.backward(call._replace(saved=Saved(grad_out, None, out, lse)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.backward(call._replace(saved=Saved(grad_out, None, out, lse)))
    for x in captured[:3]:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected[:3], captured[:3]))
