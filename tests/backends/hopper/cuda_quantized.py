"""Runs the Hopper kernels with 8-bit products on the CPU: `cuda_cluster`'s machine with one CTA,
copies of rows of 128 bytes, and products of e4m3 numbers.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from fa_ops.backends.hopper.runtime import nvrtc
from tests.backends.hopper import cuda_cluster
from tests.backends.hopper.cuda_as_cpp import HALVES, WARP, built

MAPS = r"""
// Copies, by maps of the kernel's parameters: boxes of rows of 128 bytes.
struct Tensor { int D, S, H, B; long long b, h, s; int rows; };
static Tensor tensors[3];
static void tma_load(u32 dst, const TensorMap& map, u32 bar, int x, int s, int h, int b) {
  own(dst), own(bar);
  const Tensor& t = tensors[map.words[15]];
  const unsigned char* data = (const unsigned char*)map.words[0];
  copies.push_back([=, &t] {
    for (int r = 0; r < t.rows; r++)
      for (int c = 0; c < 128; c++) {
        const bool exists = (u32)(x + c) < (u32)t.D && (u32)(s + r) < (u32)t.S && (u32)h < (u32)t.H && (u32)b < (u32)t.B;
        *at(swizzle(dst + r * 128 + c)) = exists ? data[b * t.b + h * t.h + (s + r) * t.s + x + c] : 0;
      }
    change(bar, 0, -t.rows * 128);
  });
}
static void load_shared(int2& x, u32 address) { x = load_shared<int2>(address); }
static Index blockDim = {THREADS, 1};
constexpr float LN2 = 0.6931471805599453f;
static void __syncthreads() { named_barrier_sync(0, THREADS); }
static int atomicAdd(int* to, int by) { const int x = *to; *to += by; return x; }
static float log2_fast(float x) { return log2f(x); }
static float reciprocal_fast(float x) { return 1.f / x; }
static float softcap_tanh(float x) { return tanhf(x); }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float __shfl_xor_sync(u32 all, float x, int by) { return __int_as_float(__shfl_xor_sync(all, __float_as_int(x), by)); }
static int __shfl_up_sync(u32, int x, int by) {
  const u64* y = tell((u32)x);
  const int lane = threadIdx.x & 31;
  return (int)y[lane < by ? lane : lane - by];
}
"""  # noqa: E501
MAPS += HALVES
MAPS += r"""
static u32 add_halves(u32 a, u32 b) {
  const float2 x = unpack_halves(a), y = unpack_halves(b);
  return pack_halves(x.x + y.x, x.y + y.y);
}
static u32 fma_halves(u32 a, u32 b, u32 c) {
  const float2 x = unpack_halves(a), y = unpack_halves(b), z = unpack_halves(c);
  return pack_halves(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
static float sum_of_halves(u32 x) { const float2 y = unpack_halves(x); return y.x + y.y; }
static float decoded(u32 x) {
  const int exponent = x >> 3 & 15, fraction = x & 7;
  const float size = (x & 127) == 127 ? NAN : exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
  return x & 128 ? -size : size;
}
static float e4m3(u32 x) {
  static std::vector<float> values;
  for (u32 i = values.size(); i < 256; i++) values.push_back(decoded(i));
  return values[x];
}
static u32 rounded_size(float x) {
  if (x >= 448.f) return 126;
  u32 y = 0;
  for (u32 step = 64; step; step /= 2)
    if (y + step < 127 && e4m3(y + step) <= x) y += step;  // the largest that is not above x
  const float below = x - e4m3(y), above = e4m3(y + 1) - x;
  return above < below || (above == below && y % 2) ? y + 1 : y;
}
static u32 rounded_e4m3(float x) { return rounded_size(fabsf(x)) | (std::signbit(x) ? 128 : 0); }
static u32 pack_e4m3(float a, float b, float c, float d) {
  return rounded_e4m3(a) | rounded_e4m3(b) << 8 | rounded_e4m3(c) << 16 | rounded_e4m3(d) << 24;
}
static void unpack_e4m3(u32 x, u32& low, u32& high) {
  low = pack_halves(e4m3(x & 255), e4m3(x >> 8 & 255)), high = pack_halves(e4m3(x >> 16 & 255), e4m3(x >> 24));
}
"""  # noqa: E501
PRODUCTS = r"""
// Products. A descriptor is an address without a rank.
static u32 descriptor_base(u32 address, u32) { return address >> 4; }
static float operand(u32 base, int offset, int row, int k) {
  return e4m3(memory[0][swizzle((base << 4) + offset + row * 128 + k)]);
}
static std::shared_ptr<std::vector<u32>> in_registers(const u32* a, int count) {
  auto found = std::make_shared<std::vector<u32>>(4 * count);
  const u64* lanes = tell((u64)a);
  for (int j = 0, quad = threadIdx.x & 28; j < 4; j++)
    std::copy((u32*)lanes[quad + j], (u32*)lanes[quad + j] + count, found->begin() + j * count);
  tell(0);
  return found;
}
// The words of a row's four threads, or rows in shared memory.
static void issue(float* d, int n, std::shared_ptr<std::vector<u32>> words, u32 a, u32 b, const int (*steps)[2], int count, bool starts) {
  auto product = [=] {
    const int top = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int r = 0; r < 2; r++) {
      std::vector<float> x(32 * count);
      for (int i = 0; i < 32 * count; i++) {
        const int step = i / 32, k = i % 32;
        if (!words) x[i] = operand(a, steps[step][0], top + 8 * r, k);
        else x[i] = e4m3((*words)[k % 16 / 4 * 4 * count + 4 * step + k / 16 * 2 + r] >> k % 4 * 8 & 255);
      }
      for (int e = 2 * r; e < n / 2; e += e & 1 ? 3 : 1) {
        const int column = column_offset(e) + (threadIdx.x & 3) * 2;
        float sum = starts ? 0.f : d[e];
        for (int i = 0; i < 32 * count; i++) sum += x[i] * operand(b, steps[i / 32][1], column, i % 32);
        d[e] = sum;
      }
    }
  };
  auto& groups = threads[now].groups;
  if (groups.empty()) groups.emplace_back();
  if (late_products) groups.back().push_back(product);
  else product();
}
"""  # noqa: E501
CALL = r"""
#include "quantized.cu"
static QuantizedParams params;
static void body_of_thread() { quantized(params); }
extern "C" const char* run(const QuantizedParams* given, const Tensor* maps, int grid, int seed) {
  params = *given, std::copy(maps, maps + 3, tensors);
  params.q.words[15] = 0, params.k.words[15] = 1, params.v.words[15] = 2;
  gridDim.x = grid;
  for (int i = 0; i < grid; i++)
    if (const char* found = run_cluster(body_of_thread, i, seed + i)) return found;
  return nullptr;
}
"""


class Tensor(ctypes.Structure):
    """What a tensor map is of: sizes (B, H, S, D) and strides in bytes, and the rows of a box."""

    _fields_ = [*((n, ctypes.c_int) for n in "DSHB"), *((n, ctypes.c_longlong) for n in "bhs")]
    _fields_ += [("rows", ctypes.c_int)]


def attention(folder: Path, name: str, defines: dict[str, int], threads: int) -> ctypes.CDLL:
    """The attention kernel with these macros, which `run` runs; it returns what went wrong."""
    ptx = cuda_cluster.PTX.replace("CTAS = 2, THREADS = 512", f"CTAS = 1, THREADS = {threads}")
    ptx = _replaced(ptx, "// Copies, by maps", "static void atomic_add", MAPS) + BYTE_PERM
    ptx = _replaced(ptx, "// Products.", "static void wgmma_fence", PRODUCTS)
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    headers = {"wgmma.cuh": _products(defines)}
    library = built(folder, name, text + CALL, ptx, headers)
    library.run.restype = ctypes.c_char_p
    return library


def _replaced(text: str, begin: str, end: str, by: str) -> str:
    return text[: text.index(begin)] + by + text[text.index(end) :]


def _products(defines: dict[str, int]) -> str:
    """What stands in for the products of e4m3 numbers."""
    text = "#pragma once\n"
    for name, n, _, a, _, steps, *_ in nvrtc._eight_bit_products(defines):
        rows = ", ".join(f"{{{x}, {y}}}" for x, y in steps)
        call = f"issue(d, {n}, {{}}, b, {name}_steps, {len(steps)}, {{}})"
        text += f"static const int {name}_steps[][2] = {{{rows}}};\n"
        if a == "registers":
            words = 4 * len(steps)
            of_registers = call.format(f"in_registers(a, {words}), 0", "!adds")
            text += (
                f"static void {name}_if(float (&d)[{n // 2}], const u32 (&a)[{words}], u32 b, "
                f"u32 adds) {{ {of_registers}; }}\n"
            )
        else:
            for suffix, starts in (("_start", "true"), ("", "false")):
                body = call.format("nullptr, a", starts)
                parameters = f"float (&d)[{n // 2}], u32 a, u32 b"
                text += f"static void {name}{suffix}({parameters}) {{ {body}; }}\n"
    return text


BYTE_PERM = r"""
static u32 __byte_perm(u32 a, u32 b, u32 order) {
  const u64 bytes = (u64)b << 32 | a;
  u32 y = 0;
  for (int i = 0; i < 4; i++) y |= (u32)(bytes >> (order >> 4 * i & 7) * 8 & 255) << 8 * i;
  return y;
}
"""
# Threads of a CTA one after another: the first pass ends at a barrier, the second runs past it.
SEQUENTIAL = r"""
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)
struct int2 { int x, y; };
struct uint2 { u32 x, y; };
struct AtBarrier {};
static bool ends_at_barriers;
static bool sorted_of[2];
static int borders;
static int2 make_int2(int x, int y) { return {x, y}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static void __syncthreads() { if (ends_at_barriers) throw AtBarrier(); }
static bool __syncthreads_and(bool) { return sorted_of[borders++]; }
"""
PREPARE = r"""
#define ENTRY_scaled_packed 1
static u32 pack_e4m3(float, float, float, float);  // nothing is rounded here
#include "prepare_e4m3.cu"
static bool is_sorted(const int* ends, int count) { return !ends || std::is_sorted(ends, ends + count + 1); }
extern "C" void run(const ScaledPackedParams* p, int grid) {
  gridDim.x = grid, sorted_of[0] = is_sorted(p->pages.cu_seqlens_q, p->B), sorted_of[1] = is_sorted(p->cu_seqlens_k, p->B);
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    for (int pass = 0; pass < 2; pass++)
      for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) {
        ends_at_barriers = pass == 0, borders = 0;
        try { scaled_packed(*p); } catch (AtBarrier) {}
      }
}
"""  # noqa: E501


def preparation(folder: Path, name: str, defines: dict[str, int]) -> ctypes.CDLL:
    """The kernel that prepares packed e4m3 tensors."""
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return built(folder, name, text + PREPARE, WARP + SEQUENTIAL + BYTE_PERM)


# CTAs one after another, in the order in which they start.
QUANTISATION = r"""
#define CTAS KERNEL_CTAS  // the machine has constants of these names
#define THREADS KERNEL_THREADS
#include "quantize.cu"
static QuantizeParams params;
static void body_of_thread() { quantize(params); }
extern "C" const char* run(const QuantizeParams* given, int grid, int seed) {
  params = *given;
  for (gridDim.x = grid, blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    if (const char* found = run_cluster(body_of_thread, blockIdx.x, seed + blockIdx.x))
      return found;
  return nullptr;
}
"""
BETWEEN_CTAS = r"""
struct uint2 { u32 x, y; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static void add_release(int* to, int x) { *to += x; }
static int load_acquire(const int* from) { return *from; }
static u32 atomicMax(u32* to, u32 x) { const u32 y = *to; *to = max(y, x); return y; }
"""


def quantisation(folder: Path, name: str, defines: dict[str, int]) -> ctypes.CDLL:
    """The kernel that quantises, which `run` runs; it returns what went wrong."""
    ptx = cuda_cluster.PTX.replace("CTAS = 2, THREADS = 512", "CTAS = 1, THREADS = 256")
    ptx = ptx.replace("#define __shared__\n", "#define __shared__ static\n")
    ptx = _replaced(ptx, "// Copies, by maps", "static void atomic_add", MAPS) + BETWEEN_CTAS
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    library = built(folder, name, text + QUANTISATION, ptx + BYTE_PERM)
    library.run.restype = ctypes.c_char_p
    return library
