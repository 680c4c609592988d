"""Forward passes of the Hopper backend on the host: the kernels and tiles of a call; exact rows."""

import ctypes
import struct

import numpy as np
import pytest
import torch

from fa_ops.backends import mask_blocks
from fa_ops.backends.hopper import forward
from fa_ops.backends.hopper import forward as prefill
from fa_ops.backends.hopper.configs import forward_config, short_config
from fa_ops.backends.hopper.forward import MAX_SPLITS, Combine, Shape, tiling_of
from fa_ops.backends.hopper.kernel_plan import UNBOUNDED, window_sides
from fa_ops.backends.hopper.runtime import nvrtc, structs
from fa_ops.call.call import attention_call
from tests.backends.hopper.cuda_as_cpp import built, needs_compiler


@pytest.fixture
def compiled(driver, monkeypatch):
    """The rows of each tile that was asked for, in order."""
    rows = []

    def program(source, entry, defines):
        if "BLOCK_M" in defines:
            rows.append(defines["BLOCK_M"])
        return entry

    monkeypatch.setattr(nvrtc, "program", program)
    return rows


@pytest.mark.parametrize(
    "is_causal, left, right, sides, is_bounded",
    [
        (False, -1, -1, (UNBOUNDED, UNBOUNDED), False),
        (False, 0, -1, (0, UNBOUNDED), True),
        (False, 0, 5, (0, 5), True),
        (False, 7, 0, (7, 0), True),
        (False, 2**31 - 1, 2**31 - 1, (UNBOUNDED, UNBOUNDED), False),
        (True, -1, -1, (UNBOUNDED, 0), True),
        (True, 0, 5, (0, 0), True),
    ],
)
def test_window_sides(is_causal, left, right, sides, is_bounded):
    assert window_sides(is_causal, left, right) == (*sides, is_bounded)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_left": 70}])
@pytest.mark.parametrize("D, rows", [(64, 256), (128, 128), (192, 128), (256, 128), (512, 128)])
def test_nothing_compiles_when_only_lengths_change(compiled, D, rows, options):
    for S in (100, 3000):
        q = torch.empty(1, 2, S, D, dtype=torch.bfloat16)
        forward.forward(attention_call(q, q, q, **options))
        assert compiled == [rows]


def test_wide_heads_have_a_cluster_of_two_ctas_for_each_tile(driver):
    q, k = (torch.empty(2, H, 300, 512, dtype=torch.bfloat16) for H in (6, 2))
    forward.forward(attention_call(q, k, k, is_causal=True))
    grid, _ = driver.last("forward_wide")
    assert grid[0] == 2 * 2 * 6 * 3


def test_masks_and_dropout_have_a_tile_of_their_own(compiled):
    q = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    forward.forward(
        attention_call(q, q, q, attn_mask=torch.ones(100, 100, dtype=torch.bfloat16)[None, None])
    )
    assert compiled == [192]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_tiles_are_skipped_by_the_lists_of_a_mask(dtype, driver, compiled, monkeypatch):
    layout = structs.struct_layout("forward_rows.cuh", "ForwardParams")
    read = driver.read
    monkeypatch.setattr(driver, "read", lambda name, at: read(name, at) if name == "forward" else 0)
    driver.struct_bytes = layout.size
    q, mask = torch.empty(2, 4, 200, 64).bfloat16(), torch.ones(2, 1, 200, 200, dtype=dtype)
    blocks = mask_blocks.mask_blocks(mask)
    at = layout.fields["blocks"].offset
    if dtype != torch.bool:
        bias = structs.struct_layout("masks.cuh", "Bias")
        at = layout.fields["bias"].offset + bias.fields["blocks"].offset
    for lists, expected in (
        (None, (0, 0, 0, 0, 0)),
        (blocks, (blocks.data_ptr(), 4 * blocks.shape[2], 0, 2, 2)),
    ):
        forward.forward(attention_call(q, q, q, attn_mask=mask, mask_blocks=lists))
        _, data = driver.last("forward")
        assert struct.unpack_from("<Q2q2i", data, at) == expected
    assert compiled[-2:] == [192, 128]


