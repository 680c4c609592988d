"""How the decoding kernel attends e4m3 keys and values: its own source, as C++ on the CPU."""

import ctypes

import numpy as np
import pytest
import torch

from fa_ops.backends.hopper import decode
from fa_ops.backends.hopper.configs import DecodeConfig
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler
from tests.backends.hopper.cuda_decode import NO_TMA, PTX, place

pytestmark = needs_compiler

KERNEL = """
#include "decode.cu"
constexpr u32 Q = 0, K = ROWS * HEAD_DIM * 2, V = K + CacheTile<HEAD_DIM>::BYTES,
              OUT = V + CacheTile<VALUE_DIM>::BYTES;
static float* scores;
static const u32* weights;
static u32 keep_mask;
// 16 keys of the tile's second half
static void one_warp() {
  Queries own;
  Sums sums = {};
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  float s[2][2][4] = {};
  own.load(Q);
  own.multiply(s, K, 16);
  for (int r = 0; r < ROWS / 8; r++)
    for (int j = 0; j < 2; j++)
      for (int i = 0; i < 2; i++)
        scores[(g + 8 * r) * 16 + j * 8 + t * 2 + i] = own.product(s[j][0][2 * r + i] + s[j][1][2 * r + i], r);
  u32 w[4];
  for (int i = 0; i < 4; i++) w[i] = weights[(g + i % 2 * 8) * 8 + t + i / 2 * 4];
  const u32 keep[2] = {~0u, t == 3 ? keep_mask : ~0u};
  sums.add(w, V, 16, keep);
  for (int r = 0; r < ROWS / 8; r++)
    sums.store(OUT + (g + 8 * r) * VALUE_DIM * 4, (g & 7) * 8, r);
}
extern "C" u32 k_at(int row, int chunk) { return CacheTile<HEAD_DIM>::at(K, row, chunk); }
extern "C" u32 v_at(int row, int chunk) { return CacheTile<VALUE_DIM>::at(V, row, chunk); }
extern "C" u32 q_at(int row, int chunk) { return swizzled(Q, ROWS, row, chunk); }
extern "C" unsigned char* memory() { return shared; }
extern "C" int out_at() { return OUT; }
extern "C" void run(float* s, const u32* w, u32 keep) {
  scores = s, weights = w, keep_mask = keep, run_warp(one_warp);
}
"""  # noqa: E501


def products(folder, D, Dv, rows, bf16):
    """The products of one warp with the second half of a tile of 32 keys."""
    config = DecodeConfig(D, Dv, rows, 16, 2, False, is_e4m3=True)
    dtype = torch.bfloat16 if bf16 else torch.float16
    defines = decode.kernel_defines(config, dtype, paged=False)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + KERNEL
    return built(folder, "e4m3", text, PTX + NO_TMA)


CASES = [(64, 64, 8, 1), (128, 64, 16, 1), (128, 128, 8, 0), (192, 256, 16, 1)]


@pytest.mark.parametrize("D, Dv, rows, bf16", CASES)
def test_products(D, Dv, rows, bf16, tmp_path):
    kernel = products(tmp_path, D, Dv, rows, bf16)
    kernel.memory.restype = ctypes.c_void_p
    g = torch.Generator().manual_seed(D + Dv)
    dtype = torch.bfloat16 if bf16 else torch.float16
    q = torch.randn(rows, D, generator=g)
    if bf16:  # rows that float16 does not hold
        q *= 10.0 ** torch.linspace(-24, 24, rows).view(-1, 1)
    q = q.to(dtype)
    k, v = (
        torch.randn(32, width, generator=g).mul(30).to(torch.float8_e4m3fn) for width in (D, Dv)
    )
    v.view(torch.uint8)[31] = 127  # NaN, of a key that is masked out
    weights = torch.rand(16, 16, generator=g).half()
    weights[:, 15] = 0
    for name, x in (("q", q), ("k", k), ("v", v)):
        place(kernel, getattr(kernel, f"{name}_at"), x)
    scores = np.full((rows, 16), np.nan, np.float32)
    packed = weights.view(torch.int16).numpy().view(np.uint32)
    kernel.run(
        scores.ctypes.data_as(ctypes.c_void_p), packed.ctypes.data_as(ctypes.c_void_p), 0xFFFF
    )
    expected = q.double() @ k[16:].double().T
    size = expected.abs().amax(1, keepdim=True)
    error = (torch.from_numpy(scores).double() - expected) / size
    assert error.abs().max() < 1e-5
    at = kernel.memory() + kernel.out_at()
    stored = np.ctypeslib.as_array((ctypes.c_float * (rows * Dv)).from_address(at)).reshape(
        rows, -1
    )
    columns = np.arange(Dv) ^ (np.arange(rows)[:, None] % 8 * 8)
    out = torch.from_numpy(np.take_along_axis(stored, columns, 1).astype(np.float64))
    expected = weights[:rows, :15].double() @ v[16:31].double()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


