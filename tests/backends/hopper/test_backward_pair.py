"""The backward kernel for pairs of CTAs, run on the CPU."""

import ctypes

import pytest
import torch

from fa_ops.backends.hopper import configs
from tests.backends.hopper.cuda_as_cpp import needs_compiler
from tests.backends.hopper.cuda_cluster import emulated

pytestmark = needs_compiler
CALL = r"""
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
def compiled(tmp_path_factory):
    """The kernel with some features, by `kernel_defines`' arguments."""
    made = {}

    def compile(D, **features):
        key = D, *features.items()
        if key not in made:
            config = configs.BackwardConfig(D, D, is_paired=True)
            folder = tmp_path_factory.mktemp("pair")
            made[key] = emulated(folder, "backward_pair.cu", CALL, config, **features)
        return made[key]

    return compile


def run(library, D, sizes, seed, is_causal=False, lens=None, parts=1):
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
def test_products_copies_and_barriers(seed, compiled):
    library = compiled(128)
    sizes = ((1, 2, 1, 330, 130), (1, 1, 1, 200, 200), (1, 1, 1, 64, 40), (2, 1, 1, 190, 100))[seed]
    assert_gradients(*run(library, 128, sizes, seed))


@pytest.mark.parametrize("seed", [43, 49, 63])
def test_keys_are_written_through_queries_that_no_warp_reads(seed, compiled):
    """The last of three blocks of Q is where the first was, through which dK is written."""
    assert_gradients(*run(compiled(128), 128, (1, 1, 1, 190, 100), seed))


@pytest.mark.parametrize("seed", [10, 11])
def test_causal_lengths_and_groups_in_parts(seed, compiled):
    library = compiled(128, window=True, kv_lens=True, split=True)
    sizes, lens = (2, 2, 1, 150, 300), [300, 90]
    options = {"is_causal": True, "lens": lens, "parts": 2}
    assert_gradients(*run(library, 128, sizes, seed, **options))


def test_256_features(compiled):
    library = compiled(256)
    assert_gradients(*run(library, 256, (1, 1, 1, 130, 100), 21))