# How a forward pass is cut into tiles: heads of a group, parts of the keys, and their merge.


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
    sinks = torch.ones(8)
    return attention_call(q, k, v, is_causal=True, kv_lens=lens, sinks=sinks, over_cache=True)


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
    call = queries_and_cache()
    out, lse = prefill.cached_forward(call)
    assert [name for name, _ in read] == ["forward", "forward_combine"]
    assert [one.attributes for one in driver.launched[-2:]] == [0, 1]
    forward, combine = compiled["forward"], compiled["forward_combine"]
    assert (forward["SPLITS_KEYS"], forward["HAS_SINKS"], combine["HAS_SINKS"]) == (1, 0, 1)
    (tensor, at, lse_at), rows = memory[0], 2 * 20 * 8
    splits = (lse_at - at) // (rows * 64 * 4)
    assert splits > 1 and tensor.numel() == splits * rows * 65
    sinks = call.operands.sinks
    addresses = [struct.unpack("<Q", ctypes.string_at(read[1][1][i], 8))[0] for i in range(5)]
    assert addresses == [at, lse_at, sinks.data_ptr(), out.data_ptr(), lse.data_ptr()]
    numbers = [struct.unpack("<i", ctypes.string_at(read[1][1][i], 4))[0] for i in range(5, 10)]
    assert numbers == [splits, rows, 20, 8, 64]
    assert out.shape == call.query.shape and out.transpose(1, 2).is_contiguous()


# The exact path of a row that the fast path cannot give: its own source, as C++ on the CPU.

ROW = """
#define IS_BF16 1
#include "exact_row.cuh"
"""
# A row of 64 columns of values, with a mask of its keys.
CALL = """
struct Row {
  int begin, end, D;
  float scale_log2;
  const Element *q, *k, *v;
  const unsigned char* kept;
  bool attends(int key) const { return kept[key]; }
  float score(int key) const { return dot(q, k + key * D, D); }
  float weight(int, float x) const { return x; }
  const Element* value(int key) const { return v + key * 64; }
};
static Row row;
static float* out;
static bool is_lost;
static int replaced[32];
static void one_warp() {
  ExactColumns found = {};
  const int lane = threadIdx.x & 31;
  replaced[lane] = attend_exactly(row, lane * 2, 64, found, is_lost);
  out[lane * 2] = found.x.x / found.sum, out[lane * 2 + 1] = found.x.y / found.sum;
  if (lane == 0) out[64] = found.max, out[65] = found.sum;
}
extern "C" int run(const Row* given, float* to, int lost) {
  row = *given, out = to, is_lost = lost;
  run_warp(one_warp);
  for (int lane = 1; lane < 32; lane++) if (replaced[lane] != replaced[0]) return -1;
  return replaced[0];
}
"""


class Row(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("first", "last", "D")),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "kept")),
    ]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return built(tmp_path_factory.mktemp("exact"), "row", ROW + CALL).run


def attend(kernel, q, k, v, kept, first, last, scale, lost=False):
    """Whether the row is replaced, by what, and its lse."""
    bits = np.ascontiguousarray(kept, dtype=np.uint8)
    row = Row(
        first, last, len(q), scale * np.log2(np.e), q.data_ptr(), k.data_ptr(), v.data_ptr(),
        bits.ctypes.data,
    )  # fmt: skip
    out = np.full(66, 7.0, np.float32)
    found = kernel(ctypes.byref(row), out.ctypes.data_as(ctypes.c_void_p), int(lost))
    return found, out[:64], out[64] * scale + np.log(out[65])


def inputs(seed, keys=150, D=40):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*s, generator=g) for s in ((D,), (keys, D), (keys, 64)))
    kept = torch.rand(keys, generator=g) < 0.7
    return *(x.bfloat16() for x in (q, k, v)), kept


def expected(q, k, v, kept, first, last, scale):
    keys = torch.arange(len(k))[(torch.arange(len(k)) >= first) & (torch.arange(len(k)) < last)]
    keys = keys[kept[keys]]
    s = (k[keys].double() @ q.double()) * scale
    return s.softmax(0) @ v[keys].double(), s.logsumexp(0)


@needs_compiler
@pytest.mark.parametrize("seed", range(8))
def test_what_a_row_does_not_attend_does_not_reach_it(kernel, seed):
    q, k, v, kept = inputs(seed)
    first, last = (0, 150) if seed % 2 else (13, 101)
    want, lse = expected(q, k, v, kept, first, last, 0.2)
    v[~kept], k[~kept] = torch.nan, torch.inf
    v[:first], v[last:] = torch.inf, torch.nan
    found, out, got = attend(kernel, q, k, v, kept, first, last, 0.2)
    assert found == 1
    np.testing.assert_allclose(out, want.numpy(), rtol=1e-4, atol=1e-5)
    assert abs(got - lse.item()) < 1e-4


