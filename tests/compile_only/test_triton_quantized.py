"""The Triton kernels with 8-bit products without a GPU: registers, shared memory, instructions."""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402

from fa_ops.backends.triton import launch  # noqa: E402
from fa_ops.backends.triton.configs import quantized_tile  # noqa: E402
from fa_ops.call.options import Options  # noqa: E402
from tests.compile_only.sass import assert_fits, disassembled  # noqa: E402

host = importlib.import_module("fa_ops.backends.triton.eight_bit")

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, Hq, Hkv, S = 2, 4, 2, 256
E4M3 = torch.float8_e4m3fn
OPTIONS = {
    "causal": (None, None, None, None, 0),
    "everything": ("sinks", "kv_lens", "ranges", 9, 0),
}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def aligned(args, names):
    """What is divisible by 16 in ordinary calls, in which addresses are too."""
    tensors = {n: 16 for n in ("q", "k", "v", "q8", "k8", "v8") if n in names}
    return tensors | host.divisors(args, names)


def attention(arch, D, dtype, kind):
    sinks, lens, ranges, left, right = OPTIONS[kind]
    sinks = sinks and meta(Hq)
    lens = lens and meta(B, dtype=torch.int32)
    ranges, cap, strides = (None, None, (0, 0, 0)) if ranges is None else (
        meta(B, Hq, S, 2, dtype=torch.int32), 20.0, (Hq * S * 2, S * 2, 2)
    )  # fmt: skip
    eight = host.EightBit(
        meta(B, Hq, S, D, dtype=dtype), meta(B, Hkv, S, D, dtype=dtype),
        meta(B, Hkv, D, S, dtype=E4M3), meta(B, Hq, S), 0, meta(B, Hkv, S // 64), 6,
        meta(B, Hkv, D), meta(B, Hq, S),
    )  # fmt: skip
    out = meta(B, Hq, S, D, dtype=torch.bfloat16)
    args = (
        *eight[:3], out, meta(B, Hq, S), *eight.query.stride()[:3], *eight.key.stride()[:3],
        *eight.value.stride()[:3], eight.q_scale, *eight.q_scale.stride(), eight.k_scale,
        *eight.k_scale.stride(), eight.v_scale, *eight.v_scale.stride(), B, Hq, Hq // Hkv, S, S,
        0.1, cap, eight.offset, sinks, lens, ranges, *strides, left, right,
    )  # fmt: skip
    tile = quantized_tile(arch, D)
    kernel = host.quantized_kernel
    return launch.compile_kernel(
        kernel, args, host.attention_constants(eight, tile), tile.options(),
        GPUTarget("cuda", arch, 32), divisors=aligned(args, kernel.arg_names),
    )  # fmt: skip


@pytest.mark.parametrize("arch, D", [(89, 128), (89, 256), (90, 64), (90, 128), (90, 256)])
def test_attention_fits(arch, D, tmp_path):
    assert_fits(attention(arch, D, torch.int8, "everything"), arch, tmp_path)


@pytest.mark.parametrize("dtype, instruction", [(torch.int8, "IGMMA"), (E4M3, "QGMMA")])
def test_products_on_hopper_are_of_8_bit_numbers(dtype, instruction, tmp_path):
    kernel = attention(90, 128, dtype, "causal")
    assert_fits(kernel, 90, tmp_path)
    code = disassembled(kernel.asm["cubin"], tmp_path)
    assert instruction in code and "QGMMA" in code and "HGMMA" not in code
    loads = sum("LDGSTS.E.BYPASS.128" in line for line in code.splitlines())
    assert loads >= 8, "keys and values are loaded ahead"


@pytest.mark.parametrize(
    "arch, D, rotate, qk_dtype",
    [(89, 256, True, E4M3), (90, 128, True, torch.int8), (90, 8, False, E4M3)],
)
def test_quantisation_fits(arch, D, rotate, qk_dtype, tmp_path):
    options = Options(qk_dtype=qk_dtype, rotate=rotate)
    q, k = meta(B, Hq, S, D, dtype=torch.bfloat16), meta(B, Hkv, S, D, dtype=torch.bfloat16)
    sums, lens, strides = meta(B, Hkv, 16, D), meta(B, dtype=torch.int32), k.stride()[:3]
    first, second = host.quantise_constants(D, D, options)
    target = GPUTarget("cuda", arch, 32)
    args = (k, k, sums, sums, *strides, *strides, Hkv, S, lens)
    kernel = host.statistics_kernel
    hints = aligned(args, kernel.arg_names)
    compiled = launch.compile_kernel(kernel, args, first, {"num_warps": 4}, target, divisors=hints)
    assert_fits(compiled, arch, tmp_path)
    args = (
        q, k, k, sums, sums, meta(B, Hq, S, D, dtype=qk_dtype), meta(B, Hkv, S, D, dtype=qk_dtype),
        meta(B, Hkv, D, S, dtype=E4M3), meta(B, Hq, S), meta(B, Hkv, S // 64), meta(B, Hkv, D),
        meta(B, Hq, S), *q.stride()[:3], *strides, *strides, B, Hq, Hq // Hkv, S, S, D, D, 0.1, 0.1,
        lens,
    )  # fmt: skip
    kernel = host.quantize_kernel
    hints = aligned(args, kernel.arg_names)
    compiled = launch.compile_kernel(
        kernel, args, second, host.quantise_options(D), target, divisors=hints
    )
    assert_fits(compiled, arch, tmp_path)
