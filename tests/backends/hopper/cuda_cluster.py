"""Runs a Hopper kernel on the CPU: the threads of a cluster as coroutines, in a random order.

`PTX` stands in for `ptx.cuh`, and `products` for the generated `wgmma.cuh`. Barriers count as those
of the hardware do. Copies end at a random time, and products read shared memory when they are
issued or when they are waited for: a kernel that reads what is not there yet, or overwrites what is
still read, computes something else, and one that waits for ever ends in an error.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from fa_ops.backends.hopper.configs import BackwardConfig
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import nvrtc
from tests.backends.hopper.cuda_as_cpp import built

PTX = r"""
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>
using std::min, std::max;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct TensorMap { u64 words[16]; };
struct Index { int x, y; };
#define DEVICE inline
static bool __syncthreads_and(bool);
#define __global__
#define __device__
#define __noinline__
#define __shared__
#define __align__(x)
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
static Index blockIdx, gridDim, threadIdx;
static unsigned char shared[1];
constexpr float LOG2E = 1.4426950408889634f;
constexpr int UNBOUNDED = 1 << 29;
const float INFINITE = INFINITY;
static int2 make_int2(int x, int y) { return {x, y}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __int_as_float(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
static u32 __float_as_int(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
static int __ffs(u32 x) { return __builtin_ffs(x); }

// The machine: threads, their warps, and what is in flight.
constexpr int CTAS = 2, THREADS = 512, ALL = CTAS * THREADS, SHARED_SIZE = 256 << 10, SHARED_START = 1024;
static unsigned char memory[CTAS][SHARED_SIZE];
struct Mbarrier { int count, pending, bytes; u32 phase; };
struct Named { int arrived; u32 round; };
struct Warp { int arrived; u32 round; u64 said[32], heard[32]; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  std::function<bool()> ready;  // null: it can run
  std::vector<std::vector<std::function<void()>>> groups;  // products in flight, not yet computed
  std::vector<std::function<void()>> stores;
  bool ended;
};
static std::map<u32, Mbarrier> barriers;
static Named named[CTAS][16], cluster;
static Warp warps[ALL / 32];
static std::vector<Thread> threads;
static std::vector<std::function<void()>> copies;
static ucontext_t scheduler;
static std::mt19937 draw;
static int now;
static bool late_products;
static const char* error;

static void until(std::function<bool()> ready) {
  if (ready()) return;
  threads[now].ready = ready;
  swapcontext(&threads[now].context, &scheduler);
}
static void pause() {  // now and then others run before this thread goes on
  if (draw() % 8 == 0) threads[now].ready = [] { return true; }, swapcontext(&threads[now].context, &scheduler);
}
static const u64* tell(u64 x) {
  Warp& w = warps[now / 32];
  w.said[now & 31] = x;
  const u32 round = w.round;
  if (++w.arrived == 32) w.arrived = 0, w.round++, std::copy(w.said, w.said + 32, w.heard);
  else until([&w, round] { return w.round != round; });
  return w.heard;
}
template <class T> static T __shfl_sync(u32, T x, int from) { return (T)tell((u64)x)[from & 31]; }
static u32 __shfl_xor_sync(u32, u32 x, int by) { return __shfl_sync(~0u, x, (threadIdx.x & 31) ^ by); }
static int warp_uniform(int x) {
  const u64* y = tell((u32)x);
  for (int i = 0; i < 32; i++) if (y[i] != y[0]) error = "a value differs within a warp";
  return (int)y[0];
}
static int __reduce_min_sync(u32, int x) {
  const u64* y = tell((u32)x);
  int z = x;
  for (int i = 0; i < 32; i++) z = min(z, (int)y[i]);
  return z;
}
static int __reduce_max_sync(u32, int x) {
  const u64* y = tell((u32)x);
  int z = x;
  for (int i = 0; i < 32; i++) z = max(z, (int)y[i]);
  return z;
}
static u32 __reduce_or_sync(u32, u32 x) {
  const u64* y = tell(x);
  u32 z = 0;
  for (int i = 0; i < 32; i++) z |= (u32)y[i];
  return z;
}
static u32 __ballot_sync(u32, bool x) {
  const u64* y = tell(x);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= (u32)y[i] << i;
  return bits;
}
static bool __any_sync(u32, bool x) { return __ballot_sync(~0u, x) != 0; }
static bool __all_sync(u32, bool x) { return __ballot_sync(~0u, !x) == 0; }
static void __syncwarp() { tell(0); }
static bool elect_one() { return (threadIdx.x & 31) == 0; }

// Shared memory: the address of a CTA's holds its rank, and a CTA accesses its own.
static u32 smem_address(const void*) { return blockIdx.x % CTAS << 24 | SHARED_START; }
static unsigned char* at(u32 address) {
  const u32 cta = address >> 24, offset = address & 0xFFFFFF;
  if (cta >= CTAS || offset >= SHARED_SIZE) std::abort();
  return &memory[cta][offset];
}
static unsigned char* own(u32 address) {
  if ((int)(address >> 24) != blockIdx.x % CTAS) error = "another CTA's address";
  return at(address);
}
static u32 swizzle(u32 address) { return address ^ (address >> 7 & 7) << 4; }
template <class T> static void store_shared(u32 address, T x) { std::memcpy(own(address), &x, sizeof x); }
template <class T> static T load_shared(u32 address) { T x; std::memcpy(&x, own(address), sizeof x); return x; }
static void load_shared(u32& x, u32 address) { x = load_shared<u32>(address); }

static void mbar_init(u32 bar, u32 count) { barriers[bar] = {(int)count, (int)count, 0, 0}; }
static void mbar_init_fence() {}
static void change(u32 bar, int arrivals, int bytes) {
  Mbarrier& b = barriers.at(bar);
  b.pending -= arrivals, b.bytes += bytes;
  if (b.pending < 0) error = "too many arrivals";
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
static void mbar_arrive_expect(u32 bar, u32 bytes) { own(bar), change(bar, 1, bytes); }
static void mbar_arrive(u32 bar) { own(bar), change(bar, 1, 0); }
static u32 mapped(u32 address, u32 cta) { return (address & 0xFFFFFF) | cta << 24; }
static void mbar_arrive_at(u32 bar, u32 cta) { own(bar), change(mapped(bar, cta), 1, 0); }
static void mbar_wait(u32 bar, u32 phase) {
  own(bar);
  Mbarrier* b = &barriers.at(bar);
  until([b, phase] { return b->phase != phase; });
}
static void meet(Named* b, int threads, bool waits) {
  const u32 round = b->round;
  if (++b->arrived == threads) b->arrived = 0, b->round++;
  else if (waits) until([b, round] { return b->round != round; });
}
static void named_barrier_sync(u32 id, u32 n) { meet(&named[blockIdx.x % CTAS][id], n, true); }
static void named_barrier_arrive(u32 id, u32 n) { meet(&named[blockIdx.x % CTAS][id], n, false); }
static void cluster_sync() { meet(&cluster, ALL, true); }
template <int R> static void register_alloc() {}
template <int R> static void register_dealloc() {}
static void launch_dependent_grids() {}
static void wait_for_prior_grid() {}
static void fence_async_shared() {}
static void fence_async_global() {}

// Copies, by maps of boxes of 64 features by 64 tokens, or `rows`.
struct Tensor { u16* data; int D, S, H, B, rows = 64; };
static const Tensor& tensor_of(const TensorMap& map) { return *(const Tensor*)map.words[0]; }
static u16* element(const Tensor& t, int x, int s, int h, int b) {
  return x < t.D && s < t.S ? t.data + (((long long)b * t.H + h) * t.S + s) * t.D + x : nullptr;
}
static void copy_box(u32 dst, const TensorMap& map, int x, int s, int h, int b, bool loads) {
  for (int r = 0; r < tensor_of(map).rows; r++)
    for (int c = 0; c < 64; c++) {
      u16* const from = element(tensor_of(map), x + c, s + r, h, b);
      u16* const to = (u16*)at(swizzle(dst + r * 128 + c * 2));
      if (loads) *to = from ? *from : 0;
      else if (from) *from = *to;
    }
}
static void tma_load(u32 dst, const TensorMap& map, u32 bar, int x, int s, int h, int b) {
  own(dst), own(bar);
  copies.push_back([=, &map] { copy_box(dst, map, x, s, h, b, true), change(bar, 0, -128 * tensor_of(map).rows); });
}
static void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  own(dst), own(bar);
  copies.push_back([=] { std::memcpy(at(dst), src, bytes), change(bar, 0, -(int)bytes); });
}
static void bulk_send(u32 dst, u32 src, u32 bytes, u32 bar, u32 cta) {
  own(dst), own(src), own(bar);
  copies.push_back([=] {
    std::memcpy(at(mapped(dst, cta)), at(src), bytes), change(mapped(bar, cta), 0, -(int)bytes);
  });
}
static void tma_store(const TensorMap& map, u32 src, int x, int s, int h, int b) {
  own(src);
  threads[now].stores.push_back([=, &map] { copy_box(src, map, x, s, h, b, false); });
}
static void tma_store_commit() {}
static void tma_store_wait() {
  for (auto& store : threads[now].stores) store();
  threads[now].stores.clear();
}
static void tma_store_wait_read() { tma_store_wait(); }
static void atomic_add(float* to, float a, float b, float c, float d) { to[0] += a, to[1] += b, to[2] += c, to[3] += d; }

static float exp2_fast(float x) { return exp2f(x); }
static u32 opaque(u32 x) { return x; }
static int row_offset(int i) { return (i & 2) * 4; }
static int column_offset(int i) { return (i >> 2) * 8 + (i & 1); }
static float2 unpack_e4m3(u16) { return {}; }
static float value_of(u16 x) { return __int_as_float((u32)x << 16); }
static u32 rounded(float x) {
  const u32 y = __float_as_int(x);
  return (y & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (y + 0x7FFF + (y >> 16 & 1)) >> 16;
}
static u32 pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
static void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 x[4] = {a, b, c, d};
  const u64* rows = tell(address);
  for (int i = 0, lane = threadIdx.x & 31; i < 4; i++) store_shared((u32)rows[i * 8 + lane / 4] + lane % 4 * 4, x[i]);
}
template <bool TRANSPOSED> static void ldmatrix_x4(u32 (&r)[4], u32 address) {
  const u64* rows = tell(address);
  for (int i = 0, lane = threadIdx.x & 31; i < 4; i++) {
    const int row = i * 8 + lane % 4 * 2, column = lane / 4 * 2;
    if (TRANSPOSED) r[i] = load_shared<u16>((u32)rows[row] + column) | load_shared<u16>((u32)rows[row + 1] + column) << 16;
    else r[i] = load_shared<u32>((u32)rows[i * 8 + lane / 4] + lane % 4 * 4);
  }
  tell(0);  // what was said is read
}
static void stmatrix_x2(u32, u32, u32) { error = "not in this kernel"; }

// Products. A descriptor is an address without a rank, and the bytes between columns of 64.
static u32 descriptor_base(u32 address, u32 leading) {
  if (address >> 18) error = "a descriptor's address holds a rank";
  return address >> 4 | leading >> 4 << 16;
}
static u32 cluster_descriptor(u32 address, u32 leading) { return descriptor_base(address & 0x3FFFF, leading); }
static int cta_rank() { return blockIdx.x & 1; }
static float operand(u32 base, int offset, bool is_transposed, int i, int k) {
  const u32 start = ((base & 0x3FFF) << 4) + offset, leading = base >> 16 << 4;
  const u32 byte = is_transposed ? start + i / 64 * leading + k * 128 + i % 64 * 2 : start + i * 128 + k * 2;
  u16 x;
  std::memcpy(&x, &memory[blockIdx.x % CTAS][swizzle(byte)], 2);
  return value_of(x);
}
struct Operand {  // in shared memory, or in the registers of the four threads of a row
  u32 base;
  bool is_transposed;
  std::shared_ptr<std::vector<u32>> words;
  int count;
  float get(int step, int offset, int row, int k) const {
    if (!words) return operand(base, offset, is_transposed, row, k);
    const u32 x = (*words)[k % 8 / 2 * count + 4 * step + k / 8 * 2 + (row % 16 >= 8)];
    return value_of(k & 1 ? x >> 16 : x & 0xFFFF);
  }
};
static Operand in_memory(u32 base, bool is_transposed) { return {base, is_transposed, nullptr, 0}; }
static Operand in_registers(const u32* a, int count) {
  Operand found = {0, false, std::make_shared<std::vector<u32>>(4 * count), count};
  const u64* lanes = tell((u64)a);
  for (int j = 0, quad = threadIdx.x & 28; j < 4; j++)
    std::copy((u32*)lanes[quad + j], (u32*)lanes[quad + j] + count, found.words->begin() + j * count);
  tell(0);
  return found;
}
static void issue(float* d, int n, Operand a, u32 b, bool b_transposed, const int (*steps)[2], int count, bool starts) {
  auto product = [=] {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int r = 0; r < 2; r++) {
      std::vector<float> x(16 * count);
      for (int i = 0; i < 16 * count; i++) x[i] = a.get(i / 16, steps[i / 16][0], row + 8 * r, i % 16);
      for (int e = 2 * r; e < n / 2; e += e & 1 ? 3 : 1) {
        const int column = column_offset(e) + (threadIdx.x & 3) * 2;
        float sum = starts ? 0.f : d[e];
        for (int i = 0; i < 16 * count; i++) sum += x[i] * operand(b, steps[i / 16][1], b_transposed, column, i % 16);
        d[e] = sum;
      }
    }
  };
  auto& groups = threads[now].groups;
  if (groups.empty()) groups.emplace_back();
  if (late_products) groups.back().push_back(product);
  else product();
}
static void wgmma_fence() {}
static void wgmma_commit() { threads[now].groups.emplace_back(); }
template <int N> static void wgmma_wait() {
  pause();
  auto& groups = threads[now].groups;  // the last one is not committed
  while (groups.size() > N + 1) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  tell(0);
}
template <class T> static void fence_operand(T&) {}

// Runs all threads to their end. Whether products are late, and the order of everything, is by the seed.
static void (*body)();
static void thread_main() { body(), threads[now].ended = true; }
static const char* run_cluster(void (*f)(), int cluster_index, int seed) {
  body = f, draw.seed(seed), late_products = seed & 1, error = nullptr;
  barriers.clear(), copies.clear(), threads.assign(ALL, {}), cluster = {};
  std::memset(memory, 0x7F, sizeof memory), std::memset(named, 0, sizeof named);
  std::memset(warps, 0, sizeof warps);  // 0x7F7F is a large number: nothing reads what was not written
  for (Thread& t : threads) {
    getcontext(&t.context), t.stack.resize(1 << 16);
    t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
    t.context.uc_link = &scheduler, makecontext(&t.context, thread_main, 0);
  }
  const int slow = draw() % 4, share = 1 + draw() % 8;  // a warpgroup that rarely runs, and how often copies end
  const int late = draw() % ALL;  // a thread that rarely runs: nothing keeps a warp's lanes together
  for (int idle = 0; idle < 4;) {
    bool moved = false;
    const int turn = draw() % (ALL / 32);
    for (int w = 0; w < ALL / 32; w++) {
      const int warp = (w + turn) % (ALL / 32);
      if (idle == 0 && (draw() % 3 == 0 || (warp % 16 / 4 == slow && draw() % 8))) continue;
      for (int lane = 0; lane < 32; lane++) {
        Thread& t = threads[warp * 32 + lane];
        if (idle == 0 && warp * 32 + lane == late && draw() % 64) continue;
        if (t.ended || (t.ready && !t.ready())) continue;
        t.ready = nullptr, now = warp * 32 + lane, moved = true;
        blockIdx.x = cluster_index * CTAS + now / THREADS, threadIdx.x = now % THREADS;
        swapcontext(&scheduler, &t.context);
        if (error) return error;
      }
    }
    if (!copies.empty() && (!moved || idle || draw() % share == 0)) {
      const int i = draw() % copies.size();
      auto copy = copies[i];
      copies.erase(copies.begin() + i), copy(), moved = true;
    }
    idle = moved ? (std::all_of(threads.begin(), threads.end(), [](Thread& t) { return t.ended; }) ? 4 : 0) : idle + 1;
  }
  for (Thread& t : threads) if (!t.ended) return "threads wait for ever";
  return copies.empty() ? nullptr : "copies were not waited for";
}
"""  # noqa: E501


def emulated(
    folder: Path, source: str, call: str, config: BackwardConfig, **features: object
) -> ctypes.CDLL:
    """A backward kernel and the code that calls it, whose `run` returns what went wrong.

    `features` are arguments of `macros`.
    """
    defines = macros(config, torch.bfloat16, **features)
    return compiled(folder, source, call, defines)


def compiled(
    folder: Path, source: str, call: str, defines: dict[str, int], ptx: str = PTX,
    others: dict[str, str] | None = None,
) -> ctypes.CDLL:  # fmt: skip
    """A kernel with these macros and the code that calls it; `others` stand in for headers."""
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    headers = {"wgmma.cuh": _products(source, defines), **(others or {})}
    library = built(folder, "emulated", text + call, ptx, headers)
    library.run.restype = ctypes.c_char_p
    return library


def _products(source: str, defines: dict[str, int]) -> str:
    """What stands in for the products that a source file calls."""
    text = "#pragma once\n"
    for name, n, a, b, steps in nvrtc._wgmma_products(source, defines):
        words = 4 * len(steps)
        rows = ", ".join(f"{{{x}, {y}}}" for x, y in steps)
        text += f"static const int {name}_steps[][2] = {{{rows}}};\n"
        of_registers = a == "registers"
        kind = f"const u32 (&a)[{words}]" if of_registers else "u32 a"
        operand = f"in_registers(a, {words})" if of_registers else f"in_memory(a, {a})"
        for suffix, starts in (("_start", "true"), ("", "false")):
            text += (
                f"static void {name}{suffix}(float (&d)[{n // 2}], {kind}, u32 b) {{\n"
                f"  issue(d, {n}, {operand}, b, {b}, {name}_steps, {len(steps)}, {starts});\n}}\n"
            )
    return text
