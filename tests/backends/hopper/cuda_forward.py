"""Runs the Hopper forward kernel under a dense mask on the CPU, by `cuda_cluster`."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from fa_ops.backends.hopper import programs
from fa_ops.backends.hopper.configs import forward_config
from fa_ops.backends.hopper.kernel_plan import macros
from tests.backends.hopper.cuda_as_cpp import PROGRAM_PTX, SOURCES
from tests.backends.hopper.cuda_cluster import PTX, compiled
from tests.backends.hopper.cuda_masks import SIZES, bias_of, bits_of, sizes_of

FORWARD_PTX = r"""
struct uint2 { u32 x, y; };
constexpr float LN2 = 0.6931471805599453f;
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static void __syncthreads() { meet(&named[blockIdx.x % CTAS][0], THREADS, true); }
static int atomicAdd(int* x, int y) { return *x += y, *x - y; }
static float log2_fast(float x) { return log2f(x); }
static float reciprocal_fast(float x) { return 1.f / x; }
static float softcap_tanh(float x) { return tanhf(x); }
static float __shfl_sync(u32, float x, int from) {
  return __int_as_float((u32)tell(__float_as_int(x))[from & 31]);
}
static float __shfl_xor_sync(u32, float x, int by) { return __shfl_sync(~0u, x, (threadIdx.x & 31) ^ by); }
static bool is_finite_element(u32 x) { return (x & 0x7F80) != 0x7F80; }
static void add_times_zero(u32& sum, u32 x) {
  if (!is_finite_element(x) || !is_finite_element(x >> 16)) sum = ~0u;
}
static u32 swizzled(u32 base, int, int row, int chunk) { return base + row * 128 + ((chunk ^ (row & 7)) << 4); }
static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // m16n8k16 of bfloat16
  const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  u32 x[6][32];
  for (int i = 0; i < 6; i++) std::copy_n(tell(own[i]), 32, x[i]);
  const int lane = threadIdx.x & 31;
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 16; k++) {
      const int row = lane / 4 + (e & 2) * 4, column = lane % 4 * 2 + (e & 1), shift = k & 1 ? 0 : 16;
      const u32 from_a = x[(row >> 3) + (k >> 3) * 2][row % 8 * 4 + k % 8 / 2],
                from_b = x[4 + (k >> 3)][column * 4 + k % 8 / 2];
      d[e] += __int_as_float(from_a << shift & 0xFFFF0000u) * __int_as_float(from_b << shift & 0xFFFF0000u);
    }
}
"""  # noqa: E501

CALL = (
    f'#include "forward.cu"\n{SIZES}'
    + r"""
