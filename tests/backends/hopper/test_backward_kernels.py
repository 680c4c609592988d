"""The backward kernels run on the CPU: pairs of CTAs, whole heads, slots for keys, wide heads."""

import ctypes
import dataclasses

import pytest
import torch

from fa_ops.backends.hopper import configs
from fa_ops.backends.hopper.kernel_plan import macros
from tests.backends.hopper.cuda_as_cpp import needs_compiler
from tests.backends.hopper.cuda_cluster import PTX, compiled, emulated
from tests.backends.hopper.cuda_forward import FORWARD_PTX

# The backward kernel with whole heads, and with two slots for keys, run on the CPU.

pytestmark = needs_compiler
WHOLE = r"""
#include "backward.cu"
static BackwardParams params;
static void body_of_thread() { backward(params); }
extern "C" const char* run(u16** data, const int* sizes, const float** rows, float* lse,
                           float* delta, float* sums, float* key_sums, u32* notes,
                           const int* lens) {
  BackwardParams& p = params;
  const int B = sizes[0], Hq = sizes[1], Hkv = sizes[2], Sq = sizes[3], Sk = sizes[4], D = sizes[5];
  const int ctas = sizes[6], seed = sizes[7];
  static Tensor tensors[TENSORS];
  TensorMap* maps[TENSORS] = {&p.q, &p.k, &p.v, &p.grad_out, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < TENSORS; i++) {
    const bool of_keys = i == K || i == V || i == DK || i == DV;
    const int S = of_keys ? Sk : Sq, H = of_keys ? Hkv : Hq;
    tensors[i] = {data[i], D, S, H, B};
    maps[i]->words[0] = (u64)&tensors[i];
    p.tensors[i] = data[i], p.strides[i] = {(long long)H * S * D, (long long)S * D, D};
  }
  static int counter;
  counter = 0, p.counter = &counter;
  p.out = data[7], p.out_strides = p.strides[GRAD_OUT];
  p.saved_lse = rows[0], p.grad_lse = rows[1];
  p.lse = lse, p.delta = delta, p.sums = sums, p.key_sums = key_sums;
  p.nonfinite = notes, p.kv_lens = lens;
  p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.group = Hq / Hkv, p.Sq = Sq, p.Sk = Sk;
  p.window_left = sizes[8], p.window_right = sizes[9];
  p.m_blocks = (Sq + BLOCK_M - 1) / BLOCK_M, p.n_blocks = (Sk + BLOCK_N - 1) / BLOCK_N;
  p.parts = sizes[10], p.part_heads = p.group / p.parts, p.section = B * Hkv * p.parts;
  p.D = p.Dv = D, p.scale = 0.125f, p.scale_log2 = 0.125f * LOG2E;
  gridDim.x = ctas;
  for (int i = 0; i < ctas; i++) {
    if (const char* found = run_cluster(body_of_thread, i, seed + i)) return found;
    const BackwardShared at(SHARED_START);
    if (WHOLE_HEADS) std::memcpy(notes + 8 * i, &memory[0][at.nonfinite], 32);
  }
  return nullptr;
}
"""
L2 = "static float4 load_l2(const float* x) { return {x[0], x[1], x[2], x[3]}; }\n"
FAR = 1 << 29


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernel and its configuration, by arguments of `backward_config` and `macros`."""
    made = {}

    def compile(D, whole, slots, sums_rows=False, **features):
        key = D, whole, slots, sums_rows, *features.items()
        if key not in made:
            config = configs.backward_config(D, D, whole_heads=whole, sums_rows=sums_rows)
            config = dataclasses.replace(config, key_slots=slots)
            defines = macros(config, torch.bfloat16, **features)
            machine = PTX.replace("CTAS = 2, THREADS = 512", "CTAS = 1, THREADS = 384")
            folder = tmp_path_factory.mktemp("whole")
            library = compiled(folder, "backward.cu", WHOLE, defines, machine + FORWARD_PTX + L2)
            made[key] = library, config
        return made[key]

    return compile


def assert_right(kernel, sizes, seed, left=FAR, right=FAR, lens=None, parts=1, ctas=2, broken=None):
    """Compare gradients with those of attention written by hand; sizes: B, Hq, Hkv, Sq, Sk.

    Two seeds of four have gradients of the log-sum-exps too. Of a `broken` query, q and the results
    of the forward pass are NaN.
    """
    library, config = kernel
    B, Hq, Hkv, Sq, Sk = sizes
    D, block, whole = config.head_features, config.block_m, config.whole_heads
    g = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (
        torch.randn(B, H, S, D, generator=g).bfloat16()
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk), (Hq, Sq))
    )
    ends = torch.tensor(lens or [Sk] * B).view(B, 1, 1, 1)
    i, j = torch.arange(Sq).view(-1, 1) + ends - Sq, torch.arange(Sk)
    attended = (j >= i - left) & (j <= i + right) & (j < ends)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(Hq // Hkv, 1) for x in leaves[1:])
    scores = (leaves[0] @ keys.mT * 0.125).masked_fill(~attended, float("-inf"))
    lse = scores.logsumexp(-1).detach()
    out = scores.softmax(-1) @ values
    grad_lse = torch.randn(lse.shape, generator=g) if seed & 2 else torch.zeros_like(lse)
    if broken is not None:
        grad_out[:, :, broken], grad_lse[:, :, broken] = 0, 0
    outputs = out, scores.logsumexp(-1)
    expected = torch.autograd.grad(outputs, leaves, (grad_out.float(), grad_lse))
    out = out.detach().bfloat16()
    if broken is not None:
        q[:, :, broken], out[:, :, broken], lse[:, :, broken] = (float("nan"),) * 3

    m_blocks, n_blocks = -(-Sq // block), -(-Sk // 128)
    rows, pad = m_blocks * block, [0, m_blocks * block - Sq]
    log2 = torch.nn.functional.pad(lse * 1.4426950408889634, pad, value=float("inf")).contiguous()
    delta = torch.nn.functional.pad((out * grad_out).sum(-1) - grad_lse, pad).contiguous()
    if config.sums_rows:  # the kernel writes them
        log2, delta = (torch.full_like(log2, float("nan")) for _ in range(2))
    # what a CTA adds to its own sums needs no zeros
    count, initial = (ctas * Hq // Hkv, float("nan")) if whole else (B * Hq, 0.0)
    sums = torch.full((count * rows * D,), initial)
    key_sums = torch.zeros(B * Hkv * n_blocks * 128 * 2 * D)
    key_notes = 2 * B * Hkv * n_blocks * 8 * (parts == 1)
    notes = torch.full((8 * ctas if whole else key_notes,), 7, dtype=torch.int32)
    dq, dk, dv = grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    tensors = (ctypes.c_void_p * 8)(*(x.data_ptr() for x in (q, k, v, grad_out, *grads, out)))
    saved = (ctypes.c_void_p * 2)(lse.data_ptr(), grad_lse.data_ptr() if seed & 2 else None)
    numbers = (ctypes.c_int * 11)(*sizes, D, ctas, seed, left, right, parts)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (log2, delta, sums, key_sums, notes))
    lens = None if lens is None else (ctypes.c_int * B)(*lens)
    error = library.run(tensors, numbers, saved, *pointers, lens)
    assert error is None, error.decode()
    assert notes.any() == (broken is not None)  # rows that are not finite are computed again
    if not whole:  # by block: half of the rows, four elements, warp, row, columns, second row
        x = sums.view(B * Hq * m_blocks, 2, D // 8, 4, 8, 4, 2, 2).permute(0, 1, 3, 6, 4, 2, 5, 7)
        dq = x.reshape(B, Hq, rows, D)[:, :, :Sq] * 0.125
    if parts > 1:
        x = key_sums.view(B * Hkv, n_blocks, 2, 2, D // 8, 4, 8, 4, 2, 2)
        x = x.permute(2, 0, 1, 3, 5, 8, 6, 4, 7, 9).reshape(2, B, Hkv, n_blocks * 128, D)
        dk, dv = x[0, :, :, :Sk] * 0.125, x[1, :, :, :Sk]
    for name, x, y in zip(("dq", "dk", "dv"), (dq, dk, dv), expected):
        if broken is not None:  # its row, and those of the keys that it attends
            at = torch.arange(Sq) == broken if name == "dq" else attended[0, 0, broken]
            assert x[:, :, at].isnan().all(), name
            x, y = x[:, :, ~at], y[:, :, ~at]
        assert x.isfinite().all(), name
        assert (x.float() - y).abs().max() <= 2e-2 * max(y.abs().max(), 0.5), name


# Odd seeds compute products as late as possible, even ones as early.
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_slots(seed, whole, kernels):
    sizes = (1, 3, 3, 200, 330), (1, 2, 1, 330, 200)
    assert_right(kernels(64, whole, 2), sizes[seed], seed)


@pytest.mark.parametrize("whole, sums_rows", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_two_slots_with_windows(seed, whole, sums_rows, kernels):
    """With blocks of keys that no query attends, and of queries that few attend."""
    sizes, left, right = (
        ((1, 3, 3, 400, 400), FAR, 0),
        ((1, 2, 1, 150, 700), FAR, 0),
        ((1, 1, 1, 520, 520), 40, 0),
        ((1, 1, 1, 150, 500), 100, 10),
    )[seed - 2]
    assert_right(kernels(64, whole, 2, sums_rows, window=True), sizes, seed, left, right)


@pytest.mark.parametrize("seed", [6, 7])
def test_two_slots_for_lengths_and_groups_in_parts(seed, kernels):
    kernel = kernels(64, False, 2, window=True, kv_lens=True, split=True)
    assert_right(kernel, (2, 2, 1, 150, 300), seed, right=0, lens=[300, 170], parts=2)


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_128_features(seed, kernels):
    sizes, left, right = (
        ((1, 3, 3, 300, 300), FAR, 0),
        ((1, 2, 1, 70, 400), FAR, 0),
        ((1, 1, 1, 260, 260), 30, FAR),
    )[seed - 8]
    assert_right(kernels(128, True, 1, True, window=True), sizes, seed, left, right)


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("D, slots", [(64, 2), (128, 1)])
def test_a_broken_query_reaches_what_attends_it_alone(D, slots, seed, kernels):
    kernel = kernels(D, True, slots, True, window=True)
    assert_right(kernel, (1, 2, 1, 150, 200), seed, right=0, broken=70)


@pytest.mark.parametrize("seed", range(20, 26))
def test_row_sums_are_waited_for(seed, kernels):
    assert_right(kernels(64, True, 2, True), (1, 1, 1, 100, 60), seed, ctas=1)


@pytest.mark.parametrize("D, slots", [(64, 2), (128, 1)])
def test_more_heads_than_ctas(D, slots, kernels):
    assert_right(kernels(D, True, slots, True, window=True), (2, 6, 3, 40, 90), 14, right=0, ctas=4)


# The backward kernel for pairs of CTAs, run on the CPU.

PAIR = r"""
#include "backward_pair.cu"
static BackwardParams params;
static void body_of_thread() { backward(params); }
extern "C" const char* run(u16** data, const int* sizes, float* lse, float* delta, float* sums,
                           float* key_sums, u32* notes, const int* lens, int parts, int seed) {
  BackwardParams& p = params;
  const int B = sizes[0], Hq = sizes[1], Hkv = sizes[2], Sq = sizes[3], Sk = sizes[4], D = HEAD_DIM;
  static Tensor tensors[TENSORS];
  TensorMap* maps[TENSORS] = {&p.q, &p.k, &p.v, &p.grad_out, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < TENSORS; i++) {
    const bool of_keys = i == K || i == V || i == DK || i == DV;
    tensors[i] = {data[i], D, of_keys ? Sk : Sq, of_keys ? Hkv : Hq, B};
    maps[i]->words[0] = (u64)&tensors[i];
  }
  p.lse = lse, p.delta = delta, p.sums = sums, p.key_sums = key_sums;
  p.nonfinite = notes, p.kv_lens = lens;
  p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.group = Hq / Hkv, p.Sq = Sq, p.Sk = Sk;
  p.window_left = UNBOUNDED, p.window_right = 0;
  p.m_blocks = (Sq + 63) / 64, p.n_blocks = (Sk + BLOCK_N - 1) / BLOCK_N;
  p.section = B * Hkv * parts, p.parts = parts, p.part_heads = Hq / Hkv / parts, p.D = p.Dv = D;
  p.scale = 0.125f, p.scale_log2 = 0.125f * LOG2E;
  for (int i = 0; i < p.n_blocks * B * Hkv * parts; i++)
    if (const char* found = run_cluster(body_of_thread, i, seed + i)) return found;
  return nullptr;
}
"""


@pytest.fixture(scope="module")
def pair_kernel(tmp_path_factory):
    """The kernel with some features, by the arguments of `macros`."""
    made = {}

    def compile(D, **features):
        key = D, *features.items()
        if key not in made:
            config = configs.BackwardConfig(D, D, is_paired=True)
            folder = tmp_path_factory.mktemp("pair")
            made[key] = emulated(folder, "backward_pair.cu", PAIR, config, **features)
        return made[key]

    return compile


def run_pair(library, D, sizes, seed, is_causal=False, lens=None, parts=1):
    """Gradients by the kernel, as float32, and those of attention written by hand."""
    B, Hq, Hkv, Sq, Sk = sizes
    g = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (
        torch.randn(B, H, S, D, generator=g).bfloat16()
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk), (Hq, Sq))
    )
    attended = torch.ones(B, 1, Sq, Sk, dtype=torch.bool)
    ends = torch.tensor(lens or [Sk] * B)
    attended &= torch.arange(Sk) < ends.view(B, 1, 1, 1)
    if is_causal:
        last = torch.arange(Sq).view(Sq, 1) + ends.view(B, 1, 1, 1) - Sq
        attended &= torch.arange(Sk) <= last
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(Hq // Hkv, 1) for x in leaves[1:])
    scores = (leaves[0] @ keys.mT * 0.125).masked_fill(~attended, float("-inf"))
    lse = scores.logsumexp(-1)
    rows = lse > float("-inf")
    weights = (scores - torch.where(rows, lse, 0.0).unsqueeze(-1)).exp()
    out = weights @ values
    expected = torch.autograd.grad(out, leaves, grad_out.float())
    for b, end in enumerate(ends):
        if end < Sk:  # keys that do not count may hold anything
            k[b, :, end:] = v[b, :, end:] = float("nan")

    m_blocks, n_blocks = -(-Sq // 64), -(-Sk // 128)
    pad = m_blocks * 64 - Sq
    log2 = torch.where(rows, lse * 1.4426950408889634, float("inf"))
    log2 = torch.nn.functional.pad(log2.detach(), (0, pad), value=float("inf")).contiguous()
    delta = torch.nn.functional.pad((out * grad_out).sum(-1).detach(), (0, pad)).contiguous()
    sums = torch.zeros(B * Hq * m_blocks * 64 * D)
    key_sums = torch.zeros(B * Hkv * n_blocks * 128 * 2 * D)
    notes = torch.full((2 * B * Hkv * n_blocks * 8,), 7, dtype=torch.int32)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    tensors = (ctypes.c_void_p * 7)(*(x.data_ptr() for x in (q, k, v, grad_out, dq, dk, dv)))
    lens = None if lens is None else (ctypes.c_int * B)(*lens)
    error = library.run(
        tensors, (ctypes.c_int * 5)(*sizes),
        *(ctypes.c_void_p(x.data_ptr()) for x in (log2, delta, sums, key_sums, notes)),
        lens, parts, seed,
    )  # fmt: skip
    assert error is None, error.decode()
    # by half of the columns, four elements, warp, row, pair of columns, and element
    x = sums.view(B * Hq, m_blocks, 2, D // 16, 4, 8, 4, 2, 2)
    rows = x.permute(0, 1, 4, 7, 5, 2, 3, 6, 8).reshape(B, Hq, m_blocks * 64, D)[:, :, :Sq]
    found = [rows * 0.125, dk.float(), dv.float()]
    if parts > 1:
        x = key_sums.view(B * Hkv, n_blocks, 2, 2, D // 8, 4, 8, 4, 2, 2)
        x = x.permute(2, 0, 1, 3, 5, 8, 6, 4, 7, 9).reshape(2, B, Hkv, n_blocks * 128, D)
        found[1:] = x[0, :, :, :Sk] * 0.125, x[1, :, :, :Sk]
    else:
        assert not notes.any()
    return found, expected


def assert_gradients(found, expected):
    for name, x, y in zip(("dq", "dk", "dv"), found, expected):
        assert x.isfinite().all(), name
        assert (x - y).abs().max() <= 2e-2 * max(y.abs().max(), 0.5), name


# Odd seeds compute products as late as possible, even ones as early.
@pytest.mark.parametrize("seed", range(4))
def test_products_copies_and_barriers_of_pairs(seed, pair_kernel):
    library = pair_kernel(128)
    sizes = ((1, 2, 1, 330, 130), (1, 1, 1, 200, 200), (1, 1, 1, 64, 40), (2, 1, 1, 190, 100))[seed]
    assert_gradients(*run_pair(library, 128, sizes, seed))


@pytest.mark.parametrize("seed", [43, 49, 63])
def test_keys_are_written_through_queries_that_no_warp_reads(seed, pair_kernel):
    """The last of three blocks of Q is where the first was, through which dK is written."""
    assert_gradients(*run_pair(pair_kernel(128), 128, (1, 1, 1, 190, 100), seed))


@pytest.mark.parametrize("seed", [10, 11])
def test_causal_lengths_and_groups_in_parts(seed, pair_kernel):
    library = pair_kernel(128, window=True, kv_lens=True, split=True)
    sizes, lens = (2, 2, 1, 150, 300), [300, 90]
    options = {"is_causal": True, "lens": lens, "parts": 2}
    assert_gradients(*run_pair(library, 128, sizes, seed, **options))


def test_256_features(pair_kernel):
    library = pair_kernel(256)
    assert_gradients(*run_pair(library, 256, (1, 1, 1, 130, 100), 21))


# The backward kernels of heads over 256 wide, run on the CPU.

WIDE = r"""
#include "backward_wide.cu"
static BackwardParams params;
#if OF_QUERIES
static void body_of_thread() { wide_queries(params); }
#else
static void body_of_thread() { wide_keys(params); }
#endif
extern "C" const char* run(u16** data, const int* sizes, float* lse, float* delta, float* key_sums,
                           u32* notes, const int* lens, const int2* ranges, const int4* bounds,
                           const int* window, int parts, int seed) {
  BackwardParams& p = params;
  const int B = sizes[0], Hq = sizes[1], Hkv = sizes[2], Sq = sizes[3], Sk = sizes[4];
  static Tensor tensors[TENSORS];
  TensorMap* maps[TENSORS] = {&p.q, &p.k, &p.v, &p.grad_out, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < TENSORS; i++) {
    const bool of_keys = i == K || i == V || i == DK || i == DV;
    const int D = sizes[i == V || i == DV || i == GRAD_OUT ? 6 : 5];
    tensors[i] = {data[i], D, of_keys ? Sk : Sq, of_keys ? Hkv : Hq, B};
    maps[i]->words[0] = (u64)&tensors[i];
  }
  p.lse = lse, p.delta = delta, p.key_sums = key_sums;
  p.nonfinite = notes, p.kv_lens = lens, p.ranges = ranges, p.bounds = bounds, p.range_heads = 1;
  p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.group = Hq / Hkv, p.Sq = Sq, p.Sk = Sk;
  p.window_left = window[0], p.window_right = window[1];
  p.m_blocks = (Sq + 63) / 64, p.n_blocks = (Sk + 63) / 64;
  p.section = 2, p.query_section = 2, p.parts = parts, p.part_heads = Hq / Hkv / parts;
  p.D = sizes[5], p.Dv = sizes[6];
  p.scale = 0.125f, p.scale_log2 = 0.125f * LOG2E;
  for (int i = 0; i < (OF_QUERIES ? p.m_blocks * B * Hq : p.n_blocks * B * Hkv * parts); i++)
    if (const char* found = run_cluster(body_of_thread, i, seed + i)) return found;
  return nullptr;
}
"""


@pytest.fixture(scope="module")
def wide_kernels(tmp_path_factory):
    """Both kernels with some features, by the arguments of `macros`."""
    made = {}

    def compile(D, **features):
        key = D, *features.items()
        if key not in made:
            config = configs.WideBackwardConfig(D, D)
            made[key] = [
                emulated(
                    tmp_path_factory.mktemp(entry), "backward_wide.cu",
                    f"#define ENTRY_{entry} 1\n{WIDE}", config, **features,
                )
                for entry in config.products
            ]  # fmt: skip
        return made[key]

    return compile


def attended_keys(sizes, is_causal, left, lens, ranges):
    """(B, 1, Sq, Sk)"""
    B, _, _, Sq, Sk = sizes[:5]
    ends = torch.tensor(lens or [Sk] * B).view(B, 1, 1, 1)
    keys = torch.arange(Sk)
    attended = (keys < ends).expand(B, 1, Sq, Sk)
    diagonal = torch.arange(Sq).view(Sq, 1) + ends - Sq
    if is_causal:
        attended = attended & (keys <= diagonal)
    if left is not None:
        attended = attended & (keys >= diagonal - left)
    if ranges is not None:
        attended = attended & (keys >= ranges[..., :1]) & (keys < ranges[..., 1:])
    return attended


def clipped(ranges, lens, sizes):
    """The keys of each query of (B, 1, Sq, 2), padded, and the bounds of each block of queries."""
    B, Sq = sizes[0], sizes[3]
    pad = -Sq % 64
    if lens is not None:
        ranges = ranges.clamp(max=torch.tensor(lens).view(B, 1, 1, 1))
    low, high = ranges[:, 0].unbind(-1)
    high = torch.maximum(low, high)
    padded = [torch.nn.functional.pad(x, (0, pad)).view(B, -1, 64) for x in (low, high)]
    exists = torch.nn.functional.pad(high > low, (0, pad)).view(B, -1, 64)
    real = torch.nn.functional.pad(torch.ones(B, Sq, dtype=torch.bool), (0, pad)).view(B, -1, 64)
    low, high = padded
    bounds = torch.stack(
        (
            low.masked_fill(~exists, 1 << 29).amin(-1),
            high.masked_fill(~exists, 0).amax(-1),
            low.masked_fill(~real, 0).amax(-1),
            high.masked_fill(~real, 1 << 29).amin(-1),
        ),
        -1,
    )
    rows = torch.stack(padded, -1).view(B, -1, 2)
    return rows.int().contiguous(), bounds.int().contiguous()


def run_wide(libraries, sizes, seed, is_causal=False, left=None, lens=None, ranges=None, parts=1):
    """Gradients by the kernels, as float32, and those of attention written by hand."""
    B, Hq, Hkv, Sq, Sk, D, Dv = sizes
    g = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (
        torch.randn(B, H, S, W, generator=g).bfloat16()
        for H, S, W in ((Hq, Sq, D), (Hkv, Sk, D), (Hkv, Sk, Dv), (Hq, Sq, Dv))
    )
    attended = attended_keys(sizes, is_causal, left, lens, ranges)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(Hq // Hkv, 1) for x in leaves[1:])
    scores = (leaves[0] @ keys.mT * 0.125).masked_fill(~attended, float("-inf"))
    lse = scores.logsumexp(-1)
    rows = lse > float("-inf")
    weights = (scores - torch.where(rows, lse, 0.0).unsqueeze(-1)).exp()
    out = weights @ values
    expected = torch.autograd.grad(out, leaves, grad_out.float())
    for b, end in enumerate(lens or []):  # keys that do not count may hold anything
        k[b, :, end:] = v[b, :, end:] = float("nan")

    m_blocks, n_blocks = -(-Sq // 64), -(-Sk // 64)
    pad = m_blocks * 64 - Sq
    log2 = torch.where(rows, lse * 1.4426950408889634, float("inf"))
    log2 = torch.nn.functional.pad(log2.detach(), (0, pad), value=float("inf")).contiguous()
    delta = torch.nn.functional.pad((out * grad_out).sum(-1).detach(), (0, pad)).contiguous()
    config_sums = torch.zeros(B * Hkv * parts * n_blocks * 64 * 2 * WIDTH)
    split = parts > 1
    of_keys = 0 if split else 2 * B * Hkv * n_blocks * 4
    notes = torch.full((of_keys + B * Hq * m_blocks * 4,), 7, dtype=torch.int32)
    dq, dk, dv = (torch.full_like(x, 3.0) for x in (q, k, v))
    tensors = (ctypes.c_void_p * 7)(*(x.data_ptr() for x in (q, k, v, grad_out, dq, dk, dv)))
    c_lens = None if lens is None else (ctypes.c_int * B)(*lens)
    clip = (None, None) if ranges is None else clipped(ranges, lens, sizes)
    window = (ctypes.c_int * 2)(1 << 29 if left is None else left, 0 if is_causal else 1 << 29)
    for library in libraries:
        error = library.run(
            tensors, (ctypes.c_int * 7)(*sizes),
            *(ctypes.c_void_p(x.data_ptr()) for x in (log2, delta, config_sums, notes)), c_lens,
            *(None if x is None else ctypes.c_void_p(x.data_ptr()) for x in clip),
            window, parts, seed,
        )  # fmt: skip
        assert error is None, error.decode()
    found = [dq.float(), dk.float(), dv.float()]
    if split:
        # by part, block, tensor, eight columns, warp, row, pair of columns, and element
        x = config_sums.view(B * Hkv, parts, n_blocks, 2, WIDTH // 8, 4, 8, 4, 2, 2).sum(1)
        x = x.permute(2, 0, 1, 4, 7, 5, 3, 6, 8).reshape(2, B, Hkv, n_blocks * 64, WIDTH)
        found[1:] = x[0, :, :, :Sk, :D] * 0.125, x[1, :, :, :Sk, :Dv]
    assert not notes.any()
    return found, expected


WIDTH = 256  # features of the kernels that are tested: half of what calls have


# Odd seeds compute products as late as possible, even ones as early.
@pytest.mark.parametrize("seed", range(4))
def test_products_copies_and_barriers_of_wide_heads(seed, wide_kernels):
    sizes = (
        (1, 2, 1, 270, 130, 256, 256), (1, 1, 1, 200, 200, 200, 256), (1, 1, 1, 64, 40, 256, 72),
        (2, 1, 1, 190, 100, 256, 136),
    )[seed]  # fmt: skip
    assert_gradients(*run_wide(wide_kernels(WIDTH), sizes, seed))


@pytest.mark.parametrize("seed", [10, 11])
def test_windows_lengths_and_groups_in_parts(seed, wide_kernels):
    libraries = wide_kernels(WIDTH, window=True, kv_lens=True, split=True)
    sizes = (2, 2, 1, 150, 230, 256, 200)
    options = {"is_causal": True, "lens": [230, 90], "parts": 2, "left": 70 if seed == 11 else None}
    assert_gradients(*run_wide(libraries, sizes, seed, **options))


def test_ranges(wide_kernels):
    first = torch.arange(150).view(1, 1, 150, 1) // 40 * 50
    ranges = torch.cat((first, first + 70), -1)
    ranges[:, :, 60] = 5  # attends nothing
    libraries = wide_kernels(WIDTH, ranges=True, kv_lens=True)
    sizes = (1, 2, 1, 150, 230, 256, 256)
    assert_gradients(*run_wide(libraries, sizes, 20, lens=[201], ranges=ranges))