# As the hardware swizzles: bits 4 to 6 of an address by bits 7 to 9, or bits 4 and 5 by 7 and 8.
@pytest.mark.parametrize("D, row_bytes, bits", [(64, 64, 3), (128, 128, 7), (256, 128, 7)])
def test_addresses_are_those_of_the_copies(D, row_bytes, bits, tmp_path):
    kernel = products(tmp_path, D, 64, 8, 1)
    base = 8 * D * 2
    assert base % 1024 == 0
    for row in range(32):
        for chunk in range(D // 16):
            column, inside = divmod(chunk * 16, row_bytes)
            plain = column * 32 * row_bytes + row * row_bytes + inside
            expected = plain ^ (plain >> 7 & bits) << 4
            assert kernel.k_at(row, chunk) - base == expected


ATTEND = """
#include "decode.cu"
static DecodeParams p;
static DecodeSplit split;
static float total[8], maximum[8];
static void one_warp() {
  DecodeConsumer consumer(p, LAYOUT, 0);
  consumer.begin_item(split, LAYOUT.q);
  for (int tile = 0; tile < split.count; tile++) consumer.attend(split, tile);
  consumer.reduce_warps();
}
extern "C" unsigned char* memory() { return shared; }
extern "C" u32 k_at(int row, int chunk) {
  return CacheTile<64>::at(LAYOUT.k + row / 16 * K_BYTES, row % 16, chunk);
}
extern "C" u32 v_at(int row, int chunk) {
  return CacheTile<64>::at(LAYOUT.v + row / 16 * V_BYTES, row % 16, chunk);
}
extern "C" u32 q_at(int row, int chunk) { return swizzled(LAYOUT.q, ROWS, row, chunk); }
extern "C" u32 scales_at(int tile) { return LAYOUT.scales + tile * SCALES_BYTES; }
extern "C" u32 pages_at(int tile) { return LAYOUT.pages + tile * 4; }
extern "C" u32 sums_at() { return LAYOUT.sums; }
extern "C" u32 stats_at() { return LAYOUT.stats; }
extern "C" void run(int keys, float scale_log2) {
  static const float any = 1.f;
  p.k_scale = p.v_scale = &any, p.Sq = 1, p.group = 8, p.scale_log2 = scale_log2;
  p.window_left = p.window_right = UNBOUNDED;
  split.count = (keys + 15) / 16, split.keys = split.end = keys;
  run_warp(one_warp);
}
"""


@pytest.mark.parametrize("scales, page", [(2, 16), (2, 4), (3, 16)])
def test_scales_of_any_size(scales, page, tmp_path):
    """Of 0, of both signs, and large ones with small weights: one warp attends 11 tiles."""
    keys, tiles = 170, 11
    config = DecodeConfig(64, 64, 8, page, 1, False, is_e4m3=True, scales=scales)
    defines = decode.kernel_defines(config, torch.bfloat16, paged=scales == 2)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + ATTEND
    kernel = built(tmp_path, "attend", text, PTX + NO_TMA)
    kernel.memory.restype = ctypes.c_void_p
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        q = torch.randn(8, 64, generator=g).bfloat16()
        k, v = (torch.randn(16 * tiles, 64, generator=g).to(torch.float8_e4m3fn) for _ in range(2))
        k.view(torch.uint8)[keys:] = v.view(torch.uint8)[keys:] = 127
        shape = (tiles, 2, 16) if scales == 3 or page < 16 else (tiles, 2, 1)
        factors = torch.rand(shape, generator=g) + 0.5
        powers = torch.randint(-30, 31, (tiles, shape[2]), generator=g)
        factors[:, 1] *= 2.0 ** (powers - (60 if seed == 3 else 0))
        factors[:, 1] *= torch.randint(-1, 2, (tiles, shape[2]), generator=g)
        if seed == 4:
            factors[:, 1] = 0
        for name, x in (("q", q), ("k", k), ("v", v)):
            place(kernel, getattr(kernel, f"{name}_at"), x)
        for tile in range(tiles):
            write(kernel, kernel.scales_at(tile), factors[tile])
            write(kernel, kernel.pages_at(tile), torch.tensor([2 ** (16 // page) - 1]).int())
        kernel.run(keys, ctypes.c_float(0.5))
        of_keys, of_values = (
            factors[:, i].repeat_interleave(16 // shape[2], 1).flatten()[:keys, None].double()
            for i in range(2)
        )
        s = q.double() @ (k[:keys].double() * of_keys).T * 0.5
        expected = s.mul(np.log(2)).softmax(1) @ (v[:keys].double() * of_values)
        stats = read(kernel, kernel.stats_at(), 16).view(8, 2)
        lse = stats[:, 0] + stats[:, 1].log2()
        torch.testing.assert_close(lse, s.mul(np.log(2)).logsumexp(1) / np.log(2))
        columns = torch.arange(64) ^ (torch.arange(8)[:, None] * 8)
        sums = read(kernel, kernel.sums_at(), 8 * 64).view(8, 64).gather(1, columns)
        error = (sums / stats[:, 1:] - expected).abs().amax(1)
        assert (error <= 2e-3 * expected.abs().amax(1)).all()


def write(kernel, at, x):
    x = x.contiguous()
    ctypes.memmove(kernel.memory() + at, x.data_ptr(), x.numel() * x.element_size())


def read(kernel, at, count):
    data = (ctypes.c_float * count).from_address(kernel.memory() + at)
    return torch.from_numpy(np.array(data, dtype=np.float64))
