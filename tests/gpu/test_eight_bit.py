"""Attention with 8-bit products on a GPU: cases against the oracle, long rows, CUDA graphs."""

import contextlib
import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends import quantization, reference
from fa_ops.cli.fuzz import refusal
from fa_ops.testing import make_case
from fa_ops.testing.budget import by_operator
from fa_ops.testing.quantized import (
    QuantizedCase,
    assert_quantized_close,
    random_quantized_case,
)
from tests.dominant_keys import POSITIONS, relative_error
from tests.gpu.cases import few_processors
from tests.quantized_calls import operator_call, public_call, run

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("seed", range(3000, 3200))
def test_random(seed):
    check(grown_case(seed), "triton")


# Every fifth random case is one that the kernels of this backend take.
@pytest.mark.parametrize("seed", range(3000, 3600))
def test_random_on_hopper(seed):
    check(grown_case(seed), "hopper")


def grown_case(seed):
    """A random case whose rows and keys fill several tiles."""
    case = random_quantized_case(seed, device="cuda")
    inner = case.case
    grown = dataclasses.replace(inner, Sq=inner.Sq * (1 + seed % 5), Sk=inner.Sk * (1 + seed % 7))
    return dataclasses.replace(case, case=grown)


def check(case, backend):
    """Compare with the oracle, or skip what the backend refuses."""
    if reason := refusal(backend, case):
        pytest.skip(reason)
    with few_processors(2) if case.case.seed % 2 else contextlib.nullcontext():
        assert_quantized_close(*run(case, backend), case)


@pytest.mark.parametrize("D, Dv", [(64, 64), (128, 128), (256, 256), (64, 136), (256, 128)])
@pytest.mark.parametrize("qk_dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_long_rows(D, Dv, qk_dtype, backend):
    inner = make_case(
        B=1, Hq=4, Hkv=2, Sq=500, Sk=5000, D=D, Dv=Dv, dtype=torch.bfloat16,
        device="cuda", is_causal=True, kv_lens=True,
    )  # fmt: skip
    check(QuantizedCase(inner, qk_dtype, key_mean=4.0), backend)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_scales_may_be_negative(softcap):
    inner = make_case(B=2, Hq=4, Hkv=2, Sq=150, Sk=300, D=64, Dv=64, device="cuda", softcap=softcap)
    call = QuantizedCase(inner, scales=("tokens", "blocks", "channels")).fresh()
    scales = {n: getattr(call.operands, n) for n in ("q_scale", "k_scale", "v_scale")}
    signed = {
        n: t * (torch.randint(0, 2, t.shape, device="cuda") * 2 - 1) for n, t in scales.items()
    }
    call = call.changed(**signed)
    wanted, _ = reference.quantized(call)
    found, _ = by_operator(call.changed(backend="hopper"))
    assert (found - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_scales_of_heads_are_those_of_their_blocks_and_channels(D, sign):
    """Bitwise: with scales of heads another kernel runs, which reads each once."""
    g = torch.Generator("cuda").manual_seed(0)
    B, Hq, Hkv, S = 2, 4, 2, 1500
    q, k, v = (torch.randn(B, H, S, D, device="cuda", generator=g).to(E4M3) for H in (Hq, Hkv, Hkv))
    of = [torch.rand(B, H, device="cuda", generator=g) + 0.5 for H in (Hq, Hkv, Hkv)]
    of[0][:, 1] *= sign
    each = [
        scale[..., None].expand(-1, -1, n).contiguous()
        for scale, n in zip(of, (S, -(-S // 64), D))
    ]  # fmt: skip
    results = [
        fa_ops.attention(
            q, k, v, q_scale=a, k_scale=b, v_scale=c, is_causal=True, return_lse=True,
            backend="hopper",
        )
        for a, b, c in (of, each)
    ]  # fmt: skip
    assert all(map(torch.equal, *results))


def test_numbers_are_those_of_the_definition():
    from fa_ops.backends.triton.eight_bit import quantise

    case = make_case(Sq=200, Sk=3000, D=128, Dv=64, device="cuda", dtype=torch.bfloat16)
    call = QuantizedCase(case, key_mean=2.0).fresh()
    wanted = quantization.quantised(call, torch.float32)
    found = quantise(call)
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
    args, options = operator_call(case)
    operator = torch.ops.fa.quantized_attention
    compiled = torch.compile(lambda *args: operator(*args, **options), fullgraph=True)
    assert torch.equal(compiled(*args)[0], operator(*args, **options)[0])


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_value_that_all_keys_share_is_reproduced(D, backend):
    q, k, v = (torch.randn(1, 2, n, D, device="cuda", dtype=torch.bfloat16) for n in (200, 3000, 1))
    v = v.to(E4M3).to(v.dtype)
    out = fa_ops.quantized_attention(q, k, v.expand_as(k).contiguous(), backend=backend)
    assert ((out - v).abs() <= 0.025 * v.abs()).all()


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_errors_do_not_grow_with_length(backend):
    g = torch.Generator("cuda").manual_seed(0)
    errors = []
    for S in (2048, 65536):
        q, k, v = (
            torch.randn(1, 2, n, 128, device="cuda", dtype=torch.bfloat16, generator=g)
            for n in (128, S, S)
        )
        wanted = fa_ops.attention(q.float(), k.float(), v.float(), backend="triton")
        error = fa_ops.quantized_attention(q, k, v, backend=backend) - wanted
        errors.append((error.norm() / wanted.norm()).item())
    assert errors[1] < 1.2 * errors[0] < 0.06


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_errors_beside_a_dominant_key_do_not_grow_with_length(backend, position):
    errors = [
        relative_error(backend, Sk, position, D=64, Sq=128, device="cuda") for Sk in (8192, 262144)
    ]
    assert max(errors) < 0.03, errors  # above 0.1 where the other keys' weights become 0
