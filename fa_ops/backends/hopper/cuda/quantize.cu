// Quantises query, key and value to 8 bits, as docs/semantics.md defines it, and writes them in the layout
// that quantized.cu copies. CTAs start in the order of their indices, and later ones wait for statistics of a
// whole batch row that earlier ones compute:
//
//   mean of the keys | queries | largest value of each channel | values | keys
//
// Tensors that are read twice, and those that quantized.cu reads repeatedly, come last, so that they are
// still in the L2.
//
// Compile-time: IS_BF16 IS_INT8 HEAD_LANES VALUE_LANES ROTATED_BITS
#include "eight_bit.cuh"
#include "elements.cuh"

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct QuantizeParams {
  const Element *q, *k, *v;
  // q8 may be null: not written
  unsigned char *q8, *k8, *v8;  // (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Dv, 128 blocks of keys)
  float *q_scale, *k_scale, *v_scale;  // (B, Hq, Sq), (B, Hkv, 2 blocks of keys), (B, Hkv, Dv)
  float* offset;                       // (B, Hq, Sq), or null: not computed
  float* mean;                         // (B, Hkv, D), or null: not subtracted
  u32* largest;                        // (B, Hkv, Dv): bits of the largest |v|, 0 at launch
  int *largest_found, *means_found;    // (B, Hkv): the number of CTAs that have finished a head, 0 at launch
  const int* kv_lens;                  // (B,) or null
  Strides q_strides, k_strides, v_strides;
  int B, Hq, group, Sq, Sk, D, Dv;
  int parts;       // CTAs that share the values of a head
  float scale;     // of the scores
  float rotation;  // factor of rotated features
};

constexpr int SCALE_BLOCK = 64, MEAN_KEYS = 1024;
constexpr int ROWS = THREADS / HEAD_LANES;  // that a CTA reads at once
constexpr int QUERY_UNITS = 4, QUERY_STEPS = 4;  // of ROWS queries each: in registers, and one after another
constexpr int QUERIES = ROWS * QUERY_UNITS * QUERY_STEPS;  // of a CTA
constexpr int KEY_STEPS = 4, VALUE_BLOCKS = VALUE_LANES < 32 ? 2 : 1;  // blocks of a CTA
constexpr int CTAS = HEAD_LANES * VALUE_LANES < 512 ? 3 : 2;  // on a multiprocessor: registers

DEVICE int keys_of_row(const QuantizeParams& p, int b) {
  return p.kv_lens ? max(0, min(p.kv_lens[b], p.Sk)) : p.Sk;
}

// Eight elements, or zeros.
DEVICE uint4 load8(const Element* from, bool exists) {
  return exists ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}

DEVICE void unpack8(float (&x)[8], const uint4& y) {
  const float2 a = unpack(y.x), b = unpack(y.y), c = unpack(y.z), d = unpack(y.w);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

DEVICE u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Makes the compiler recompute values derived from these elements instead of keeping them in registers.
DEVICE void forget(uint4& x) { asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)); }

// What a CTA has in shared memory, by the work that it does.
union Shared {
  float parts[THREADS][9], warps[2][THREADS / 32];
  TransposedValues transposed[VALUE_BLOCKS];
};

// Reduces over the groups of LANES lanes of a CTA that hold the same eight columns. The result is valid in
// the first group.
template <int LANES, bool IS_MAX> DEVICE void reduce_groups(Shared& shared, float (&x)[8]) {
  constexpr int GROUPS = THREADS / LANES;
  auto& parts = shared.parts;
#pragma unroll
  for (int i = 0; i < 8; i++) parts[threadIdx.x][i] = x[i];
  __syncthreads();
  if (threadIdx.x >= LANES) return;
#pragma unroll 1
  for (int g = 1; g < GROUPS; g++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float y = parts[g * LANES + threadIdx.x][i];
      x[i] = IS_MAX ? fmaxf(x[i], y) : x[i] + y;
    }
}

// Signals that a CTA has computed its part of a head's statistics.
DEVICE void count_statistics(int* found) {
  __syncthreads();
  if (threadIdx.x == 0) add_release(found, 1);
}

DEVICE void wait_for_statistics(const int* found, int ctas) {
  if (threadIdx.x == 0)
    while (load_acquire(found) < ctas);
  __syncthreads();
}

