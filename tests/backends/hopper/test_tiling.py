"""How a forward pass is cut into tiles: heads of a group, parts of the keys, and their merge."""

import ctypes
import struct

import pytest
import torch

from fa_ops.backends.hopper import forward as prefill
from fa_ops.backends.hopper.configs import forward_config, short_config
from fa_ops.backends.hopper.forward import MAX_SPLITS, Combine, Shape, tiling_of
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.call.options import Cache, Spec
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler


def tiling(D, B, Hq, Hkv, Sq, keys, **can):
    found = tiling_of(forward_config(D, D), Shape(B, Hq, Hkv, Sq, keys, D), 132, **can)
    return found.config.packed_heads, found.splits


@pytest.mark.parametrize(
    "D, B, Hq, Hkv, Sq, heads",
    [
        (128, 8, 32, 8, 64, 4),  # 256 half empty tiles become 128
        (128, 4, 32, 8, 64, 1),  # all run at once anyway
        (128, 64, 28, 4, 77, 7),
        (128, 64, 96, 8, 64, 4),  # 12 heads would leave rows empty
        (64, 16, 64, 8, 64, 8),
        (128, 64, 32, 8, 256, 1),  # tiles are full
        (128, 8, 71, 1, 64, 1),  # no 64 rows hold whole queries of all heads
    ],
)
def test_heads_are_packed_where_tiles_take_fewer_rounds(D, B, Hq, Hkv, Sq, heads):
    assert tiling(D, B, Hq, Hkv, Sq, 8192, can_split=False) == (heads, 1)
    assert tiling(D, B, Hq, Hkv, Sq, Sq) == (heads, 1)


@pytest.mark.parametrize(
    "D, B, Hq, Hkv, Sq, keys, heads, splits",
    [
        (128, 8, 32, 8, 64, 8192, 4, 1),  # tiles of four heads fill the device
        (128, 8, 32, 8, 32, 8192, 4, 2),
        (128, 4, 32, 8, 64, 8192, 4, 2),
        (128, 64, 32, 8, 32, 4096, 4, 1),
        (64, 1, 12, 12, 2048, 2048, 1, 1),  # as many queries as keys
        (128, 1, 8, 1, 24, 512, 1, 1),  # too few keys
    ],
)
def test_keys_are_cut_where_tiles_are_few(D, B, Hq, Hkv, Sq, keys, heads, splits):
    assert tiling(D, B, Hq, Hkv, Sq, keys) == (heads, splits)
    assert tiling(D, B, Hq, Hkv, Sq, keys, can_split=False)[1] == 1


@pytest.mark.parametrize(
    "D, Sq, keys, rows, ctas",
    [
        (64, 77, 77, 128, 2),
        (40, 50, 50, 64, 3),
        (64, 257, 257, 128, 2),  # of a second tile of 256 one row would be used
        (64, 197, 197, 256, 1),
        (64, 577, 577, 256, 1),
        (64, 77, 4096, 256, 1),
        (128, 77, 77, 128, 1),
    ],
)
def test_short_sequences_of_narrow_heads_have_small_tiles(D, Sq, keys, rows, ctas):
    def chosen(Hkv, B, **can):
        shape = Shape(B, 12, Hkv, Sq, keys, D)
        return tiling_of(forward_config(D, D), shape, 132, **can).config

    config = chosen(12, 64)
    assert (config.block_m, config.ctas) == (rows, ctas)
    assert config.ctas * (config.shared_bytes() + 1024) <= 228 << 10
    usual = forward_config(D, D).block_m
    assert chosen(12, 2).block_m == chosen(12, 64, can_pack=False).block_m == usual
    assert chosen(4, 64).block_m == usual


def test_tiles_that_share_a_multiprocessor_are_not_cut():
    """Only the kernel with one CTA has parts of the keys."""
    shape = Shape(1, 12, 12, 64, 8192, 64)
    usual = forward_config(64, 64)
    for Sq in (50, 77):
        config = short_config(usual, Sq, Sq)
        assert config.ctas > 1
        assert tiling_of(config, shape, 132).splits == 1
    assert tiling_of(usual, shape, 132).splits > 1


def test_parts_are_neither_too_small_nor_too_many():
    shapes = [(128, 1, 32, 8, 32), (128, 1, 8, 1, 64), (256, 2, 8, 4, 17), (64, 1, 64, 8, 48)]
    for D, B, Hq, Hkv, Sq in shapes:
        for keys in (1024, 4096, 32768, 131072):
            heads, splits = tiling(D, B, Hq, Hkv, Sq, keys)
            config = forward_config(D, D)
            assert 1 <= splits <= MAX_SPLITS and splits <= keys // config.block_n
            assert keys < 32768 or splits > 3, (D, keys)


