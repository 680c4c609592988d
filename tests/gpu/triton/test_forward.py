"""The Triton forward kernels on a GPU: the oracle, large tensors, float32 in parts, short rows."""

import dataclasses
import importlib
import random
import warnings

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.backends import triton as backend
from fa_ops.backends.triton import configs, launch, matrix_products, short_rows
from fa_ops.call.call import Saved, attention_call
from fa_ops.testing import (
    Case,
    PackedCase,
    assert_close_to_oracle,
    assert_right,
    make_case,
    random_case,
)
from fa_ops.testing.inputs import GRAD_LAYOUTS, LAYOUTS
from tests.kernels import DTYPES, assert_merges, assert_merges_into, relative_error

host = importlib.import_module("fa_ops.backends.triton.forward")


@pytest.fixture
def nan_poisoned_outputs(monkeypatch):
    """Allocate outputs by torch.empty_strided, which is patched to fill them with NaN."""
    monkeypatch.setattr(launch, "_empty_strided_cuda", None)


def tensors(B=2, H=4, S=256, D=64, dtype=torch.bfloat16, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    shape = (B, H, S, D)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=g) for _ in range(3)]


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.parametrize("seed", range(2000, 2150))
def test_random(seed):
    case = random_case(seed, dtype=DTYPES[seed % 3], device="cuda")
    grown = dataclasses.replace(case, Sq=case.Sq * (1 + seed % 5), Sk=case.Sk * (1 + seed % 7))
    assert_close_to_oracle(grown, "triton", gradients=False)


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims(dtype, D, causal):
    case = Case(D=D, Dv=D, Sq=300, Sk=400, dtype=dtype, is_causal=causal, device="cuda")
    assert_close_to_oracle(case, "triton", gradients=False)


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.parametrize("seed", range(24))
def test_packed(seed):
    features = random_case(seed, dtype=DTYPES[seed % 3], device="cuda", mask=None, key_ranges=None)
    case = PackedCase((5, 0, 517, 33, 260), (9, 4, 600, 0, 190), seed % 2 * 150, features)
    assert_close_to_oracle(case, "triton", gradients=False)


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_long_sequences(D, causal):
    q, k, v = tensors(1, 3, 4096 + 7, D)
    out, lse = backend.forward(attention_call(q, k, v, is_causal=causal))
    for h in range(3):
        one = (x[:, h : h + 1].double() for x in (q, k, v))
        expected, expected_lse = reference.dense(attention_call(*one, is_causal=causal))
        assert relative_error(out[:, h : h + 1], expected) < 5e-3
        assert (lse[:, h : h + 1] - expected_lse).abs().max() < 1e-4


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_more_programs_than_the_limit_of_a_grid_dimension():
    q, k, v = tensors(70000, 2, 3, 16)
    out, _ = backend.forward(attention_call(q, k, v))
    expected, _ = reference.dense(attention_call(*(x[-1:].double() for x in (q, k, v))))
    assert relative_error(out[-1:], expected) < 1e-2


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_strides_beyond_32_bits():
    far = 1 << 24
    buffer = torch.randn(129 * far, device="cuda", dtype=torch.bfloat16)
    rows = buffer.as_strided((1, 1, 129, 64), (0, 0, far, 1))
    heads = buffer.as_strided((1, 2, 129, 64), (0, 1 << 31, 64, 1))
    for x in (rows, heads):
        out, _ = backend.forward(attention_call(x, x, x, is_causal=True))
        dense = x.double()
        assert (
            relative_error(
                out, reference.dense(attention_call(dense, dense, dense, is_causal=True))[0]
            )
            < 1e-2
        )


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_unaligned_addresses(offset):
    q, k, v = (
        torch.cat([x.flatten()[:offset], x.flatten()])[offset:].view_as(x) for x in tensors()
    )
    out, _ = backend.forward(attention_call(q, k, v))
    assert (
        relative_error(out, reference.dense(attention_call(q.double(), k.double(), v.double()))[0])
        < 1e-2
    )


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_nan_outside_kv_lens_and_key_ranges_has_no_effect():
    q, k, v = tensors(2, 4, 700, 128)
    lens = torch.tensor([301, 650], dtype=torch.int32, device="cuda")
    for b, length in enumerate(lens.tolist()):
        k[b, :, length:] = float("nan")
        v[b, :, length:] = float("nan")
    ranges = torch.stack([torch.zeros_like(lens), lens], -1).view(2, 1, 1, 2)
    for options in ({"kv_lens": lens}, {"key_ranges": ranges}, {"kv_lens": lens, "softcap": 5.0}):
        out, lse = backend.forward(attention_call(q, k, v, **options))
        assert bool(out.isfinite().all() and lse.isfinite().all())


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_tf32_is_used_only_if_torch_allows_it(monkeypatch):
    q, k, v = tensors(1, 2, 300, 64, torch.float32)
    expected, _ = reference.dense(attention_call(q.double(), k.double(), v.double()))
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    exact = relative_error(backend.forward(attention_call(q, k, v))[0], expected)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    fast = relative_error(backend.forward(attention_call(q, k, v))[0], expected)
    assert exact < 1e-6 < 5e-5 < fast < 5e-3


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_cuda_graphs_replay_with_new_inputs():
    q, k, v = tensors(2, 4, 500, 64)
    lens = torch.tensor([500, 20], dtype=torch.int32, device="cuda")
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]

    def run():
        dense = backend.forward(attention_call(q, k, v, is_causal=True, kv_lens=lens))
        return *dense, *backend.varlen_forward(
            attention_call(*tokens, cu_seqlens_q=ends, cu_seqlens_k=ends)
        )

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


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_concurrent_streams():
    problems = [tensors(1, 4, 300 + 50 * n, 64, seed=n) for n in range(2)]
    expected = [backend.forward(attention_call(*p, is_causal=True)) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = [[] for _ in problems]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(backend.forward(attention_call(*problems[n], is_causal=True)))
    torch.cuda.synchronize()
    for n, of_problem in enumerate(results):
        for result in of_problem:
            assert all(torch.equal(a, b) for a, b in zip(result, expected[n], strict=True))


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_inputs_on_another_than_the_current_device():
    q, k, v = tensors()
    current, _ = backend.forward(attention_call(q, k, v))
    other, _ = backend.forward(attention_call(*(x.to("cuda:1") for x in (q, k, v))))
    assert torch.equal(current, other.to("cuda:0")) and other.device.index == 1


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_other_lengths_and_scales_do_not_recompile():
    compiled = set()
    for length in (1, 40, 128, 1000, 4099):
        q, k, v = tensors(1, 2, length)
        backend.forward(attention_call(q, k, v, is_causal=True, scale=1.0 / length))
        compiled.add(len(host._launches))
    assert len(compiled) == 1


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_an_unknown_launch_convention_warns_and_works(monkeypatch):
    q, k, v = tensors()
    expected = backend.forward(attention_call(q, k, v, is_causal=True))
    monkeypatch.setattr(host, "_launches", {})
    monkeypatch.setattr(launch, "_CONVENTION", ("self", "something", "else"))
    with pytest.warns(UserWarning, match="takes other parameters"):
        found = backend.forward(attention_call(q, k, v, is_causal=True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.forward(attention_call(q, k, v, is_causal=True))


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states(dtype):
    outs = torch.randn(5, 2, 3, 777, 128, device="cuda").to(dtype)
    assert_merges(backend, outs, torch.randn(5, 2, 3, 777, device="cuda") * 4)


@pytest.mark.usefixtures("nan_poisoned_outputs")
def test_states_are_merged_where_hopper_is_the_default():
    outs, lses = torch.randn(2, 4, 64, device="cuda").bfloat16(), torch.randn(2, 4, device="cuda")
    expected = fa_ops.merge_states(outs, lses)
    with fa_ops.use_backend("hopper"):
        found = fa_ops.merge_states(outs, lses)
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("nan_poisoned_outputs")
@pytest.mark.parametrize("D", [128, 24, 5])
def test_merge_into(D):
    assert_merges_into(backend, torch.bfloat16, "cuda", D)
    assert_merges_into(backend, torch.bfloat16, "cuda", D, sum_dtype=torch.float32)


# Triton kernels on a GPU with float32 in parts, which only large calls take by themselves.

DIMS = [(16, 16), (32, 32), (40, 24), (64, 64), (128, 128), (72, 128)]


@pytest.fixture(params=["split", "loaded"])
def in_parts(monkeypatch, request):
    """Calls of every size are computed in parts on GPUs that have such kernels."""
    monkeypatch.setattr(configs, "float32_products", lambda *call: request.param)


@pytest.mark.parametrize("seed", range(40))
def test_random_float32(seed, in_parts):
    D, Dv = DIMS[seed % len(DIMS)]
    case = random_case(seed, D=D, Dv=Dv, dtype=torch.float32, device="cuda")
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [(256, 384), (257, 390)], ids=["whole blocks", "ragged"])
def test_head_dims_of_float32(dims, causal, S, in_parts):
    D, Dv = dims
    case = Case(D=D, Dv=Dv, Sq=S[0], Sk=S[1], dtype=torch.float32, is_causal=causal, device="cuda")
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("seed", range(12))
def test_packed_float32(seed, in_parts):
    D, Dv = DIMS[seed % len(DIMS)]
    features = random_case(
        seed, D=D, Dv=Dv, dtype=torch.float32, device="cuda", mask=None, key_ranges=None
    )
    case = PackedCase((5, 0, 317, 33, 60), (9, 4, 300, 0, 90), seed % 2 * 7, features)
    assert_close_to_oracle(case, "triton")


@pytest.mark.parametrize("D", [32, 64, 128])
def test_large_calls_take_parts_and_are_exact(D):
    q, k, v, grad = (torch.randn(1, 4, 2048, D, device="cuda") for _ in range(4))
    mode = matrix_products.products(q, 4 * 2048 * 2048, D, D, 0.0)
    assert (mode == "split") == matrix_products.has_fast_parts(launch.architecture(q.device))
    call = attention_call(q, k, v, is_causal=True)
    out, lse = backend.forward(call)
    grads = backend.backward(call._replace(saved=Saved(grad, None, out, lse)))[:3]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = reference.dense(attention_call(*leaves, is_causal=True))
    exact = torch.autograd.grad(expected, leaves, grad.double())
    for found, wanted in zip((out, *grads), (expected.detach(), *exact), strict=True):
        assert relative_error(found, wanted) < 2e-6


def test_nan_reaches_only_rows_that_attend_it(in_parts):
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda") for _ in range(3))
    expected = backend.forward(attention_call(q, k, v, is_causal=True))[0]
    k[:, :, 200], v[:, :, 210] = float("nan"), float("inf")
    out = backend.forward(attention_call(q, k, v, is_causal=True))[0]
    torch.testing.assert_close(out[:, :, :200], expected[:, :, :200], atol=2e-6, rtol=0.0)
    assert bool(out[:, :, 200:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 192])
def test_keys_far_below_a_sink_have_no_weight(D, dtype, in_parts):
    """Products that exceed a rounded maximum by more than 128 have infinite weights."""
    q = torch.randn(1, 2, 40, D, device="cuda").mul(100).round().to(dtype)
    k = torch.randn(1, 2, 70, D, device="cuda").abs().mul(100).round().to(dtype)
    q, v = -q.abs(), torch.randn_like(k)
    sinks = torch.tensor([0.5, -3.0], device="cuda")
    out, lse = backend.forward(attention_call(q, k, v, sinks=sinks, scale=1e5 / 3))
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand_as(lse))


# Short rows with a bias on a GPU: the oracle, repeated gradients, the choice of a backend.

HALF = (torch.bfloat16, torch.float16)
# few classes of kernels, as each is compiled: (D, Dv, mask_shape)
KINDS = [
    (32, 32, (0, 1, 1, 1)),
    (32, 32, (1, 1, 1, 1)),
    (24, 40, (0, 0, 1, 1)),
    (64, 64, (0, 1, 1, 1)),
]


def windows(number: int, **fields):
    """Windows of one of `KINDS`, by number."""
    seed = fields.get("seed", number)
    r = random.Random(seed)
    D, Dv, shape = KINDS[number % 4]
    H = r.choice((1, 3, 8))
    drawn = {
        "B": r.choice((1, 17, 130)), "Hq": H, "Hkv": H, "Sq": r.choice((1, 33, 49, 64)),
        "Sk": r.choice((1, 35, 49, 64)), "D": D, "Dv": Dv, "mask": "float", "mask_shape": shape,
        "mask_grad": r.random() < 0.8, "mask_holes": r.random() < 0.4,
        "layout": r.choice(LAYOUTS), "grad_layout": r.choice(GRAD_LAYOUTS),
        "lse_grad": r.random() < 0.5, "dtype": HALF[number // 4 % 2],
        "seed": seed, "device": "cuda",
    }  # fmt: skip
    return make_case(**(drawn | fields))


@pytest.mark.parametrize("seed", range(32))
def test_windows(seed, monkeypatch):
    if seed // 8 % 2:  # several windows for each program
        monkeypatch.setattr(short_rows, "multiprocessors", lambda device: 3)
    assert_right(windows(seed), "triton", None, repeated=seed % 4 == 0)


@pytest.mark.parametrize("seed", range(16))
def test_numbers_that_are_not_finite(seed):
    number = ("nan", "inf", "-inf")[seed % 3]
    operand = ("query", "key", "value", "grad_out", "attn_mask")[seed % 5]
    case = windows(seed // 4 * 4, Sq=33, Sk=49, mask_holes=True, poison=f"{number} {operand}")
    assert_right(case, "triton", None, repeated=False)


@pytest.mark.parametrize("seed", range(12))
def test_long_rows(seed):
    r = random.Random(seed)
    D = (32, 64)[seed % 2]
    case = windows(
        0, B=r.choice((1, 20)), Hq=6, Hkv=(6, 2)[seed // 2 % 2], Sq=r.choice((65, 100, 128)),
        Sk=r.choice((65, 100, 128)), D=D, Dv=D, seed=seed,
        mask_shape=((0, 1, 1, 1), (1, 1, 1, 1))[seed // 6],
    )  # fmt: skip
    assert_close_to_oracle(case, "triton", gradients=seed < 3)


def swin(B=64, S=49, requires_grad=True):
    q, k, v = torch.randn(3, B, S, 8, 32, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    bias = torch.randn(1, 8, S, S, device="cuda", dtype=torch.bfloat16)
    return [x.requires_grad_(requires_grad) for x in (q, k, v, bias)]


def test_hopper_leaves_them_to_triton():
    q, k, v, bias = swin(requires_grad=False)
    explained = fa_ops.explain(q, k, v, attn_mask=bias)
    assert (explained.backend, explained.kernel) == ("triton", "forward of short rows")
    named = fa_ops.explain(q, k, v, attn_mask=bias, backend="hopper")
    assert named.backend in ("hopper", None)


def test_gradients_repeat_bitwise():
    q, k, v, bias = swin(2048)
    out = fa_ops.attention(q, k, v, bias)
    grads = [
        torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out), retain_graph=True)
        for _ in range(3)
    ]
    assert all(torch.equal(a, b) for more in grads[1:] for a, b in zip(grads[0], more))


def test_cuda_graphs():
    q, k, v, bias = swin(300, requires_grad=False)
    expected = fa_ops.attention(q, k, v, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fa_ops.attention(q, k, v, bias)
    captured.zero_()
    graph.replay()
    assert torch.equal(expected, captured)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_training(dtype):
    q, k, v, bias = swin(40)
    bias = bias.detach().to(dtype).requires_grad_()
    call = lambda: fa_ops.attention(q, k, v, bias)  # noqa: E731
    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        out = function()
        results.append((out, *torch.autograd.grad(out.float().sin().sum(), (q, k, v, bias))))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(eager, compiled, atol=1e-2, rtol=1e-2)