// Computes the largest |v| of each channel over some of the keys of a head.
DEVICE void find_largest(const QuantizeParams& p, Shared& shared, int head, int part) {
  constexpr int GROUPS = THREADS / VALUE_LANES;
  const int Hkv = p.Hq / p.group, b = head / Hkv, channel = threadIdx.x % VALUE_LANES * 8;
  const int keys = keys_of_row(p, b);
  const int share = (keys + p.parts - 1) / p.parts, end = min((part + 1) * share, keys);
  const Element* v = row_at(p.v, p.v_strides, b, head % Hkv, 0) + channel;
  const bool exists = channel < p.Dv;
  float top[8] = {};
#pragma unroll 4
  for (int key = part * share + threadIdx.x / VALUE_LANES; key < end; key += GROUPS) {
    float x[8];
    unpack8(x, load8(v + key * p.v_strides.s, exists));
#pragma unroll
    for (int i = 0; i < 8; i++) top[i] = fmaxf(top[i], fabsf(x[i]));
  }
  reduce_groups<VALUE_LANES, true>(shared, top);
  if (threadIdx.x < VALUE_LANES && exists)
#pragma unroll
    for (int i = 0; i < 8; i++) atomicMax(p.largest + head * p.Dv + channel + i, __float_as_int(top[i]));
  count_statistics(p.largest_found + head);
}

// Computes the mean of at most MEAN_KEYS evenly spaced keys of a head.
DEVICE void find_mean(const QuantizeParams& p, Shared& shared, int head) {
  constexpr int GROUPS = THREADS / HEAD_LANES;
  const int Hkv = p.Hq / p.group, b = head / Hkv, feature = threadIdx.x % HEAD_LANES * 8;
  const int keys = keys_of_row(p, b);
  const int step = max((keys + MEAN_KEYS - 1) / MEAN_KEYS, 1), count = (keys + step - 1) / step;
  const Element* k = row_at(p.k, p.k_strides, b, head % Hkv, 0) + feature;
  const bool exists = feature < p.D;
  float sum[8] = {};
#pragma unroll 16
  for (int i = threadIdx.x / HEAD_LANES; i < count; i += GROUPS) {
    float x[8];
    unpack8(x, load8(k + (long long)i * step * p.k_strides.s, exists));
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += x[j];
  }
  reduce_groups<HEAD_LANES, false>(shared, sum);
  if (threadIdx.x < HEAD_LANES && exists)
#pragma unroll
    for (int i = 0; i < 8; i++) p.mean[head * p.D + feature + i] = sum[i] / max(count, 1);
  count_statistics(p.means_found + head);
}

constexpr int UNITS = SCALE_BLOCK / ROWS;  // pieces of eight features that a thread holds of a block of keys

// Rotates the features of a row by blockwise Hadamard matrices. The lanes of the row hold eight features
// each.
DEVICE void rotate(float (&x)[8], [[maybe_unused]] float factor) {
#pragma unroll
  for (int bit = 0; bit < ROTATED_BITS; bit++) {
    const int half = 1 << bit;
    if (bit < 3) {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (!(i & half)) {
          const float a = x[i], b = x[(i | half) & 7];
          x[i] = a + b, x[(i | half) & 7] = a - b;
        }
    } else {
      const bool is_second = threadIdx.x & half >> 3;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(~0u, x[i], half >> 3);
        x[i] = is_second ? other - x[i] : x[i] + other;
      }
    }
  }
#if ROTATED_BITS
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= factor;
#endif
}

DEVICE float largest_of(const float (&x)[8]) {
  float y = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) y = fmaxf(y, fabsf(x[i]));
  return y;
}

template <int LANES> DEVICE float largest_of_lanes(float y) {
#pragma unroll
  for (int w = LANES / 2; w; w >>= 1) y = fmaxf(y, __shfl_xor_sync(~0u, y, w));
  return y;
}

// Writes eight numbers; returns their scale.
DEVICE float store8(unsigned char* to, const float (&x)[8], float largest, bool exists) {
  const Scale found = scale_of(largest);
  if (exists) *(uint2*)to = make_uint2(pack_numbers(x, found.inverse), pack_numbers(x + 4, found.inverse));
  return found.scale;
}

// Eight features of the mean of a head's keys.
DEVICE void load_mean(float (&mean)[8], const QuantizeParams& p, int head, int feature) {
  wait_for_statistics(p.means_found + head, 1);
  if (feature >= p.D) return;
#pragma unroll
  for (int i = 0; i < 8; i++) mean[i] = p.mean[head * p.D + feature + i];
}

// Eight features of one query. Executed by all lanes of a warp.
DEVICE void quantize_query(const QuantizeParams& p, int bh, int row, int feature, const uint4& from,
                           const float (&mean)[8]) {
  const long long at = (long long)bh * p.Sq + row;
  float x[8];
  unpack8(x, from);
  if (p.offset) {
    float both = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) both += x[i] * mean[i];
#pragma unroll
    for (int w = HEAD_LANES / 2; w; w >>= 1) both += __shfl_xor_sync(~0u, both, w);
    if (feature == 0 && row < p.Sq) p.offset[at] = both * p.scale;
  }
  rotate(x, p.rotation);
  const float largest = largest_of_lanes<HEAD_LANES>(largest_of(x));
  const float scale = store8(p.q8 + at * p.D + feature, x, largest, feature < p.D && row < p.Sq);
  if (feature == 0 && row < p.Sq) p.q_scale[at] = scale;
}

