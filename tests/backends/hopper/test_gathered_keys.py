"""How the decoding kernel gathers keys of small pages: its own source, as C++ on the CPU."""

import ctypes

import pytest
import torch

from fa_ops.backends.hopper import decode, mla
from fa_ops.backends.hopper.configs import decode_config, mla_config
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler
from tests.backends.hopper.cuda_decode import NO_TMA, PTX

pytestmark = needs_compiler

MMA = """
template <class... T> static void mma(T...) {}
"""
NO_WGMMA = """
static u32 descriptor_base(u32, u32) { return 0; }
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int N> static void wgmma_wait() {}
"""
NO_WGMMA += "".join(
    f"template <class... T> static void {name}(T&&...) {{}}\n"
    for name in (
        *("wgmma_scores_start", "wgmma_scores", "wgmma_output", "wgmma_other_output"),
        *("fence_operand", "stmatrix_x4", "named_barrier_arrive"),
    )
)
COPY = """
#include "decode.cu"
static DecodeParams p;
static DecodeSplit split;
static int tile;
static void copy() {
  PipelineState<STAGES> kv;
  kv.next();
  GatheredKeys next(threadIdx.x / 32);
  copy_tile(p, LAYOUT, split, (threadIdx.x & 31) == 0, tile, kv, next);
}
extern "C" unsigned char* memory() { return shared; }
extern "C" u32 k_at(int row, int chunk) { return CacheTile<HEAD_DIM>::at(LAYOUT.k + K_BYTES, row, chunk); }
extern "C" u32 v_at(int row, int chunk) { return CacheTile<VALUE_DIM>::at(LAYOUT.v + V_BYTES, row, chunk); }
extern "C" u32 pages_at() { return LAYOUT.pages + PAGES_BYTES; }
extern "C" u32 scales_at() { return LAYOUT.scales + SCALES_BYTES; }
extern "C" int exists(int row) {
  threadIdx.x = row % 8 / 2;
  const ExistingKeys keys(LAYOUT.pages + PAGES_BYTES, row / 16 * 16);
  return keys.has(row % 16 / 8, row % 2) + 2 * keys.all();
}
extern "C" void run(const void* k, const void* v, const long long* strides, const int* table, const float* scales,
                    const int* numbers) {
  p.k_rows = (const CacheElement*)k, p.v_rows = (const CacheElement*)v;
  p.k_strides = {strides[0], strides[1], strides[2]}, p.v_strides = {strides[3], strides[4], strides[5]};
  p.table = table, p.k_scale = scales, p.v_scale = scales;
  p.table_stride = numbers[0], p.page = numbers[1], p.page_count = numbers[2], p.D = numbers[3], p.Dv = numbers[4];
  split.b = numbers[5], split.item = numbers[6], tile = numbers[7];
  split.begin = numbers[8], split.end = numbers[9], p.Hkv = numbers[10], split.tile = tile;
  for (int warp = 0; warp < GATHERING_WARPS; warp++) run_warp(copy, warp);
}
"""  # noqa: E501
LATENT = """
#include "mla.cu"
static MlaParams p;
static Split split;
static void copy() {
  u32 phases = 0;
  GatheredKeys next(threadIdx.x / 32);
  next.find(p, split.b, split.tile + 1, {0, split.keys});
  copy_tile(p, LAYOUT, split, (threadIdx.x & 31) == 0, 1, phases, next);
}
extern "C" unsigned char* memory() { return shared; }
extern "C" u32 k_at(int row, int chunk) { return swizzled(LAYOUT.tile(1), 64, row, chunk); }
extern "C" int exists(int row) {
  threadIdx.x = row % 8 / 2;
  const ExistingKeys keys(LAYOUT.pages + PAGES_BYTES);
  return keys.has(row / 8 * 4 + row % 2) + 2 * keys.all();
}
extern "C" void run(const void* k, const int* table, const long long* strides, const int* numbers) {
  p.k_rows = (const Element*)k, p.table = table, p.k_strides = {strides[0], 0, strides[1]};
  p.table_stride = numbers[0], p.page = numbers[1], p.page_count = numbers[2], p.width = 1;
  split.b = numbers[3], split.tile = numbers[4] - 1, split.keys = numbers[5];
  for (int warp = 0; warp < GATHERING_WARPS; warp++) run_warp(copy, warp);
}
"""
Hkv, TILE = 3, 1
# head dims, keys of a page, whether of e4m3, and kind of scales
CASES = [
    *((64, 64, 1, False, 0), (128, 128, 2, False, 0), (40, 24, 3, False, 0)),
    *((192, 128, 5, False, 0), (256, 256, 12, False, 0), (104, 104, 48, False, 0)),
    *((64, 64, 1, True, 3), (128, 128, 3, True, 2), (40, 88, 2, True, 1), (192, 256, 12, True, 2)),
]


def compiled(folder, D, Dv, page, is_e4m3, scales):
    config = decode_config(D, Dv, 8, page, is_e4m3, scales)
    defines = decode.kernel_defines(config, torch.bfloat16, paged=True)
    assert defines["COPY_KEYS"] == 1 and not defines["WHOLE_ROWS"]
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + COPY
    kernel = built(folder, "gather", text, PTX + NO_TMA + MMA)
    kernel.memory.restype = ctypes.c_void_p
    return kernel, config.block_n


