"""The Hopper kernel that quantises, as C++ on the CPU."""

import ctypes

import pytest
import torch

from fa_ops.backends import quantization
from fa_ops.backends.hopper import eight_bit
from fa_ops.backends.hopper.kernel_plan import Geometry
from fa_ops.call.call import attention_call
from fa_ops.call.options import Operands
from tests.backends.hopper import cuda_quantized
from tests.backends.hopper.cuda_as_cpp import needs_compiler

BLOCK = eight_bit.VALUE_BLOCK


def read(address, shape, dtype):
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=dtype).view(shape)


def in_order_of_weights(v, blocks):
    """(B, Hkv, Sk, Dv) transposed, in the order in which fragments hold weights."""
    B, H, Sk, Dv = v.shape
    at = torch.arange(BLOCK)
    a, rest = at % 32 // 16, at % 16
    key = at // 32 * 32 + 8 * (2 * a + rest % 4 // 2) + rest // 4 * 2 + rest % 2
    v = torch.nn.functional.pad(v, (0, 0, 0, blocks * BLOCK - Sk))
    return v.view(B, H, blocks, BLOCK, Dv)[:, :, :, key].permute(0, 1, 4, 2, 3)


@needs_compiler
@pytest.mark.parametrize(
    "D, Dv, Sq, Sk, rotate, lens",
    [
        (128, 128, 70, 600, False, True),
        (64, 40, 300, 130, True, False),
        (48, 256, 9, 400, False, True),
    ],
)
def test_numbers_are_those_of_the_definition(D, Dv, Sq, Sk, rotate, lens, driver, tmp_path):
    driver.struct_bytes = eight_bit._QUANTIZE_PARAMS.size
    g = torch.Generator().manual_seed(0)
    B, Hq, Hkv = 2, 2, 1
    q, k, v = (
        torch.randn(B, H, S, n, generator=g).bfloat16()
        for H, S, n in ((Hq, Sq, D), (Hkv, Sk, D), (Hkv, Sk, Dv))
    )
    k = k + 3 * torch.randn(1, 1, 1, D, generator=g).bfloat16()
    kv_lens = torch.tensor([Sk, Sk // 2 + 1], dtype=torch.int32) if lens else None
    tensors = Operands(kv_lens=kv_lens)
    plan = eight_bit.Quantizer(Geometry.of(attention_call(q, k, v)), False, True, rotate)
    found, memory = plan.run(q, k, v, tensors, 0, True)
    memory[: plan._zeroed] = 0  # which the driver would set
    grid, params = driver.last("quantize")
    defines = eight_bit.quantize_defines(q.dtype, D, Dv, False, rotate)
    wrong = cuda_quantized.quantisation(tmp_path, "quantise", defines).run(params, grid[0], 0)
    assert wrong is None, wrong
    call = attention_call(
        q, k, v, kv_lens=kv_lens, qk_dtype=torch.float8_e4m3fn, rotate=rotate, eight_bits=True
    )
    wanted = quantization.quantised(call, torch.float64)
    e4m3, blocks = torch.float8_e4m3fn, plan.blocks
    scale = read(found.q_scale, (B, Hq, Sq), torch.float32)
    number = read(found.query, (B, Hq, Sq, D), e4m3)
    assert_close(number, scale.unsqueeze(-1), wanted.query * wanted.q_scale)
    scale = read(found.k_scale, (B, Hkv, 2 * blocks), torch.float32)
    scale = scale.repeat_interleave(64, 2)[:, :, :Sk].unsqueeze(-1)
    assert_close(read(found.key, (B, Hkv, Sk, D), e4m3), scale, wanted.key * wanted.k_scale)
    scale = read(found.v_scale, (B, Hkv, Dv), torch.float32)
    number = read(found.value, (B, Hkv, Dv, blocks, BLOCK), e4m3)
    values = in_order_of_weights((wanted.value * wanted.v_scale).float(), blocks)
    assert torch.equal(number.float() * scale[..., None, None], values)
    offset = read(found.offset, (B, Hq, Sq), torch.float32)
    torch.testing.assert_close(offset, wanted.offset.squeeze(-1).float(), rtol=1e-3, atol=1e-3)


def assert_close(number, scale, wanted):
    """Equal but for few numbers, which lie between two e4m3 numbers."""
    difference = (number.double() * scale - wanted).abs()
    assert (difference > 1e-6).double().mean() < 0.01
    assert (difference <= 0.07 * wanted.abs() + 0.01 * wanted.abs().max()).all()
