"""Compiles CUDA sources as C++ for the CPU, with stand-ins for `ptx.cuh`."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from fa_ops.backends import hopper

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
SOURCES = Path(hopper.__file__).parent / "cuda"
HALVES = """
static u32 pack_halves(float low, float high) {
  const _Float16 x[2] = {(_Float16)low, (_Float16)high};
  u32 y;
  return std::memcpy(&y, x, 4), y;
}
static float2 unpack_halves(u32 x) {
  _Float16 y[2];
  return std::memcpy(y, &x, 4), float2{(float)y[0], (float)y[1]};
}
"""
# What programs.cuh and score_program.cuh need of `ptx.cuh`.
PROGRAM_PTX = """
template <class T> static T __ldg(const T* x) { return *x; }
static float tanh_precise(float x) { return tanhf(x); }
static float rsqrtf(float x) { return 1.f / sqrtf(x); }
static float sin_fast(float x) { return sinf(x); }
static float cos_fast(float x) { return cosf(x); }
static float nan_min(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
static float nan_max(float a, float b) { return a != a ? a : b != b ? b : a < b ? b : a; }
"""
# In place of `ptx.cuh`, for one warp at a time. The lanes of a warp are coroutines: one that
# exchanges a value continues when all have.
WARP = """
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ucontext.h>
using std::min, std::max;
typedef unsigned int u32;
typedef unsigned long long u64;
struct int4 { int x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
struct TensorMap { u64 words[16]; };
struct float2 { float x, y; };
struct Index { int x; };
static Index blockIdx, blockDim, gridDim, threadIdx;
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
template <class T> static T __ldcg(const T* x) { return *x; }
static float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
static int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
static float exp2_fast(float x) { return exp2f(x); }
static float log2_fast(float x) { return log2f(x); }
static float reciprocal_fast(float x) { return 1.f / x; }
static float e4m3_value(u32 x) {
  const int exponent = x >> 3 & 15, fraction = x & 7;
  const float size = (x & 127) == 127 ? NAN
                     : exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
  return x & 128 ? -size : size;
}
static float2 unpack_e4m3(unsigned short x) { return {e4m3_value(x & 255), e4m3_value(x >> 8)}; }
static void launch_dependent_grids() {}
static void wait_for_prior_grid() {}
static void prefetch_l2(const void*) {}
static void store_shared(u32, int4) {}
static void fence_async_shared() {}
template <class T> static T load_shared(u32) { return {}; }

static ucontext_t scheduler, lanes[32];
static char stacks[32][1 << 16];
static int said[32], heard[32];
static bool ended[32];
static void (*body)();
static void lane_main() { body(), ended[threadIdx.x & 31] = true; }
static const int* tell(int x) {
  const int lane = threadIdx.x & 31;
  said[lane] = x, swapcontext(&lanes[lane], &scheduler);
  return heard;
}
static void run_warp(void (*f)(), int warp = 0) {
  body = f;
  for (int i = 0; i < 32; i++) {
    ended[i] = false, getcontext(&lanes[i]);
    lanes[i].uc_stack.ss_sp = stacks[i], lanes[i].uc_stack.ss_size = sizeof stacks[i];
    lanes[i].uc_link = &scheduler, makecontext(&lanes[i], lane_main, 0);
  }
  while (!ended[31]) {
    for (int i = 0; i < 32; i++)
      if (threadIdx.x = warp * 32 + i; !ended[i]) swapcontext(&scheduler, &lanes[i]);
    std::copy(said, said + 32, heard);
  }
}
template <class T> static T heard_by(T x, int from) {
  int bits;
  T y;
  std::memcpy(&bits, &x, 4), std::memcpy(&y, tell(bits) + (from & 31), 4);
  return y;
}
template <class T> static T __shfl_sync(u32, T x, int from) { return heard_by(x, from); }
static float __shfl_xor_sync(u32, float x, int by) { return heard_by(x, threadIdx.x ^ by); }
static int __shfl_up_sync(u32, int x, int by) {
  const int lane = threadIdx.x & 31;
  return heard_by(x, lane < by ? lane : lane - by);
}
static int warp_uniform(int x) { return heard_by(x, 0); }
static int __reduce_min_sync(u32, int x) { const int* y = tell(x); return *std::min_element(y, y + 32); }
static int __reduce_max_sync(u32, int x) { const int* y = tell(x); return *std::max_element(y, y + 32); }
static u32 __reduce_or_sync(u32, u32 x) {
  const int* y = tell(x);
  u32 z = 0;
  for (int i = 0; i < 32; i++) z |= y[i];
  return z;
}
static u32 __ballot_sync(u32, bool x) {
  const int* y = tell(x);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= (u32)y[i] << i;
  return bits;
}
static int __ffs(u32 x) { return __builtin_ffs(x); }
#define DEVICE inline
static bool __syncthreads_and(bool);  // of a CTA: what runs whole CTAs defines it
static bool __any_sync(u32 lanes, bool x) { return __ballot_sync(lanes, x) != 0; }
static bool __all_sync(u32 lanes, bool x) { return __ballot_sync(lanes, !x) == 0; }
static int column_offset(int i) { return (i >> 2) * 8 + (i & 1); }
constexpr int UNBOUNDED = 1 << 29;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f, INFINITE = INFINITY;
"""  # noqa: E501
WARP += HALVES


def built(
    folder: Path, name: str, text: str, ptx: str = WARP, others: dict[str, str] | None = None
) -> ctypes.CDLL:
    """A library of a source that includes files of `cuda/`.

    `ptx` stands in for `ptx.cuh`, and `others` for more headers, by their names.
    """
    headers = folder / f"{name}_cuda"
    shutil.copytree(SOURCES, headers)
    for header, replaced in {"ptx.cuh": ptx, **(others or {})}.items():
        (headers / header).write_text(replaced)
    (folder / f"{name}.cpp").write_text('#include "ptx.cuh"\n' + text)
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{headers}"]
    library = folder / f"{name}.so"
    subprocess.run([*command, folder / f"{name}.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library))
