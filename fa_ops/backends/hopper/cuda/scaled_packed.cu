// Prepares e4m3 tensors of packed sequences for quantized.cu, as scaled.cu does for a batch: transposes their
// values, expands the caller's scales to one per query, per 64 keys and per channel, and writes the first key
// and the first block of each sequence.
//
// Compile-time: VALUE_LANES IS_PAGED
#include "scaled_packed_params.cuh"

#include "packed_keys.cuh"
#include "transposed_values.cuh"

static_assert(KEY_BLOCK == VALUE_BLOCK, "the same blocks");

// Whether key `i` of `count` keys of sequence `b` exists, and the address of its values.
DEVICE bool find_values(const ScaledPackedParams& p, const PackedKeys& keys, int b, int count, int i, int h,
                        const unsigned char*& values) {
  if (i >= count) return false;
#if IS_PAGED
  const int page = p.pages.page_of(b, i);
  values = p.v + page * p.v_strides.b + h * p.v_strides.h + i % p.pages.size * p.v_strides.s;
  return p.pages.exists(page);
#else
  values = p.v + h * p.v_strides.h + (keys.begin(b) + i) * p.v_strides.s;
  return true;
#endif
}

DEVICE void transpose_values(const ScaledPackedParams& p, const PackedKeys& keys,
                             TransposedValues& transposed, int h, int block) {
  const int b = keys.sequence_of(block), channel = threadIdx.x % VALUE_LANES * 8;
  const int first = b < 0 ? 0 : (block - keys.first_block(b)) * VALUE_BLOCK;
  const int count = b < 0 ? 0 : keys.count(b);
  if (first >= count) return;  // no key in this block
#pragma unroll
  for (int word = threadIdx.x / VALUE_LANES; word < WORDS; word += THREADS / VALUE_LANES) {
    const int key = first + key_of_word(word);
    u32 x[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned char* values;
      const bool exists =
          channel < p.Dv && find_values(p, keys, b, count, key + (i >> 1) * 8 + (i & 1), h, values);
      const uint2 y = exists ? *(const uint2*)(values + channel) : make_uint2(0, 0);
      x[i][0] = y.x, x[i][1] = y.y;
    }
    transpose_bytes(transposed, channel, word, x);
  }
  store_transposed(p.v8, transposed, p.Dv, p.key_blocks, h, block);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scaled_packed(const __grid_constant__ ScaledPackedParams p) {
  __shared__ TransposedValues transposed;
  const bool sorted_q = are_sorted(p.pages.cu_seqlens_q, p.B);
  const bool sorted_k = IS_PAGED || are_sorted(p.cu_seqlens_k, p.B);
  const PackedKeys keys = {p.cu_seqlens_k, p.lens_from, p.B, p.keys, sorted_k};
  const int transposing = p.Hkv * p.key_blocks;
  if (blockIdx.x < transposing)
    return transpose_values(p, keys, transposed, blockIdx.x / p.key_blocks, blockIdx.x % p.key_blocks);
  long long i = (long long)(blockIdx.x - transposing) * THREADS + threadIdx.x;
  if (i < (long long)p.Hq * p.Tq) {
    const int h = (int)(i / p.Tq), b = sequence_of(p.pages.cu_seqlens_q, p.B, (int)(i % p.Tq), sorted_q);
    p.q_scale[i] = p.q_from[p.q_each ? max(0, min(b, p.B - 1)) * p.Hq + h : 0];
    return;
  }
  i -= (long long)p.Hq * p.Tq;
  if (i < p.Hkv * 2 * p.key_blocks) {
    const int h = (int)i / (2 * p.key_blocks), b = keys.sequence_of((int)i / 2 % p.key_blocks);
    p.k_scale[i] = p.k_from[p.k_each ? max(0, b) * p.Hkv + h : 0];
    return;
  }
  i -= p.Hkv * 2 * p.key_blocks;
  if (i < p.B * p.Hkv * p.Dv) {
    p.v_scale[i] = p.v_from[p.v_each ? i / p.Dv : 0];
    return;
  }
  i -= p.B * p.Hkv * p.Dv;
  if (i >= p.B) return;
  p.kv_lens[i] = keys.count((int)i);
  p.key_starts[i] = make_int2(keys.begin((int)i), keys.first_block((int)i));
}
