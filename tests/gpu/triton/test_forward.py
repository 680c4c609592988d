"""The Triton forward kernels on a GPU: cases against the oracle, large tensors, CUDA graphs."""

import dataclasses
import importlib
import warnings

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import launch
from fa_ops.call.options import Packing, Spec
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, random_case
from tests.kernels import DTYPES, assert_merges, assert_merges_into, relative_error

host = importlib.import_module("fa_ops.backends.triton.forward")


@pytest.fixture(autouse=True)
def nan_poisoned_outputs(monkeypatch):
    """Allocate outputs by torch.empty_strided, which is patched to fill them with NaN."""
    monkeypatch.setattr(launch, "_empty_strided_cuda", None)


def tensors(B=2, H=4, S=256, D=64, dtype=torch.bfloat16, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    shape = (B, H, S, D)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=g) for _ in range(3)]


@pytest.mark.parametrize("seed", range(2000, 2150))
def test_random(seed):
    case = random_case(seed, dtype=DTYPES[seed % 3], device="cuda")
    grown = dataclasses.replace(case, Sq=case.Sq * (1 + seed % 5), Sk=case.Sk * (1 + seed % 7))
    assert_close_to_oracle(grown, "triton", gradients=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims(dtype, D, causal):
    case = Case(D=D, Dv=D, Sq=300, Sk=400, dtype=dtype, is_causal=causal, device="cuda")
    assert_close_to_oracle(case, "triton", gradients=False)


@pytest.mark.parametrize("seed", range(24))
def test_packed(seed):
    features = random_case(seed, dtype=DTYPES[seed % 3], device="cuda", mask=None, key_ranges=None)
    case = PackedCase((5, 0, 517, 33, 260), (9, 4, 600, 0, 190), seed % 2 * 150, features)
    assert_close_to_oracle(case, "triton", gradients=False)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_long_sequences(D, causal):
    q, k, v = tensors(1, 3, 4096 + 7, D)
    out, lse = backend.forward(q, k, v, Spec(is_causal=causal))
    for h in range(3):
        one = (x[:, h : h + 1].double() for x in (q, k, v))
        expected, expected_lse = reference.dense(*one, Spec(is_causal=causal))
        assert relative_error(out[:, h : h + 1], expected) < 5e-3
        assert (lse[:, h : h + 1] - expected_lse).abs().max() < 1e-4


def test_more_programs_than_the_limit_of_a_grid_dimension():
    q, k, v = tensors(70000, 2, 3, 16)
    out, _ = backend.forward(q, k, v, Spec())
    expected, _ = reference.dense(*(x[-1:].double() for x in (q, k, v)), Spec())
    assert relative_error(out[-1:], expected) < 1e-2


def test_strides_beyond_32_bits():
    far = 1 << 24
    buffer = torch.randn(129 * far, device="cuda", dtype=torch.bfloat16)
    rows = buffer.as_strided((1, 1, 129, 64), (0, 0, far, 1))
    heads = buffer.as_strided((1, 2, 129, 64), (0, 1 << 31, 64, 1))
    for x in (rows, heads):
        out, _ = backend.forward(x, x, x, Spec(is_causal=True))
        dense = x.double()
        assert (
            relative_error(out, reference.dense(dense, dense, dense, Spec(is_causal=True))[0])
            < 1e-2
        )


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_unaligned_addresses(offset):
    q, k, v = (
        torch.cat([x.flatten()[:offset], x.flatten()])[offset:].view_as(x) for x in tensors()
    )
    out, _ = backend.forward(q, k, v, Spec())
    assert (
        relative_error(out, reference.dense(q.double(), k.double(), v.double(), Spec())[0]) < 1e-2
    )


def test_nan_outside_kv_lens_and_key_ranges_has_no_effect():
    q, k, v = tensors(2, 4, 700, 128)
    lens = torch.tensor([301, 650], dtype=torch.int32, device="cuda")
    for b, length in enumerate(lens.tolist()):
        k[b, :, length:] = float("nan")
        v[b, :, length:] = float("nan")
    ranges = torch.stack([torch.zeros_like(lens), lens], -1).view(2, 1, 1, 2)
    for spec in (Spec(kv_lens=lens), Spec(key_ranges=ranges), Spec(kv_lens=lens, softcap=5.0)):
        out, lse = backend.forward(q, k, v, spec)
        assert bool(out.isfinite().all() and lse.isfinite().all())


def test_tf32_is_used_only_if_torch_allows_it(monkeypatch):
    q, k, v = tensors(1, 2, 300, 64, torch.float32)
    expected, _ = reference.dense(q.double(), k.double(), v.double(), Spec())
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    exact = relative_error(backend.forward(q, k, v, Spec())[0], expected)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    fast = relative_error(backend.forward(q, k, v, Spec())[0], expected)
    assert exact < 1e-6 < 5e-5 < fast < 5e-3


def test_cuda_graphs_replay_with_new_inputs():
    q, k, v = tensors(2, 4, 500, 64)
    lens = torch.tensor([500, 20], dtype=torch.int32, device="cuda")
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]

    def run():
        dense = backend.forward(q, k, v, Spec(is_causal=True, kv_lens=lens))
        return *dense, *backend.varlen_forward(*tokens, Packing(ends, ends), Spec())

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for step in range(3):
        q.normal_()
        lens.random_(1, 500)
        ends[1:] = torch.tensor([50 + step, 480 - step])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


