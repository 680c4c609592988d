"""Attention of 16-bit tensors with e4m3 products on the Hopper backend, as C++."""

import ctypes

import pytest
import torch

import fa_ops
from fa_ops.backends.hopper import eight_bit, kernel_plan
from fa_ops.call.call import attention_call
from fa_ops.call.options import NO_OPERANDS
from tests.backends.hopper import cuda_quantized
from tests.backends.hopper.cuda_as_cpp import needs_compiler

E4M3 = torch.float8_e4m3fn


@needs_compiler
@pytest.mark.parametrize(
    "D, Dv, Sq, rotate, causal", [(64, 64, 200, False, True), (80, 32, 70, True, False)]
)
def test_queries_are_quantised_in_the_kernel(
    D, Dv, Sq, rotate, causal, driver, monkeypatch, tmp_path
):
    g = torch.Generator().manual_seed(0)
    B, Hq, Hkv, Sk = 2, 2, 1, 300
    q, k, v = (
        torch.randn(B, S, H, n, generator=g).bfloat16().transpose(1, 2)
        for H, S, n in ((Hq, Sq, D), (Hkv, Sk, D), (Hkv, Sk, Dv))
    )
    k = k + 3 * torch.randn(1, 1, 1, D, generator=g).bfloat16()
    compiled = {}
    for module in (kernel_plan, eight_bit):
        kernel = module.kernel

        def noted(name, *args, kernel=kernel):
            compiled[name] = args
            return kernel(name, *args)

        monkeypatch.setattr(module, "kernel", noted)
    call = attention_call(
        q, k, v, is_causal=causal, qk_dtype=E4M3, rotate=rotate, eight_bits=True
    )  # fmt: skip
    eight_bit._plan.cache_clear()
    plan = eight_bit.plan_of(call)
    driver.struct_bytes = eight_bit._QUANTIZE_PARAMS.size
    found, memory = plan.source.run(q, k, v, NO_OPERANDS, 0, True)
    memory[: plan.source._zeroed] = 0  # which the driver would set
    assert found.query == q.data_ptr()
    grid, params = driver.last("quantize")
    before = cuda_quantized.quantisation(tmp_path, "quantise", dict(compiled["quantize"][-1]))
    wrong = before.run(params, grid[0], 0)
    assert wrong is None, wrong
    monkeypatch.setattr(plan.source, "run", lambda *_: (found, memory))
    driver.struct_bytes = eight_bit._PARAMS.size
    out, lse = plan.run(q, k, v, NO_OPERANDS)
    grid, params = driver.last("quantized")
    threads, defines = compiled["quantized"][2], dict(compiled["quantized"][-1])
    assert defines["QUANTISES_QUERIES"]
    maps = (cuda_quantized.Tensor * 3)()
    for to, one in zip(maps, plan.maps):
        (n, H, S, width), (b, h, s, _) = one._shape, one._strides
        rows = ctypes.c_uint.from_buffer_copy(one._rest[2], 4).value
        for name, value in dict(D=width, S=S, H=H, B=n, b=b, h=h, s=s, rows=rows).items():
            setattr(to, name, value)
    attend = cuda_quantized.attention(tmp_path, "attend", defines, threads)
    wrong = attend.run(params, maps, grid[0], 0)
    assert wrong is None, wrong
    wanted, wanted_lse = fa_ops.quantized_attention(
        q, k, v, is_causal=causal, qk_dtype=E4M3, rotate=rotate, return_lse=True,
        backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-3, atol=5e-3)
    assert (out - wanted).float().norm() < 0.01 * wanted.float().norm()
