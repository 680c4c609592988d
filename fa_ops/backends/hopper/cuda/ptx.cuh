// PTX wrappers: mbarriers, named barriers, TMA copies, wgmma fences, mma and fast math. Everything that
// requires a GPU is in this file, so that tests can compile the other headers as C++. NVRTC provides no
// headers.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap {
  u64 words[16];
};

#define DEVICE __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int UNBOUNDED = 1 << 29;  // larger than every position; twice this does not overflow

DEVICE u32 smem_address(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}

DEVICE void mbar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
DEVICE void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbar_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
DEVICE void mbar_wait(u32 bar, u32 phase) {
  asm volatile(
      "{ .reg .pred P; W: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1; @P bra D; bra W; D: }" ::"r"(
          bar),
      "r"(phase)
      : "memory");
}

// Arrives at the same barrier of a CTA of the cluster.
DEVICE void mbar_arrive_at(u32 bar, u32 cta) {
  asm volatile(
      "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(bar),
      "r"(cta)
      : "memory");
}
// Synchronises all threads of all CTAs of the cluster.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

DEVICE void store_shared(u32 at, unsigned short x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(x) : "memory");
}
DEVICE void store_shared(u32 at, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
DEVICE void store_shared(u32 at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
DEVICE void store_shared(u32 at, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.x), "f"(x.y) : "memory");
}
DEVICE void store_shared(u32 at, int4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
DEVICE void store_shared(u32 at, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
DEVICE void load_shared(u32& x, u32 at) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
}
DEVICE void load_shared(float& x, u32 at) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
}
DEVICE void load_shared(int2& x, u32 at) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
}
DEVICE void load_shared(float2& x, u32 at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
}
DEVICE void load_shared(int4& x, u32 at) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
}
DEVICE void load_shared(float4& x, u32 at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
}
template <class T> DEVICE T load_shared(u32 at) {
  T x;
  load_shared(x, at);
  return x;
}

// Programmatic dependent launch: the next kernel of the stream becomes resident before this one has ended,
// and waits until this kernel's memory is visible. Neither has an effect without the launch attribute.
DEVICE void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_prior_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Between CTAs: a thread that reads a count by `load_acquire` sees what was written before the `add_release`
// that counted it.
DEVICE void add_release(int* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
DEVICE int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

DEVICE void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int R> DEVICE void register_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R> DEVICE void register_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}

// True in one lane of a converged warp. With `threadIdx.x == 0` instead, the compiler would not know that a
// single thread issues the copies, and would generate a loop over the lanes.
DEVICE bool elect_one() {
  u32 x;
  asm volatile("{ .reg .pred P; elect.sync _|P, 0xffffffff; selp.u32 %0, 1, 0, P; }" : "=r"(x));
  return x;
}

// Coordinates are (feature, token, head, batch).
DEVICE void tma_load(u32 dst, const TensorMap& map, u32 bar, int x, int s, int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"((u64)&map), "r"(bar), "r"(x), "r"(s), "r"(h), "r"(b)
      : "memory");
}

// L2 cache hints, as in CUTLASS.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull;

