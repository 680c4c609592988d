// Quantises query, key and value to 8 bits, as docs/semantics.md defines it, and writes them in the order in
// which quantized.cu copies them. The first CTAs of `quantize` find what a whole row of the batch needs: the
// mean of the keys and the largest value of each channel. The others wait until those of their head are done.
//
// Compile-time: IS_BF16 IS_INT8 HEAD_LANES VALUE_LANES ROTATED_BITS
#include "quantize_params.cuh"

#include "turned_values.cuh"

constexpr int SCALE_BLOCK = 64, MEAN_KEYS = 1024;
constexpr float SMALLEST = 7.888609052210118e-31f;  // 2^-100
constexpr float INT8_LARGEST = 127.43f;

DEVICE int keys_of_row(const QuantizeParams& p, int b) {
  return p.kv_lens ? max(0, min(p.kv_lens[b], p.Sk)) : p.Sk;
}

// Eight elements, or zeros.
DEVICE void load8(float (&x)[8], const Element* from, bool exists) {
  const uint4 y = exists ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
  const float2 a = unpack(y.x), b = unpack(y.y), c = unpack(y.z), d = unpack(y.w);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

// The smallest power of two by which `largest` is at most 448, as an exponent with its bias.
DEVICE int scale_exponent(float largest) {
  const int bits = __float_as_int(fmaxf(largest, SMALLEST));
  return min(max(((bits + 0x1FFFFF) >> 23) - 8, 1), 253);
}

// The nearest integers; the low byte of the sum with 1.5 * 2^23 is one in two's complement.
DEVICE u32 pack_int8(float a, float b, float c, float d) {
  constexpr float FIRST = 12582912.f;
  const u32 low = __byte_perm(__float_as_int(a + FIRST), __float_as_int(b + FIRST), 0x0040);
  const u32 high = __byte_perm(__float_as_int(c + FIRST), __float_as_int(d + FIRST), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// What a CTA has in shared memory, by the work that it does.
union Shared {
  float parts[THREADS][9], warps[THREADS / 32];
  TurnedValues turned;
};

// Reduces over the groups of LANES lanes of a CTA that hold the same eight columns: valid in the first group.
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

// The largest |v| of each channel among some of the keys of a head.
DEVICE void find_largest(const QuantizeParams& p, Shared& shared, int head, int part, int keys) {
  constexpr int GROUPS = THREADS / VALUE_LANES;
  const int Hkv = p.Hq / p.group, b = head / Hkv, channel = threadIdx.x % VALUE_LANES * 8;
  const int share = (keys + p.parts - 1) / p.parts, end = min((part + 1) * share, keys);
  const Element* v = row_at(p.v, p.v_strides, b, head % Hkv, 0) + channel;
  const bool exists = channel < p.Dv;
  float top[8] = {};
#pragma unroll 4
  for (int key = part * share + threadIdx.x / VALUE_LANES; key < end; key += GROUPS) {
    float x[8];
    load8(x, v + key * p.v_strides.s, exists);
#pragma unroll
    for (int i = 0; i < 8; i++) top[i] = fmaxf(top[i], fabsf(x[i]));
  }
  reduce_groups<VALUE_LANES, true>(shared, top);
  if (threadIdx.x < VALUE_LANES && exists)
#pragma unroll
    for (int i = 0; i < 8; i++) atomicMax(p.largest + head * p.Dv + channel + i, __float_as_int(top[i]));
}

// The mean of at most MEAN_KEYS evenly spaced keys of a head.
DEVICE void find_mean(const QuantizeParams& p, Shared& shared, int head, int keys) {
  constexpr int GROUPS = THREADS / HEAD_LANES;
  const int Hkv = p.Hq / p.group, b = head / Hkv, feature = threadIdx.x % HEAD_LANES * 8;
  const int step = max((keys + MEAN_KEYS - 1) / MEAN_KEYS, 1), count = (keys + step - 1) / step;
  const Element* k = row_at(p.k, p.k_strides, b, head % Hkv, 0) + feature;
  const bool exists = feature < p.D;
  float sum[8] = {};
#pragma unroll 16
  for (int i = threadIdx.x / HEAD_LANES; i < count; i += GROUPS) {
    float x[8];
    load8(x, k + (long long)i * step * p.k_strides.s, exists);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += x[j];
  }
  reduce_groups<HEAD_LANES, false>(shared, sum);
  if (threadIdx.x < HEAD_LANES && exists)
#pragma unroll
    for (int i = 0; i < 8; i++) p.mean[head * p.D + feature + i] = sum[i] / max(count, 1);
}

// Statistics of a head come from `parts` CTAs for its values and one for the mean of its keys.
DEVICE int statistics_ctas(const QuantizeParams& p) { return p.parts + (p.mean != nullptr); }

DEVICE void find_statistics(const QuantizeParams& p, Shared& shared, int head, int part) {
  const int keys = keys_of_row(p, head / (p.Hq / p.group));
  if (part == p.parts) find_mean(p, shared, head, keys);
  else find_largest(p, shared, head, part, keys);
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p.finished + head) : "memory");
}

// CTAs start in the order of their indices, so those that this waits for are running or done.
DEVICE void wait_for_statistics(const QuantizeParams& p, int head) {
  if (threadIdx.x == 0) {
    int count;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(p.finished + head) : "memory");
    while (count < statistics_ctas(p));
  }
  __syncthreads();
}