@pytest.mark.parametrize("D, Dv, page, is_e4m3, scales", CASES)
def test_a_tile(D, Dv, page, is_e4m3, scales, tmp_path):
    kernel, block_n = compiled(tmp_path, D, Dv, page, is_e4m3, scales)
    g = torch.Generator().manual_seed(D + page)
    width = -(-2 * block_n // page) + 1
    pages, begin, end = 2 * width + 3, block_n + 7, 2 * block_n - 9
    dtype = torch.uint8 if is_e4m3 else torch.int16
    both = []
    for n in (D, Dv):  # rows are parts of others, at multiples of 16 bytes
        rows = torch.randint(1, 120, (pages, page, Hkv, -(-n // 16) * 16 + 16), generator=g)
        both.append(rows.to(dtype)[..., :n])
    k, v = both
    table = torch.randperm(pages, generator=g)[: 2 * width].view(2, width).int()
    table[:, 1::5] = torch.tensor([[-1], [10**6]])
    table[:, 2::7] = torch.tensor([[pages], [-(2**31)]])
    scale = torch.rand(pages, page, Hkv, generator=g)
    if scales == 2:
        scale = scale[:, :1].contiguous()
    numbers = [width, page, pages, D, Dv, 1, 2, TILE, begin, end, Hkv]
    strides = [x.stride(i) for x in both for i in (0, 2, 1)]
    ctypes.memset(kernel.memory(), 255, 1 << 17)
    kernel.run(
        *(ctypes.c_void_p(x.data_ptr()) for x in (k, v)), (ctypes.c_longlong * 6)(*strides),
        *(ctypes.c_void_p(x.data_ptr()) for x in (table, scale)), (ctypes.c_int * 11)(*numbers),
    )  # fmt: skip
    keys = torch.arange(TILE * block_n, (TILE + 1) * block_n)
    of = table[1, keys // page]
    exists = (of >= 0) & (of < pages) & (keys >= begin) & (keys < end)
    assert block_n // 4 < exists.sum() < block_n - 16
    found = [kernel.exists(row) for row in range(block_n)]
    assert [x & 1 for x in found] == exists.int().tolist()
    assert [x >> 1 for x in found] == exists.view(-1, 16).all(1).repeat_interleave(
        16
    ).int().tolist()
    for name, x, padded in (("k", k, kernel_dim(D)), ("v", v, kernel_dim(Dv))):
        rows = torch.where(exists, of, 0).long()
        expected = torch.zeros(block_n, padded, dtype=dtype)
        expected[:, : x.shape[3]] = x[rows, keys % page, 2]
        expected[~exists] = 0
        assert torch.equal(stored(kernel, getattr(kernel, f"{name}_at"), expected), expected), name
    if scales > 1:
        at = kernel.memory() + kernel.scales_at()
        copied = torch.tensor((ctypes.c_float * (2 * block_n)).from_address(at)).view(2, block_n)
        own = scale[torch.where(exists, of, 0).long(), keys % scale.shape[1], 2] * exists
        assert torch.equal(copied, own.expand(2, -1))


@pytest.mark.parametrize("page", [4, 8, 16, 32, 64])
def test_which_keys_exist_where_copies_bring_several(page, tmp_path):
    config = decode_config(128, 128, 8, page)
    assert config.copy_keys == page
    defines = decode.kernel_defines(config, torch.bfloat16, paged=True)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + COPY
    kernel = built(tmp_path, "exists", text, PTX + NO_TMA + MMA)
    kernel.memory.restype = ctypes.c_void_p
    g = torch.Generator().manual_seed(page)
    for _ in range(8):
        copies = torch.rand(128 // page, generator=g) < 0.7
        bits = sum(1 << i for i, exists in enumerate(copies.tolist()) if exists)
        ctypes.memmove(kernel.memory() + kernel.pages_at(), bits.to_bytes(4, "little"), 4)
        exists = copies.repeat_interleave(page)
        found = [kernel.exists(row) for row in range(128)]
        assert [x & 1 for x in found] == exists.int().tolist()
        whole = exists.view(-1, 16).all(1).repeat_interleave(16)
        assert [x >> 1 for x in found] == whole.int().tolist()


@pytest.mark.parametrize("page", [1, 5, 48])
def test_a_tile_of_a_latent_cache(page, tmp_path):
    defines = mla.kernel_defines(mla_config(page), torch.bfloat16, paged=True)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + LATENT
    kernel = built(tmp_path, "latent", text, PTX + NO_TMA + MMA, {"wgmma.cuh": NO_WGMMA})
    kernel.memory.restype = ctypes.c_void_p
    g = torch.Generator().manual_seed(page)
    width = -(-200 // page)
    pages, tile, length = 2 * width + 3, 1, 121
    k = torch.randint(1, 9999, (pages, page, 600), generator=g).to(torch.int16)[..., :576]
    table = torch.randperm(pages, generator=g)[: 2 * width].view(2, width).int()
    table[:, (70 // page) :: 7] = -1
    numbers = [width, page, pages, 1, tile, length]
    ctypes.memset(kernel.memory(), 255, 1 << 18)
    kernel.run(
        *(ctypes.c_void_p(x.data_ptr()) for x in (k, table)),
        *((ctypes.c_longlong * 2)(*k.stride()[:2]), (ctypes.c_int * 6)(*numbers)),
    )
    keys = torch.arange(64 * tile, 64 * (tile + 1))
    of = table[1, keys // page]
    exists = (of >= 0) & (keys < length)
    assert 8 < exists.sum() < 56
    assert [kernel.exists(row) for row in range(64)] == exists.int().tolist()
    expected = torch.where(exists[:, None], k[of.clamp(min=0).long(), keys % page], 0)
    assert torch.equal(stored(kernel, kernel.k_at, expected), expected)


def kernel_dim(width):
    return -(-width // 64) * 64


def stored(kernel, address, like):
    """The rows in shared memory."""
    size = like.element_size()
    x = torch.empty_like(like)
    for row in range(len(like)):
        for chunk in range(like.shape[1] * size // 16):
            to = x.data_ptr() + row * like.shape[1] * size + chunk * 16
            ctypes.memmove(to, kernel.memory() + address(row, chunk), 16)
    return x
