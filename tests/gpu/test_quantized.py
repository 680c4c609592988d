"""Attention with 8-bit products on a GPU: cases against the oracle, long rows, CUDA graphs."""

import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends import quantization, triton
from fa_ops.testing import make_case
from fa_ops.testing.quantized import QuantizedCase, assert_quantized_close, random_quantized_case
from tests.quantized_calls import call_of, public_call, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    """Calls refuse these kernels on GPUs until they pass these tests."""
    monkeypatch.setattr(triton, "EIGHT_BIT_ON_GPUS", True)


@pytest.mark.parametrize("seed", range(3000, 3200))
def test_random(seed):
    case = random_quantized_case(seed, device="cuda")
    inner = case.case
    grown = dataclasses.replace(inner, Sq=inner.Sq * (1 + seed % 5), Sk=inner.Sk * (1 + seed % 7))
    case = dataclasses.replace(case, case=grown)
    assert_quantized_close(*run(case), case)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("qk_dtype", [torch.int8, E4M3])
def test_long_rows(D, qk_dtype):
    inner = make_case(
        B=1, Hq=4, Hkv=2, Sq=500, Sk=5000, D=D, Dv=D, dtype=torch.bfloat16, device="cuda",
        is_causal=True, kv_lens=True,
    )  # fmt: skip
    case = QuantizedCase(inner, qk_dtype, key_mean=4.0)
    assert_quantized_close(*run(case), case)


def test_numbers_are_those_of_the_definition():
    from fa_ops.backends.triton.quantized import quantise

    q, k, v, how, spec = QuantizedCase(
        make_case(Sq=200, Sk=3000, D=128, Dv=64, device="cuda", dtype=torch.bfloat16), key_mean=2.0
    ).fresh()
    wanted = quantization.quantised(q, k, v, how, spec, torch.float32)
    found = quantise(q, k, v, how, spec)
    assert (found.query.float() == wanted.query).float().mean() > 0.999
    assert (found.key.float() == wanted.key).float().mean() > 0.998
    assert torch.equal(found.value[..., :3000].float().transpose(2, 3), wanted.value)
    torch.testing.assert_close(found.q_scale, wanted.q_scale.squeeze(-1))
    torch.testing.assert_close(found.offset, wanted.offset.squeeze(-1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scales", [None, ("tokens", "blocks", "channels")])
def test_calls_can_be_captured(scales):
    case = QuantizedCase(
        make_case(Sq=100, Sk=300, D=64, Dv=64, dtype=torch.bfloat16, device="cuda", kv_lens=True),
        scales=scales,
    )
    function, args, options = public_call(case)
    wanted = function(*args, **options)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*args, **options)[0]
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_compiled_code_gives_the_same():
    case = QuantizedCase(make_case(Sq=65, Sk=65, D=64, Dv=64, dtype=torch.half, device="cuda"))
    args, options = call_of(case)
    operator = torch.ops.fa.quantized_attention
    compiled = torch.compile(lambda *args: operator(*args, **options), fullgraph=True)
    assert torch.equal(compiled(*args)[0], operator(*args, **options)[0])


def test_errors_do_not_grow_with_length():
    g = torch.Generator("cuda").manual_seed(0)
    errors = []
    for S in (2048, 65536):
        q, k, v = (
            torch.randn(1, 2, n, 128, device="cuda", dtype=torch.bfloat16, generator=g)
            for n in (128, S, S)
        )
        wanted = fa_ops.attention(q.float(), k.float(), v.float(), backend="triton")
        error = fa_ops.quantized_attention(q, k, v) - wanted
        errors.append((error.norm() / wanted.norm()).item())
    assert errors[1] < 1.2 * errors[0] < 0.06