constexpr int UNITS = SCALE_BLOCK * HEAD_LANES / THREADS;  // of eight features, that a thread holds

// Rotates the features of a row, whose lanes hold eight each, by Hadamard's matrix in blocks.
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
  u32 y[2];
#if IS_INT8
  largest = fmaxf(largest, SMALLEST);
  const float scale = largest / INT8_LARGEST, inverse = INT8_LARGEST / largest;
#else
  const int exponent = scale_exponent(largest);
  const float scale = __int_as_float(exponent << 23), inverse = __int_as_float(254 - exponent << 23);
#endif
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float a = x[4 * i] * inverse, b = x[4 * i + 1] * inverse, c = x[4 * i + 2] * inverse,
                d = x[4 * i + 3] * inverse;
    y[i] = IS_INT8 ? pack_int8(a, b, c, d) : pack_e4m3(a, b, c, d);
  }
  if (exists) *(uint2*)to = make_uint2(y[0], y[1]);
  return scale;
}

// Eight features of the mean of a head's keys.
DEVICE void load_mean(float (&mean)[8], const QuantizeParams& p, int head, int feature) {
  wait_for_statistics(p, head);
  if (feature >= p.D) return;
#pragma unroll
  for (int i = 0; i < 8; i++) mean[i] = p.mean[head * p.D + feature + i];
}

// SCALE_BLOCK queries of a head; each token has a scale.
DEVICE void quantize_queries(const QuantizeParams& p, int bh, int block) {
  const int b = bh / p.Hq, h = bh % p.Hq, feature = threadIdx.x % HEAD_LANES * 8;
  const bool has_feature = feature < p.D;
  const int first = block * SCALE_BLOCK + threadIdx.x / HEAD_LANES, head = b * (p.Hq / p.group) + h / p.group;
  float mean[8] = {}, x[UNITS][8];
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int row = first + u * (THREADS / HEAD_LANES);
    load8(x[u], row_at(p.q, p.q_strides, b, h, row) + feature, has_feature && row < p.Sq);
  }
  if (p.mean) load_mean(mean, p, head, feature);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int row = first + u * (THREADS / HEAD_LANES);
    const long long at = (long long)bh * p.Sq + row;
    if (p.mean) {
      float both = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) both += x[u][i] * mean[i];
#pragma unroll
      for (int w = HEAD_LANES / 2; w; w >>= 1) both += __shfl_xor_sync(~0u, both, w);
      if (feature == 0 && row < p.Sq) p.offset[at] = both * p.scale;
    }
    rotate(x[u], p.rotation);
    const float largest = largest_of_lanes<HEAD_LANES>(largest_of(x[u]));
    const float scale = store8(p.q8 + at * p.D + feature, x[u], largest, has_feature && row < p.Sq);
    if (feature == 0 && row < p.Sq) p.q_scale[at] = scale;
  }
}