def test_concurrent_streams():
    problems = [tensors(1, 4, 300 + 50 * n, 64, seed=n) for n in range(2)]
    expected = [backend.forward(*p, Spec(is_causal=True)) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = [[] for _ in problems]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(backend.forward(*problems[n], Spec(is_causal=True)))
    torch.cuda.synchronize()
    for n, of_problem in enumerate(results):
        for result in of_problem:
            assert all(torch.equal(a, b) for a, b in zip(result, expected[n], strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_inputs_on_another_than_the_current_device():
    q, k, v = tensors()
    current, _ = backend.forward(q, k, v, Spec())
    other, _ = backend.forward(*(x.to("cuda:1") for x in (q, k, v)), Spec())
    assert torch.equal(current, other.to("cuda:0")) and other.device.index == 1


def test_other_lengths_and_scales_do_not_recompile():
    compiled = set()
    for length in (1, 40, 128, 1000, 4099):
        q, k, v = tensors(1, 2, length)
        backend.forward(q, k, v, Spec(is_causal=True, scale=1.0 / length))
        compiled.add(len(host._launches))
    assert len(compiled) == 1


def test_an_unknown_launch_convention_warns_and_works(monkeypatch):
    q, k, v = tensors()
    expected = backend.forward(q, k, v, Spec(is_causal=True))
    monkeypatch.setattr(host, "_launches", {})
    monkeypatch.setattr(launch, "_CONVENTION", ("self", "something", "else"))
    with pytest.warns(UserWarning, match="takes other parameters"):
        found = backend.forward(q, k, v, Spec(is_causal=True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.forward(q, k, v, Spec(is_causal=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states(dtype):
    outs = torch.randn(5, 2, 3, 777, 128, device="cuda").to(dtype)
    assert_merges(backend, outs, torch.randn(5, 2, 3, 777, device="cuda") * 4)


def test_states_are_merged_where_hopper_is_the_default():
    outs, lses = torch.randn(2, 4, 64, device="cuda").bfloat16(), torch.randn(2, 4, device="cuda")
    expected = fa_ops.merge_states(outs, lses)
    with fa_ops.use_backend("hopper"):
        found = fa_ops.merge_states(outs, lses)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("D", [128, 24, 5])
def test_merge_into(D):
    assert_merges_into(backend.plan, torch.bfloat16, "cuda", D)
    assert_merges_into(backend.plan, torch.bfloat16, "cuda", D, sum_dtype=torch.float32)