// Quantises QUERIES queries of a head, with one scale each.
DEVICE void quantize_queries(const QuantizeParams& p, int bh, int part) {
  const int b = bh / p.Hq, h = bh % p.Hq, feature = threadIdx.x % HEAD_LANES * 8;
  const bool has_feature = feature < p.D;
  int row = part * QUERIES + threadIdx.x / HEAD_LANES;
  const Element* q = row_at(p.q, p.q_strides, b, h, row) + feature;
  uint4 next[QUERY_UNITS];
#pragma unroll
  for (int u = 0; u < QUERY_UNITS; u++)
    next[u] = load8(q + u * ROWS * p.q_strides.s, has_feature && row + u * ROWS < p.Sq);
  float mean[8] = {};
  if (p.offset) load_mean(mean, p, b * (p.Hq / p.group) + h / p.group, feature);
#pragma unroll 1
  for (int step = 0; step < QUERY_STEPS; step++, row += QUERY_UNITS * ROWS) {
    uint4 now[QUERY_UNITS];
#pragma unroll
    for (int u = 0; u < QUERY_UNITS; u++) now[u] = next[u];
    q += QUERY_UNITS * ROWS * p.q_strides.s;
#pragma unroll
    for (int u = 0; u < QUERY_UNITS; u++)
      next[u] = load8(q + u * ROWS * p.q_strides.s,
                      has_feature && step + 1 < QUERY_STEPS && row + (QUERY_UNITS + u) * ROWS < p.Sq);
#pragma unroll
    for (int u = 0; u < QUERY_UNITS; u++) quantize_query(p, bh, row + u * ROWS, feature, now[u], mean);
  }
}

// Eight features of a key, minus the mean.
DEVICE void load_key(float (&x)[8], const QuantizeParams& p, const uint4& from, bool exists,
                     const float (&mean)[8]) {
  unpack8(x, from);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = exists ? x[i] - mean[i] : 0.f;
  rotate(x, p.rotation);
}

// The largest number of a CTA. Consecutive calls must use different `of_warps`.
DEVICE float largest_of_cta(float (&of_warps)[THREADS / 32], float largest) {
  largest = largest_of_lanes<32>(largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) largest = fmaxf(largest, of_warps[i]);
  return largest;
}

// Quantises KEY_STEPS blocks of SCALE_BLOCK keys of a head, with one scale per block. The next block is
// loaded into registers meanwhile.
DEVICE void quantize_keys(const QuantizeParams& p, Shared& shared, int head, int part) {
  const int Hkv = p.Hq / p.group, b = head / Hkv, feature = threadIdx.x % HEAD_LANES * 8;
  const int keys = keys_of_row(p, b), blocks = 2 * ((p.Sk + VALUE_BLOCK - 1) / VALUE_BLOCK);
  int block = part * KEY_STEPS, row = block * SCALE_BLOCK + threadIdx.x / HEAD_LANES;
  const int end = min(block + KEY_STEPS, blocks);
  const bool has_feature = feature < p.D;
  const Element* k = row_at(p.k, p.k_strides, b, head % Hkv, row) + feature;
  float mean[8] = {};
  uint4 next[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; u++)
    next[u] = load8(k + u * ROWS * p.k_strides.s, has_feature && row + u * ROWS < keys);
  if (p.mean) load_mean(mean, p, head, feature);
#pragma unroll 1
  for (; block < end; block++, row += SCALE_BLOCK) {
    uint4 now[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) now[u] = next[u];
    k += SCALE_BLOCK * p.k_strides.s;
    const auto load_next = [&] {
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        next[u] = load8(k + u * ROWS * p.k_strides.s,
                        has_feature && block + 1 < end && row + SCALE_BLOCK + u * ROWS < keys);
    };
    if (!ROTATED_BITS) load_next();  // with a rotation there are not enough registers
    float largest = 0.f;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      float x[8];
      load_key(x, p, now[u], row + u * ROWS < keys, mean);
      largest = fmaxf(largest, largest_of(x));
    }
    largest = largest_of_cta(shared.warps[block & 1], largest);
    float scale;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      float x[8];
      forget(now[u]);
      load_key(x, p, now[u], row + u * ROWS < keys, mean);
      scale = store8(p.k8 + ((long long)head * p.Sk + row + u * ROWS) * p.D + feature, x, largest,
                     has_feature && row + u * ROWS < p.Sk);
    }
    if (threadIdx.x == 0) p.k_scale[(long long)head * blocks + block] = scale;
    if (ROTATED_BITS) load_next();
  }
}