// SCALE_BLOCK keys of a head, which share a scale.
DEVICE void quantize_keys(const QuantizeParams& p, Shared& shared, int head, int block) {
  const int Hkv = p.Hq / p.group, b = head / Hkv, feature = threadIdx.x % HEAD_LANES * 8;
  const int keys = keys_of_row(p, b), first = block * SCALE_BLOCK + threadIdx.x / HEAD_LANES;
  const bool has_feature = feature < p.D;
  float mean[8] = {}, x[UNITS][8], largest = 0.f;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int row = first + u * (THREADS / HEAD_LANES);
    load8(x[u], row_at(p.k, p.k_strides, b, head % Hkv, row) + feature, has_feature && row < keys);
  }
  if (p.mean) load_mean(mean, p, head, feature);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const bool exists = first + u * (THREADS / HEAD_LANES) < keys;
#pragma unroll
    for (int i = 0; i < 8; i++) x[u][i] = exists ? x[u][i] - mean[i] : 0.f;
    rotate(x[u], p.rotation);
    largest = fmaxf(largest, largest_of(x[u]));
  }
  auto& warps = shared.warps;
  largest = largest_of_lanes<32>(largest);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) largest = fmaxf(largest, warps[i]);
  float scale;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int row = first + u * (THREADS / HEAD_LANES);
    scale = store8(p.k8 + ((long long)head * p.Sk + row) * p.D + feature, x[u], largest,
                   has_feature && row < p.Sk);
  }
  const int blocks = 2 * ((p.Sk + VALUE_BLOCK - 1) / VALUE_BLOCK);
  if (threadIdx.x == 0) p.k_scale[(long long)head * blocks + block] = scale;
}

// VALUE_BLOCK values of a head.
DEVICE void quantize_values(const QuantizeParams& p, Shared& shared, int head, int block) {
  auto& turned = shared.turned;
  const int Hkv = p.Hq / p.group, b = head / Hkv, channel = threadIdx.x % VALUE_LANES * 8;
  const int keys = keys_of_row(p, b);
  const Element* v = row_at(p.v, p.v_strides, b, head % Hkv, 0) + channel;
  const bool exists = channel < p.Dv;
  wait_for_statistics(p, head);
  float inverse[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int exponent = scale_exponent(exists ? __int_as_float(p.largest[head * p.Dv + channel + i]) : 0.f);
    inverse[i] = __int_as_float(254 - exponent << 23);
    if (block == 0 && threadIdx.x < VALUE_LANES && exists)
      p.v_scale[head * p.Dv + channel + i] = __int_as_float(exponent << 23);
  }
#pragma unroll
  for (int word = threadIdx.x / VALUE_LANES; word < WORDS; word += THREADS / VALUE_LANES) {
    const int key = block * VALUE_BLOCK + key_of_word(word);
    float x[4][8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = key + (i >> 1) * 8 + (i & 1);
      load8(x[i], v + row * p.v_strides.s, exists && row < keys);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      turned[channel + i][word] = pack_e4m3(x[0][i] * inverse[i], x[1][i] * inverse[i], x[2][i] * inverse[i],
                                            x[3][i] * inverse[i]);
  }
  store_turned((u32*)p.v8, turned, p.Dv, (p.Sk + VALUE_BLOCK - 1) / VALUE_BLOCK, head, block);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ QuantizeParams p) {
  const int heads = p.B * (p.Hq / p.group), q_blocks = (p.Sq + SCALE_BLOCK - 1) / SCALE_BLOCK,
            v_blocks = (p.Sk + VALUE_BLOCK - 1) / VALUE_BLOCK, k_blocks = 2 * v_blocks;
  __shared__ Shared shared;
  const int parts = statistics_ctas(p);
  int i = blockIdx.x;
  if (i < heads * parts) return find_statistics(p, shared, i % heads, parts - 1 - i / heads);
  i -= heads * parts;
  if (i < heads * v_blocks) return quantize_values(p, shared, i / v_blocks, i % v_blocks);
  i -= heads * v_blocks;
  if (i < heads * k_blocks) return quantize_keys(p, shared, i / k_blocks, i % k_blocks);
  i -= heads * k_blocks;
  quantize_queries(p, i / q_blocks, i % q_blocks);
}