DEVICE void tma_load_hinted(u32 dst, const TensorMap& map, u32 bar, int x, int s, int h, int b,
                            u64 hint = EVICT_FIRST) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"((u64)&map), "r"(bar), "r"(x), "r"(s), "r"(h), "r"(b), "l"(hint)
      : "memory");
}
// For a map whose boxes hold all features of a token.
DEVICE void tma_load_rows_hinted(u32 dst, const TensorMap& map, u32 bar, int s, int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"((u64)&map), "r"(bar), "r"(0), "r"(s), "r"(h), "r"(b), "l"(EVICT_FIRST)
      : "memory");
}
// For a map whose boxes are groups of 8 tokens with all features, in columns of 64 features.
DEVICE void tma_load_groups(u32 dst, const TensorMap& map, u32 bar, int group, int h) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %3, %3, %4, %5}], [%2];" ::"r"(dst),
      "l"((u64)&map), "r"(bar), "r"(0), "r"(group), "r"(h)
      : "memory");
}
// Copies contiguous bytes, without a tensor map.
DEVICE void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// Copies `bytes` of 16 bytes and sets the others to zero.
DEVICE void copy_chunk(u32 dst, const void* src, u32 bytes, u64 hint = EVICT_FIRST) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
               "r"(bytes), "l"(hint)
               : "memory");
}
// Copies four bytes, or sets them to zero. `copies_arrive` makes a thread arrive once its copies have
// completed.
DEVICE void copy_word(u32 dst, const void* src, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(is_there ? 4 : 0)
               : "memory");
}
DEVICE void copies_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Copies to the same offset in the shared memory of both CTAs of a cluster, and signals the same barrier of
// each.
DEVICE void tma_load_multicast(u32 dst, const TensorMap& map, u32 bar, int x, int s, int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"((u64)&map), "r"(bar), "r"(x), "r"(s), "r"(h), "r"(b), "h"((unsigned short)3)
      : "memory");
}
// Copies from this CTA's shared memory to that of another CTA of the cluster, whose barrier counts the bytes.
// `dst` and `bar` are addresses in this CTA at the corresponding offsets.
DEVICE void bulk_send(u32 dst, u32 src, u32 bytes, u32 bar, u32 cta) {
  asm volatile(
      "{ .reg .b32 to, at; mapa.shared::cluster.u32 to, %0, %4; mapa.shared::cluster.u32 at, %3, %4; "
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [at]; }" ::"r"(
          dst),
      "r"(src), "r"(bytes), "r"(bar), "r"(cta)
      : "memory");
}
DEVICE void tma_store(const TensorMap& map, u32 src, int x, int s, int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"((u64)&map),
      "r"(src), "r"(x), "r"(s), "r"(h), "r"(b)
      : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&map) : "memory");
}
// Has the line that holds an address brought to the L2 cache.
DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Reads from the L2 cache, since L1 may be older than an atomic addition of this thread.
DEVICE float4 load_l2(const float* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

DEVICE void atomic_add(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// Shared-memory matrix descriptors: 128-byte swizzle, core matrices 1024 bytes apart in the strided
// direction. The low word counts units of 16 bytes, so that the steps of a product add constants to it.
DEVICE u32 descriptor_base(u32 address, u32 leading) { return (address >> 4) | ((leading >> 4) << 16); }
constexpr u32 DESCRIPTOR_HIGH = 1u << 30 | 1024 >> 4;

// In a cluster, shared memory addresses contain the rank of the CTA, for which a descriptor has no bits.
DEVICE u32 cluster_descriptor(u32 address, u32 leading) {
  return descriptor_base(address & 0x3FFFF, leading);
}

// The rank of a CTA in a cluster of two.
DEVICE int cta_rank() { return blockIdx.x & 1; }

// Marks a value as equal in all lanes, so that the compiler keeps it in a uniform register. Descriptors made
// from other registers cost two more instructions per product, on its critical path.
DEVICE int warp_uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A thread holds two rows of its warpgroup's accumulator, 8 apart, and two of every eight columns: the
// offsets of its element `i` from its first element.
DEVICE constexpr int row_offset(int i) { return (i & 2) * 4; }
DEVICE constexpr int column_offset(int i) { return (i >> 2) * 8 + (i & 1); }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving reads of a product's registers above the preceding wait.
template <int R> DEVICE void fence_operand(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int R> DEVICE void fence_operand(u32 (&x)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Returns the value, opaque to the compiler, which would otherwise keep its sum with each constant in a
// register for a whole loop.
DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// An undefined value, for unused rows of a product. A constant would be written to the operand before each
// product.
DEVICE u32 any_number() {
  u32 x;
  asm volatile("" : "=r"(x));
  return x;
}

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Of an angle between -pi and pi, with an absolute error of 1e-6.
DEVICE float sin_fast(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float cos_fast(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// NaN where either number is.
DEVICE float nan_min(float a, float b) {
  float x;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
DEVICE float nan_max(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
// With an absolute error of 1e-7. That of tanh.approx is 5e-4, which a softcap of 50 amplifies to 0.02 of a
// score.
DEVICE float tanh_fast(float x) { return 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(2.f * LOG2E * x)); }
// With a small relative error, for softcaps so large that an absolute error of 1e-7 matters.
DEVICE float tanh_precise(float x) {
  const float y = x * x, series = x * (1.f + y * (-1.f / 3.f + y * (2.f / 15.f + y * (-17.f / 315.f))));
  return fabsf(x) < 0.1f ? series : tanh_fast(x);
}
#if HAS_SOFTCAP
DEVICE float softcap_tanh(float x) { return HAS_SOFTCAP == 2 ? tanh_precise(x) : tanh_fast(x); }

// tanh(scale * s) = s * factor(s) for small scores, whose relative error is 2^-17 up to 0.4 softcaps, and
// 2^-25 up to 0.15 where tanh must be precise. It is monotonic for all s, and infinite for infinite ones. It
// takes the place of an exponential and a reciprocal, which cost as much as eight products each.
struct SmallTanh {
  float c0, c1, c2;
  DEVICE SmallTanh(float scale, float unit) {
    constexpr bool PRECISE = HAS_SOFTCAP == 2;
    const float square = scale * scale;
    c0 = (PRECISE ? 0.99999998f : 0.99999375f) * (unit * scale);
    c1 = (PRECISE ? -0.33331817f : -0.3326258f) * (unit * scale) * square;
    c2 = (PRECISE ? 0.13153066f : 0.12127787f) * (unit * scale) * square * square;
  }
  DEVICE float factor(float s) const {
    const float y = s * s;
    return c0 + y * (c1 + y * c2);
  }
};

// Whether SmallTanh serves all scores of a warp. Scales whose fifth power is no float are refused.
template <int N> DEVICE bool are_small(const float (&s)[N], float scale) {
  float most[4] = {};
#pragma unroll
  for (int i = 0; i < N; i++) most[i & 3] = fmaxf(most[i & 3], fabsf(s[i]));
  const float largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
  return __all_sync(~0u, largest * scale <= (HAS_SOFTCAP == 2 ? 0.15f : 0.4f)) && scale > 1e-6f &&
         scale < 1e6f;
}

// softcap_tanh(scale * s) of the scores of a warp, in place.
template <int N> DEVICE void softcap_scores(float (&s)[N], float scale) {
  if (are_small(s, scale)) {
    const SmallTanh small(scale, 1.f);
#pragma unroll
    for (int i = 0; i < N; i++) s[i] *= small.factor(s[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = softcap_tanh(s[i] * scale);
  }
}
#endif

DEVICE u32 pack_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE float2 unpack_bf16(u32 x) {
  return make_float2(__int_as_float(x << 16), __int_as_float(x & 0xFFFF0000u));
}

// Two numbers of float16, that in the low half first.
DEVICE float2 unpack_f16(u32 x) {
  float2 y;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(y.x), "=f"(y.y)
      : "r"(x));
  return y;
}

// Two floats rounded to float16, the first in the low half.
DEVICE u32 pack_f16(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Two floats rounded to the 16-bit input type, the first in the low half.
DEVICE u32 pack(float low, float high) {
#if IS_BF16
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return pack_f16(low, high);
#endif
}

// Four floats rounded to e4m3, the first in the lowest byte; larger magnitudes saturate at 448.
DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
  u32 y;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}

// Four e4m3 numbers as float16: the lower two bytes, and the upper two.
DEVICE void unpack_e4m3(u32 x, u32& low, u32& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high)
      : "r"(x));
}

// Two e4m3 numbers as floats, the low byte first.
DEVICE float2 unpack_e4m3(unsigned short x) {
  float2 y;
  asm("{ .reg .b16 l, h; .reg .b32 z; cvt.rn.f16x2.e4m3x2 z, %2; mov.b32 {l, h}, z; "
      "cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(y.x), "=f"(y.y)
      : "h"(x));
  return y;
}

// Pairs of halves.
DEVICE u32 add_halves(u32 a, u32 b) {
  u32 y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
DEVICE u32 pack_halves(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE float2 unpack_halves(u32 x) {
  float2 y;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(y.x), "=f"(y.y)
      : "r"(x));
  return y;
}
DEVICE float sum_of_halves(u32 x) {
  const float2 y = unpack_halves(x);
  return y.x + y.y;
}

// Two floats rounded to the 16-bit input type, negative numbers clamped to 0.
DEVICE u32 pack_relu(float low, float high) {
  u32 y;
#if IS_BF16
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
  return y;
}

// Adds 0 * x to a pair of sums, which stay 0 as long as all added values are finite.
DEVICE void add_times_zero(u32& sum, u32 x) {
#if IS_BF16
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
#endif
}

DEVICE void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

DEVICE void stmatrix_x2(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

template <bool TRANSPOSED> DEVICE void ldmatrix_x4(u32 (&r)[4], u32 at) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// d (16 x 8) += a (16 x 16) b (16 x 8), in float16 (`mma_f16`) or in the 16-bit input type.
#define MMA(NAME, TYPE)                                                                                     \
  DEVICE void NAME(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {                                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                     \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                     \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                           \
  }
#if IS_BF16
MMA(mma, "bf16")
#else
MMA(mma, "f16")
#endif
MMA(mma_f16, "f16")
#undef MMA

// The swizzled shared-memory address of a 16-byte chunk of a row of a tile, whose columns have `rows` lines
// of 128 bytes.
DEVICE u32 swizzled(u32 base, int rows, int row, int chunk) {
  return base + (chunk >> 3) * rows * 128 + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}
