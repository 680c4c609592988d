"""e4m3 caches as 16-bit ones: the kernel's own source as C++ on the CPU, and its host code."""

import struct

import pytest
import torch

from fa_ops.backends.hopper import forward
from fa_ops.call.call import attention_call
from fa_ops.testing.caches import CacheCase
from tests.backends.hopper.cuda_as_cpp import WARP, built, needs_compiler

GRID = """
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
struct uint2 { u32 x, y; };
template <class T> static T __ldg(const T* x) { return *x; }
static u32 bfloat16(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
static u32 pack(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
"""
RUN = """
#define IS_BF16 1
#define HAS_KV_LENS 1
#include "../dequantize.cu"
extern "C" void run(const DequantizeParams* p, int x, int y) {
  gridDim.x = x;
  Index blocks = {0};
  for (int row = 0; row < y; row++)
    for (int at = 0; at < x; at++)
      for (int thread = 0; thread < THREADS; thread++)
        blockIdx = {at, row}, gridDim = {x, y}, threadIdx.x = thread, dequantize(*p);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    text = RUN.replace("../", "")
    ptx = WARP.replace("struct Index { int x; };", "struct Index { int x, y; };") + GRID
    return built(tmp_path_factory.mktemp("dequantize"), "dequantize", text, ptx).run


@needs_compiler
@pytest.mark.parametrize(
    "page_size, scales", [(0, "row"), (0, "token"), (16, "row"), (48, "page"), (16, "token")]
)
@pytest.mark.parametrize("bshd", [False, True])
def test_a_converted_cache(kernel, driver, page_size, scales, bshd):
    driver.struct_bytes = forward._DEQUANTIZE_LAYOUT.size
    case = CacheCase(B=3, Hkv=2, S=150, D=24, Dv=16, dtype=torch.bfloat16, fp8=True, bshd=bshd,
                     lens=(150, 0, 70), page_size=page_size, page_scales=scales == "page",
                     token_scales=scales == "token")  # fmt: skip
    call = case.fresh()
    k, v = call[1:3]
    t = call.operands
    k_out, v_out, table = forward.converter(call).run(k, v, call.operands)
    grid, params = driver.last("dequantize")
    kernel(params, *grid)
    assert grid[1] == 3 and grid[0] == -(
        -max(150, 0 if table is None else table.shape[1] * page_size) // 16
    )
    for b, length in enumerate(case.lens):
        for x, out, scale in ((k, k_out, t.k_scale), (v, v_out, t.v_scale)):
            expected, found = (
                _keys(y, own, b, length) for y, own in ((x, t.page_table), (out, table))
            )
            factor = _factors(scale, t.page_table, b, length, page_size)
            assert torch.equal(found, (expected.float() * factor).bfloat16())
    if table is not None:
        used = torch.tensor([-(-length // page_size) for length in case.lens])
        numbers = torch.arange(table.numel(), dtype=torch.int32).view_as(table)
        is_used = torch.arange(table.shape[1]) < used[:, None]
        assert torch.equal(table, torch.where(is_used, numbers, -1))


def _keys(x, table, b, length):
    """(keys, heads, features) of a batch row."""
    if table is None:
        return x[b].transpose(0, 1)[:length]
    used = -(-length // x.shape[1])
    return (
        x.view(torch.uint8 if x.dtype.itemsize == 1 else x.dtype)[table[b, :used].long()]
        .view(x.dtype)
        .flatten(0, 1)[:length]
    )


def _factors(scale, table, b, length, page_size):
    if scale.dim() == 2:
        return scale[b].view(1, -1, 1)
    at = torch.arange(length)
    if table is None:
        return scale[b, :, at].T.unsqueeze(-1)
    return scale[table[b, at // page_size].long(), at % scale.shape[1]].unsqueeze(-1)


@needs_compiler
def test_pages_that_do_not_exist_stay_missing(kernel, driver):
    driver.struct_bytes = forward._DEQUANTIZE_LAYOUT.size
    case = CacheCase(B=2, S=64, dtype=torch.bfloat16, fp8=True, lens=(64, 40), page_size=16)
    call = case.fresh()
    k, v = call[1:3]
    pages = torch.tensor([[1, -1, 2**31 - 1, 2], [0, len(k), 3, 1]], dtype=torch.int32)
    call = call.changed(page_table=pages)
    *_, table = forward.converter(call).run(k, v, call.operands)
    grid, params = driver.last("dequantize")
    kernel(params, *grid)
    assert table.tolist() == [[0, -1, -1, 3], [4, -1, 6, -1]]


def prompt(D=64, S=640, B=2, dtype=torch.bfloat16, page=0):
    q = torch.randn(B, 64, 64, D, dtype=dtype)
    shape = (80, page, 4, D) if page else (B, 4, S, D)
    k, v = (torch.zeros(shape, dtype=forward.E4M3) for _ in range(2))
    table = torch.arange(80, dtype=torch.int32).view(2, 40) if page else None
    lens = torch.full((B,), 600)
    return attention_call(
        q, k, v, is_causal=True, kv_lens=lens, page_table=table, over_cache=True
    )  # fmt: skip


@pytest.mark.parametrize("page", [0, 16])
def test_a_prompt_attends_the_converted_cache(driver, page):
    call = prompt(page=page)
    q, k, v = call[:3]
    driver.struct_bytes = 704
    out, _ = forward.prepare_cached(call)(q, k, v, call.operands)
    names = [one.name for one in driver.launched]
    assert names == ["dequantize", "forward"]
    first, second = (one.params for one in driver.launched)
    assert struct.unpack_from("<2Q", first) == (k.data_ptr(), v.data_ptr())
    k_out, v_out, table = struct.unpack_from("<3Q", first, 48)
    assert [struct.unpack_from("<Q", second, at)[0] for at in (128, 256)] == [k_out, v_out]
    assert (table != 0) == (page > 0) and (
        not page or struct.unpack_from("<Q", second, 680) == (table,)
    )
    assert out.shape == q.shape


def test_what_is_not_converted(monkeypatch):
    error, call = forward.cache_error, prompt()
    assert error(call) is None
    assert "64 and more" in error(call._replace(query=call.query[:, :, :60]))
    call = prompt(dtype=torch.float16)
    assert error(call) is None
    assert "with scales to float16" in error(call.changed(v_scale=torch.ones(2, 4)))
    with torch.device("meta"):
        longest = (1 << 32) // (2 * 4 * 128 * 2)
        assert error(prompt(S=longest)) is None
        reason = error(prompt(S=longest + 1))
    assert (
        reason
        == f"converts e4m3 caches of at most {longest} keys of such shapes, got {longest + 1}"
    )
