"""The backward kernels of heads over 256 wide, run on the CPU."""

import ctypes

import pytest
import torch

from fa_ops.backends.hopper import configs
from tests.backends.hopper.cuda_as_cpp import needs_compiler
from tests.backends.hopper.cuda_cluster import emulated

pytestmark = needs_compiler
CALL = r"""
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
def compiled(tmp_path_factory):
    """Both kernels with some features, by `kernel_defines`' arguments."""
    made = {}

    def compile(D, **features):
        key = D, *features.items()
        if key not in made:
            config = configs.WideBackwardConfig(D, D)
            made[key] = [
                emulated(
                    tmp_path_factory.mktemp(entry), "backward_wide.cu",
                    f"#define ENTRY_{entry} 1\n{CALL}", config, **features,
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


def run(libraries, sizes, seed, is_causal=False, left=None, lens=None, ranges=None, parts=1):
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


def assert_gradients(found, expected):
    for name, x, y in zip(("dq", "dk", "dv"), found, expected):
        assert x.isfinite().all(), name
        assert (x - y).abs().max() <= 2e-2 * max(y.abs().max(), 0.5), name


# Odd seeds compute products as late as possible, even ones as early.
@pytest.mark.parametrize("seed", range(4))
def test_products_copies_and_barriers(seed, compiled):
    sizes = (
        (1, 2, 1, 270, 130, 256, 256), (1, 1, 1, 200, 200, 200, 256), (1, 1, 1, 64, 40, 256, 72),
        (2, 1, 1, 190, 100, 256, 136),
    )[seed]  # fmt: skip
    assert_gradients(*run(compiled(WIDTH), sizes, seed))


@pytest.mark.parametrize("seed", [10, 11])
def test_windows_lengths_and_groups_in_parts(seed, compiled):
    libraries = compiled(WIDTH, window=True, kv_lens=True, split=True)
    sizes = (2, 2, 1, 150, 230, 256, 200)
    options = {"is_causal": True, "lens": [230, 90], "parts": 2, "left": 70 if seed == 11 else None}
    assert_gradients(*run(libraries, sizes, seed, **options))


def test_ranges(compiled):
    first = torch.arange(150).view(1, 1, 150, 1) // 40 * 50
    ranges = torch.cat((first, first + 70), -1)
    ranges[:, :, 60] = 5  # attends nothing
    libraries = compiled(WIDTH, ranges=True, kv_lens=True)
    sizes = (1, 2, 1, 150, 230, 256, 256)
    assert_gradients(*run(libraries, sizes, 20, lens=[201], ranges=ranges))