@needs_compiler
def test_the_fast_result_stands_where_an_attended_key_explains_it(kernel):
    q, k, v, kept = inputs(0)
    v[40], kept[40] = torch.nan, True
    assert attend(kernel, q, k, v, kept, 0, 150, 0.2)[0] == 0
    found, out, _ = attend(kernel, q, k, v, kept, 0, 150, 0.2, lost=True)
    assert found == 1 and np.isnan(out).all()


@needs_compiler
def test_one_poisoned_column_stays_in_its_column(kernel):
    q, k, v, kept = inputs(1)
    kept[60] = True
    want, _ = expected(q, k, v, kept, 0, 150, 0.2)
    v[60, 5] = torch.inf
    found, out, _ = attend(kernel, q, k, v, kept, 0, 150, 0.2)
    assert found == 1 and np.isinf(out[5])
    rest = np.arange(64) != 5
    np.testing.assert_allclose(out[rest], want.numpy()[rest], rtol=1e-4, atol=1e-5)


@needs_compiler
def test_scores_too_large_for_their_scaled_differences(kernel):
    q, k = torch.full((40,), 133120.0).bfloat16(), torch.full((150, 40), 133120.0).bfloat16()
    _, _, v, kept = inputs(2)
    found, out, _ = attend(kernel, q, k, v, kept, 0, 150, 40**-0.5, lost=True)
    assert found == 1
    np.testing.assert_allclose(out, v[kept].double().mean(0).numpy(), rtol=1e-3, atol=1e-4)


@needs_compiler
def test_a_row_without_keys(kernel):
    q, k, v, kept = inputs(3)
    found, _, lse = attend(kernel, q, k, v, np.zeros(150), 0, 150, 0.2)
    assert found == 1 and lse == -np.inf


SOFTCAP = r"""
#include <cmath>
using u32 = unsigned;
#define DEVICE inline
constexpr float LOG2E = 1.4426950408889634f;
static bool __all_sync(u32, bool x) { return x; }
static float exp2_fast(float x) { return exp2f(x); }
static float reciprocal_fast(float x) { return 1.f / x; }
"""


# Of HAS_SOFTCAP: what scores are small, in softcaps, and the relative error of their polynomial.
SMALL = {1: (0.4, 8e-6), 2: (0.15, 1.5e-7)}


@needs_compiler
@pytest.mark.parametrize("kind", SMALL)
def test_softcaps_of_small_and_large_scores(kind, tmp_path):
    """A polynomial for small scores, if all scores of a warp are, else tanh for all."""
    text = (structs.SOURCES / "ptx.cuh").read_text()
    functions = text[text.index("// With an absolute error of 1e-7.") :]
    functions = functions[: functions.index("#endif")] + "#endif\n"
    run = (
        'extern "C" void run(float (&s)[8], float scale) { softcap_scores(s, scale); }\n'
        'extern "C" bool small(float (&s)[8], float scale) { return are_small(s, scale); }\n'
        'extern "C" float one(float x) { return softcap_tanh(x); }\n'
    )
    ptx = f"#define HAS_SOFTCAP {kind}\n{SOFTCAP}{functions}"
    library = built(tmp_path, "softcap", run, ptx)
    library.one.restype, library.small.restype = ctypes.c_float, ctypes.c_bool
    limit, relative = SMALL[kind]
    for largest in (limit, 0.1, 3.0, 60.0):
        for scale in (0.0025, 300.0, 3e-5, 9e4, 1e-12, 1e30):
            x = torch.linspace(-1, 1, 8) * largest * 0.9999 / scale
            expected = torch.tanh(x.double() * scale)
            found = x.clone()
            small = library.small(ctypes.c_void_p(x.data_ptr()), ctypes.c_float(scale))
            assert small == (largest <= limit and 1e-6 < scale < 1e6)
            library.run(ctypes.c_void_p(found.data_ptr()), ctypes.c_float(scale))
            error = (found - expected).abs()
            most = relative * expected.abs() if small else torch.tensor(2e-7)
            assert (error <= most).all(), (largest, scale)
    x = torch.tensor([0.01, 0.2, -0.3, 0.5001, float("nan"), float("inf"), -70.0, 0.0])
    found = x.clone()
    library.run(ctypes.c_void_p(found.data_ptr()), ctypes.c_float(1.0))
    one = torch.tensor([library.one(ctypes.c_float(value)) for value in x.tolist()])
    assert torch.equal(found.nan_to_num(7.0), one.nan_to_num(7.0))  # one is large: all are exact