MERGE = """
#include <vector>
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float __shfl_xor_sync(u32, float x, int by);
static u32 pack(float x, float y) {
  u32 a, b;
  std::memcpy(&a, &x, 4), std::memcpy(&b, &y, 4);
  auto round = [](u32 u) { return (u + 0x7fff + (u >> 16 & 1)) >> 16; };
  return round(a) | round(b) << 16;
}
#define __global__
#define __launch_bounds__(n)
#define IS_BF16 1
#define HAS_SINKS 1
#define MAX_SPLITS 32
#include "forward_combine.cu"
struct Args { const float *parts, *part_lse, *sinks; Element* out; float* lse; int splits, rows, Sq, Hq, Dv; };
static Args a;
static void merge() {
  forward_combine(a.parts, a.part_lse, a.sinks, a.out, a.lse, a.splits, a.rows, a.Sq, a.Hq, a.Dv);
}
extern "C" void run(Args* args) {
  a = *args;
  for (blockIdx.x = 0; blockIdx.x < (a.rows + 7) / 8; blockIdx.x++)
    for (int warp = 0; warp < 8; warp++) run_warp(merge, warp);
}
"""  # noqa: E501


class MergeArgs(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in "parts part_lse sinks out lse".split()]
    _fields_ += [(n, ctypes.c_int) for n in "splits rows Sq Hq Dv".split()]


@needs_compiler
@pytest.mark.parametrize("splits, Dv", [(2, 64), (5, 200), (32, 128)])
def test_merged_parts_are_attention_to_all_keys(splits, Dv, tmp_path):
    B, Sq, Hq = 2, 3, 5
    g = torch.Generator().manual_seed(splits)
    scores = torch.randn(splits, B, Hq, Sq, 16, generator=g) * 5
    scores[0, 0], scores[:, 1, 1], scores[1, 0, 2, 1] = -torch.inf, -torch.inf, torch.nan
    values = torch.randn(splits, B, Hq, 16, Dv, generator=g)
    sinks = torch.randn(Hq, generator=g)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0)
    parts = (weights @ values).permute(0, 1, 3, 2, 4).contiguous()
    part_lse = lse.transpose(2, 3).contiguous()
    out = torch.empty(B, Sq, Hq, Dv, dtype=torch.bfloat16)
    found = torch.empty(B, Hq, Sq)
    pointers = [x.data_ptr() for x in (parts, part_lse, sinks, out, found)]
    args = MergeArgs(*pointers, splits, B * Sq * Hq, Sq, Hq, Dv)
    built(tmp_path, "merge", MERGE).run(ctypes.byref(args))
    total = torch.logaddexp(lse.logsumexp(0), sinks[:, None].expand(B, Hq, Sq))
    torch.testing.assert_close(found, total, equal_nan=True)
    expected = torch.einsum("pbhs,pbshd->bshd", (lse - total).exp(), parts)
    torch.testing.assert_close(out.float(), expected, atol=4e-3, rtol=8e-3, equal_nan=True)
    assert (out[1, :, 1] == 0).all() and out[0, 1, 2].isnan().all()


def queries_and_cache(Sq=20, S=2048, D=64):
    q = torch.randn(2, 8, Sq, D, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, S, D, dtype=torch.bfloat16) for _ in "kv")
    lens = torch.tensor([30, 2000], dtype=torch.int32)
    return q, k, v, Cache(), Spec(is_causal=True, kv_lens=lens, sinks=torch.ones(8))


def test_parts_are_written_by_one_kernel_and_read_by_the_next(driver, monkeypatch):
    compiled = {}
    monkeypatch.setattr(
        nvrtc, "program",
        lambda source, entry, defines: compiled.update({entry: defines}) or entry,
    )  # fmt: skip
    device = type("Device", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    read, memory = [], []
    monkeypatch.setattr(driver, "read", lambda name, pointers: read.append((name, pointers)) or b"")
    parts = Combine.parts
    monkeypatch.setattr(Combine, "parts", lambda self: memory.append(parts(self)) or memory[-1])
    q, k, v, cache, spec = queries_and_cache()
    out, lse = prefill.cached_forward(q, k, v, cache, spec)
    assert [name for name, _ in read] == ["forward", "forward_combine"]
    assert [one.attributes for one in driver.launched[-2:]] == [0, 1]
    forward, combine = compiled["forward"], compiled["forward_combine"]
    assert (forward["SPLITS_KEYS"], forward["HAS_SINKS"], combine["HAS_SINKS"]) == (1, 0, 1)
    (tensor, at, lse_at), rows = memory[0], 2 * 20 * 8
    splits = (lse_at - at) // (rows * 64 * 4)
    assert splits > 1 and tensor.numel() == splits * rows * 65
    addresses = [struct.unpack("<Q", ctypes.string_at(read[1][1][i], 8))[0] for i in range(5)]
    assert addresses == [at, lse_at, spec.sinks.data_ptr(), out.data_ptr(), lse.data_ptr()]
    numbers = [struct.unpack("<i", ctypes.string_at(read[1][1][i], 4))[0] for i in range(5, 10)]
    assert numbers == [splits, rows, 20, 8, 64]
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