// The words of a block per thread of a channel, and the distance in keys from one to the next.
constexpr int VALUE_STEPS = WORDS * VALUE_LANES / THREADS, KEYS_OF_STEP = THREADS / VALUE_LANES * 4;
static_assert(THREADS / VALUE_LANES % 8 == 0, "the same order of keys in each step");

// The values of four keys of a word, in eight channels.
DEVICE void load_values(uint4 (&x)[4], const QuantizeParams& p, const Element* v, int key, bool exists,
                        int keys) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = key + (i >> 1) * 8 + (i & 1);
    x[i] = load8(v + row * p.v_strides.s, exists && row < keys);
  }
}

// Quantises VALUE_BLOCKS blocks of a head's values. Those of the next step are loaded into registers
// meanwhile.
DEVICE void quantize_values(const QuantizeParams& p, Shared& shared, int head, int part) {
  const int Hkv = p.Hq / p.group, b = head / Hkv, channel = threadIdx.x % VALUE_LANES * 8;
  const int keys = keys_of_row(p, b), blocks = (p.Sk + VALUE_BLOCK - 1) / VALUE_BLOCK;
  const Element* v = row_at(p.v, p.v_strides, b, head % Hkv, 0) + channel;
  const bool exists = channel < p.Dv;
  int block = part * VALUE_BLOCKS, key = block * VALUE_BLOCK + key_of_word(threadIdx.x / VALUE_LANES);
  const int end = min(block + VALUE_BLOCKS, blocks);
  uint4 next[4];
  load_values(next, p, v, key, exists, keys);
  wait_for_statistics(p.largest_found + head, p.parts);
  float inverse[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int exponent = scale_exponent(exists ? __int_as_float(p.largest[head * p.Dv + channel + i]) : 0.f);
    inverse[i] = __int_as_float(254 - exponent << 23);
    if (part == 0 && threadIdx.x < VALUE_LANES && exists)
      p.v_scale[head * p.Dv + channel + i] = __int_as_float(exponent << 23);
  }
#pragma unroll 1
  for (; block < end; block++) {
    auto& transposed = shared.transposed[block % VALUE_BLOCKS];
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; step++, key += KEYS_OF_STEP) {
      uint4 now[4];
#pragma unroll
      for (int i = 0; i < 4; i++) now[i] = next[i];
      const bool has_next = step + 1 < VALUE_STEPS || block + 1 < end;
      load_values(next, p, v, key + KEYS_OF_STEP, exists && has_next, keys);
      const int word = threadIdx.x / VALUE_LANES + step * (THREADS / VALUE_LANES);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 a = unpack(word_of(now[0], i)), b = unpack(word_of(now[1], i)),
                     c = unpack(word_of(now[2], i)), d = unpack(word_of(now[3], i));
        const float x = inverse[2 * i], y = inverse[2 * i + 1];
        transposed.at(channel + 2 * i, word) = pack_e4m3(a.x * x, b.x * x, c.x * x, d.x * x);
        transposed.at(channel + 2 * i + 1, word) = pack_e4m3(a.y * y, b.y * y, c.y * y, d.y * y);
      }
    }
    store_transposed((u32*)p.v8, transposed, p.Dv, blocks, head, block);
  }
}

// Whether `i` is among the next `count` CTAs; if not, subtracts `count` from `i`.
DEVICE bool is_one_of(int& i, int count) {
  if (i < count) return true;
  i -= count;
  return false;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    quantize(const __grid_constant__ QuantizeParams p) {
  const int heads = p.B * (p.Hq / p.group), q_parts = (p.Sq + QUERIES - 1) / QUERIES,
            v_parts = (p.Sk + VALUE_BLOCKS * VALUE_BLOCK - 1) / (VALUE_BLOCKS * VALUE_BLOCK),
            k_parts = (2 * ((p.Sk + VALUE_BLOCK - 1) / VALUE_BLOCK) + KEY_STEPS - 1) / KEY_STEPS;
  __shared__ Shared shared;
  launch_dependent_grids();
  int i = blockIdx.x;
  if (is_one_of(i, p.mean ? heads : 0)) find_mean(p, shared, i);
  else if (is_one_of(i, p.q8 ? p.B * p.Hq * q_parts : 0)) quantize_queries(p, i / q_parts, i % q_parts);
  else if (is_one_of(i, heads * p.parts)) find_largest(p, shared, i / p.parts, i % p.parts);
  else if (is_one_of(i, heads * v_parts)) quantize_values(p, shared, i / v_parts, i % v_parts);
  else quantize_keys(p, shared, i / k_parts, i % k_parts);
}