static ForwardParams params;
static void body_of_thread() { forward(params); }
extern "C" const char* run(u16** data, const Sizes* n, float* lse, unsigned char* bits,
                           const int* lists, const int* lens, [[maybe_unused]] const void* inputs) {
  ForwardParams& p = params;
  static Tensor tensors[4];
  TensorMap* maps[] = {&p.q, &p.k, &p.v};
  Strides* strides[] = {&p.q_strides, &p.k_strides, &p.v_strides};
  for (int i = 0; i < 3; i++) {
    const int S = i ? n->Sk : n->Sq, H = i ? n->Hkv : n->Hq;
    tensors[i] = {data[i], n->D, S, H, n->B, i ? BLOCK_N : 64};
    maps[i]->words[0] = (u64)&tensors[i];
    *strides[i] = {(long long)H * S * n->D, (long long)S * n->D, n->D};
  }
  p.q_rows = data[0], p.k_rows = data[1], p.v_rows = data[2];
  p.out = data[3], p.lse = lse, p.kv_lens = lens;
  p.B = n->B, p.Hq = n->Hq, p.group = n->Hq / n->Hkv, p.Sq = n->Sq, p.Sk = n->Sk;
  p.D = p.Dv = n->D, p.window_left = UNBOUNDED, p.window_right = n->right;
  p.m_blocks = (n->Sq + BLOCK_M - 1) / BLOCK_M, p.tiles = p.m_blocks * n->B * n->Hq;
  p.section = n->B * n->Hq, p.scale_log2 = BIAS_BITS ? LOG2E : 0.25f * LOG2E;
  const int *m = n->mask, pitch = n->pitch[0];
  p.mask = bits, p.mask_range = pitch - 8, p.mask_q = (m[2] > 1) * pitch;
  p.mask_h = (m[1] > 1) * m[2] * pitch, p.mask_b = (m[0] > 1) * m[1] * m[2] * pitch;
  p.blocks = blocks_of(lists, n);
#if BIAS_BITS
  read_bias(p.bias, &tensors[3], bits, m), p.bias.blocks = blocks_of(lists, n);
#endif
#if HAS_PROGRAM
  p.program.inputs = *(const ProgramInputs*)inputs;
  p.program.runs = {lists, n->lists[0] / 132, n->lists[1] / 132, n->tiles[0], n->tiles[1]};
  if (PROGRAM_HAS_SCORE) p.scale_log2 = LOG2E;
#endif
  return run_ctas(body_of_thread, n);
}
"""
)


class ProgramInputs(ctypes.Structure):
    """The struct of programs.cuh."""

    _fields_ = [
        ("values", ctypes.c_void_p), ("indices", ctypes.c_void_p), ("scale", ctypes.c_float),
        ("B", ctypes.c_int), ("H", ctypes.c_int), ("Sq", ctypes.c_int), ("Sk", ctypes.c_int),
    ]  # fmt: skip


def emulated_forward(
    folder: Path, block_n: int = 128, bias_bits: int = 0, skips_tiles: bool = True,
    program: str = "", **features: bool,
) -> ctypes.CDLL:  # fmt: skip
    """The kernel for 16 features under a mask, or with the text of a program.

    `features` are arguments of `macros`.
    """
    config = forward_config(16, 16, bias_bits, few_registers=True, skips_tiles=skips_tiles)
    config = dataclasses.replace(config, block_m=128, block_n=block_n)
    is_bool = not (bias_bits or program)
    defines = macros(config, torch.bfloat16, mask=is_bool, program=int(bool(program)), **features)
    machine = PTX.replace("CTAS = 2, THREADS = 512", f"CTAS = 1, THREADS = {config.threads}")
    others = {"softmax.cuh": softmax_without_fences()}
    if program:
        others["score_program.cuh"] = programs.header(program)
    return compiled(
        folder, "forward.cu", CALL, defines, machine + FORWARD_PTX + PROGRAM_PTX, others
    )


def softmax_without_fences() -> str:
    """`softmax.cuh` without the fences of a GPU's registers."""
    return re.sub(r"void fence\(\) {.*}", "void fence() {}", (SOURCES / "softmax.cuh").read_text())


def run_forward(
    library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: Tensor,
    read: Tensor | None = None, *, seed: int = 0, ctas: int = 1, is_causal: bool = False,
    lens: list[int] | None = None, inputs: ProgramInputs | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, bfloat16 and float32; `read` is what the kernel reads in place of the mask.

    mask: bool or bfloat16, (B|1, H|1, Sq|1, Sk); of a program what its runs, `blocks`, are of.
    """
    (B, Hq, Sq, D), Sk = q.shape, k.shape[2]
    read, sizes = (
        mask if read is None else read,
        sizes_of(q, k, mask, blocks, ctas, seed, is_causal),
    )
    if mask.dtype == torch.bool:
        held, sizes.pitch[0] = bits_of(read, mask)
    else:
        held = bias_of(read)
    out, lse = torch.full((B, Sq, Hq, D), math.nan).bfloat16(), torch.full((B, Hq, Sq), math.nan)
    data = (ctypes.c_void_p * 4)(*(x.data_ptr() for x in (q, k, v, out)))
    given = (ctypes.c_int * B)(*(lens or [Sk] * B))
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (lse, held, blocks))
    program = None if inputs is None else ctypes.byref(inputs)
    error = library.run(data, ctypes.byref(sizes), *pointers, given, program)
    assert error is None, error.decode()
    return out.transpose(1, 2), lse
