"""The backward kernel with whole heads, and with two slots for keys, run on the CPU."""

import ctypes
import dataclasses

import pytest
import torch

from fa_ops.backends.hopper import backward, configs
from tests.backends.hopper.cuda_as_cpp import needs_compiler
from tests.backends.hopper.cuda_cluster import PTX, compiled
from tests.backends.hopper.cuda_forward import FORWARD_PTX

pytestmark = needs_compiler
CALL = r"""
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
    """The kernel and its configuration, by arguments of `backward_config` and `kernel_defines`."""
    made = {}

    def compile(D, whole, slots, sums_rows=False, **features):
        key = D, whole, slots, sums_rows, *features.items()
        if key not in made:
            config = configs.backward_config(D, D, whole_heads=whole, sums_rows=sums_rows)
            config = dataclasses.replace(config, key_slots=slots)
            defines = backward.kernel_defines(config, torch.bfloat16, **features)
            machine = PTX.replace("CTAS = 2, THREADS = 512", "CTAS = 1, THREADS = 384")
            folder = tmp_path_factory.mktemp("whole")
            library = compiled(folder, "backward.cu", CALL, defines, machine + FORWARD_PTX + L2)
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
