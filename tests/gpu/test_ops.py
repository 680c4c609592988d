"""The operators' contracts on a GPU: layouts, CUDA graphs, torch.compile, lists of masks, sinks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.library import opcheck

import fa_ops
from fa_ops.backends import mask_blocks
from fa_ops.ops import dense, merge, varlen
from fa_ops.testing import assert_close_to_oracle, make_case
from tests import infinite_sinks
from tests.ops.cases import CASES as SMALL
from tests.ops.cases import dense_call, packed_call, packed_case, saved_by
from tests.ops.test_varlen_pages import OPTIONS, drawn


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


# `mask_blocks` on a GPU: lists, results of the kernels that skip by them, and CUDA graphs.


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 129, 257), (1, 2, 1, 400), (2, 1, 300, 1), (1, 1, 3000, 3000), (3, 1, 1, 9000)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_lists(shape, dtype, transposed):
    mask = torch.rand(shape, device="cuda") > 0.5
    mask[..., 128:300] = False
    mask[:, :, 128:, :128] = True
    if dtype != torch.bool:
        mask = torch.zeros(shape, device="cuda", dtype=dtype).masked_fill(~mask, -torch.inf)
        mask[..., 0] = torch.nan
    mask = mask.mT.contiguous() if transposed else mask
    mask = mask.mT if transposed else mask
    assert torch.equal(fa_ops.mask_blocks(mask), mask_blocks.mask_blocks(mask))


LONG = {"Sq": 300, "Sk": 400, "D": 64, "Dv": 64, "device": "cuda", "mask_blocks": True}
FEATURES = {
    "bool": {"mask": "bool"},
    "bool, queries share": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "float of heads": {"mask": "float", "mask_holes": True, "D": 128, "Dv": 128},
    "float of batches": {"mask": "float", "mask_shape": (1, 0, 1, 1), "deterministic": True},
    "float, queries share": {"mask": "float", "mask_shape": (1, 1, 0, 1), "mask_holes": True},
    "float, keys share": {"mask": "float", "mask_shape": (0, 1, 1, 0), "mask_holes": True},
    "gradient of the mask": {"mask": "float", "mask_shape": (0, 0, 1, 1), "mask_grad": True},
    "causal and lengths": {"mask": "float", "is_causal": True, "kv_lens": True},
    "ranges": {"mask": "float", "key_ranges": (1, 0, 1), "sinks": True},
    "whole tiles": {"mask": "float", "Sq": 512, "Sk": 256, "mask_holes": True},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_attention(feature, seed, backend):
    case = make_case(**LONG | FEATURES[feature], dtype=torch.bfloat16, seed=seed)
    assert_close_to_oracle(case, backend)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_captured_graph_reads_the_mask_again(backend):
    call = make_case(
        Sq=300, Sk=300, D=64, Dv=64, mask="float", mask_shape=(0, 0, 1, 1), mask_holes=True,
        device="cuda", dtype=torch.bfloat16,
    ).fresh()  # fmt: skip
    q, k, v = call[:3]
    mask = call.operands.attn_mask

    def run():
        blocks = fa_ops.mask_blocks(mask)
        return fa_ops.attention(q, k, v, mask, mask_blocks=blocks, backend=backend)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for start in (0, 128):
        mask.fill_(-torch.inf)[..., start : start + 128] = 0.0
        graph.replay()
        torch.testing.assert_close(out, fa_ops.attention(q, k, v, mask), atol=2e-2, rtol=2e-2)


# Sinks of +inf and NaN on a GPU.

BACKENDS = ("triton", "hopper")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", infinite_sinks.CALLS)
def test_infinite_sinks_leave_no_weight_to_keys(name, backend):
    infinite_sinks.check_results(name, backend, "cuda", torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", infinite_sinks.WITH_GRADIENTS)
def test_their_gradients_are_those_of_lse(name, backend):
    infinite_sinks.check_gradients(name, backend, "cuda", torch.bfloat16)


def test_an_infinite_state_has_all_weight():
    infinite_sinks.check_merging("triton", "cuda")


# Packed queries over pages on a GPU.


def pages_on_gpu(tensors: tuple, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in tensors]


@pytest.mark.parametrize("page_size, D, Dv", [(4, 16, 8), (16, 64, 64), (64, 128, 128)])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_the_oracle(name, page_size, D, Dv):
    given = drawn(page_size, D, Dv)
    q, k, v, ends, lens, table = pages_on_gpu(given)
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in OPTIONS[name].items()}
    options = {"kv_lens": lens, "page_table": table, "return_lse": True, **options}
    out, lse = fa_ops.attention_varlen(q, k, v, ends, None, 7, **options)
    options["backend"] = "reference"
    expected, expected_lse = fa_ops.attention_varlen(q, k, v, ends, None, 7, **options)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tokens", [90, 700])  # few and many queries of a kv head
def test_fp8_pages_give_the_results_of_the_oracle(tokens):
    q = torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(60, 16, 2, 128, device="cuda").to(torch.float8_e4m3fn) for _ in "kv")
    ends = torch.tensor([0, tokens - 20, tokens], dtype=torch.int32, device="cuda")
    options = {
        "is_causal": True, "kv_lens": ends[1:].clone(), "return_lse": True,
        "page_table": torch.arange(60, dtype=torch.int32, device="cuda").repeat(2, 1),
    }  # fmt: skip
    found = fa_ops.attention_varlen(q, k, v, ends, None, **options)
    expected = fa_ops.attention_varlen(q, k, v, ends, None, **options, backend="reference")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_prompts_and_decoding_steps_without_synchronisation_and_in_a_graph():
    counts, keys = torch.tensor([700, 1, 1, 130]), torch.tensor([900, 3000, 64, 130])
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(256, 16, 2, 128, generator=g) for _ in range(2))
    table = torch.randperm(256, generator=g).int().repeat(4, 1)
    q = torch.randn(int(counts.sum()), 8, 128, generator=g)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    q, k, v, ends, lens, table = pages_on_gpu((q, k, v, ends, keys.int(), table))

    def attend(backend: str | None = None) -> torch.Tensor:
        return fa_ops.attention_varlen(
            q, k, v, ends, None, 700, is_causal=True, kv_lens=lens, page_table=table,
            backend=backend,
        )  # fmt: skip

    attend()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out, attend("reference"), atol=2e-2, rtol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    lens -= 30
    ends[1] -= 20  # other numbers of queries
    graph.replay()
    torch.testing.assert_close(captured, attend("reference"), atol=2e-2, rtol=2e-2)


def test_borders_and_lengths_of_any_values_are_harmless():
    q, k, v, ends, lens, table = pages_on_gpu(drawn(16, 64, 64))
    for wrong in (ends.flip(0), ends * 1000, -ends, ends - 2**31):
        out = fa_ops.attention_varlen(
            q, k, v, wrong, None, kv_lens=lens * 10**6, page_table=table * 10**5
        )
        assert out.isfinite().all()
