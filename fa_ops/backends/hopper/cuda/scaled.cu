// Prepares e4m3 tensors for quantized.cu: transposes their values, and expands the caller's scales to one per
// query, per 64 keys and per channel.
//
// Compile-time: VALUE_LANES
#include "scaled_params.cuh"

#include "transposed_values.cuh"

DEVICE void transpose_values(const ScaledParams& p, TransposedValues& transposed, int head, int block,
                             int blocks) {
  const int b = head / p.Hkv, channel = threadIdx.x % VALUE_LANES * 8;
  const int keys = p.kv_lens ? max(0, min(p.kv_lens[b], p.Sk)) : p.Sk;
  const unsigned char* v = p.v + b * p.v_strides.b + head % p.Hkv * p.v_strides.h + channel;
#pragma unroll
  for (int word = threadIdx.x / VALUE_LANES; word < WORDS; word += THREADS / VALUE_LANES) {
    const int key = block * VALUE_BLOCK + key_of_word(word);
    u32 x[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = key + (i >> 1) * 8 + (i & 1);
      const bool exists = channel < p.Dv && row < keys;
      const uint2 y = exists ? *(const uint2*)(v + row * p.v_strides.s) : make_uint2(0, 0);
      x[i][0] = y.x, x[i][1] = y.y;
    }
    transpose_bytes(transposed, channel, word, x);
  }
  store_transposed(p.v8, transposed, p.Dv, blocks, head, block);
}

// Writes element `i` of scales with `length` elements per head.
DEVICE void store_scale(float* to, const float* from, const ScaleOrder& order, long long i, int length) {
  const long long head = i / length;
  const int at = (int)(i - head * length) / order.per;
  to[i] = from[head * order.each + min(at, max(order.each - 1, 0))];
}

extern "C" __global__ void __launch_bounds__(THREADS) scaled(const __grid_constant__ ScaledParams p) {
  __shared__ TransposedValues transposed;
  const int heads = p.B * p.Hkv, blocks = (p.Sk + VALUE_BLOCK - 1) / VALUE_BLOCK;
  const int transposing = heads * blocks;
  if (blockIdx.x < transposing)
    return transpose_values(p, transposed, blockIdx.x / blocks, blockIdx.x % blocks, blocks);
  long long i = (long long)(blockIdx.x - transposing) * THREADS + threadIdx.x;
  const long long queries = (long long)p.B * p.Hq * p.Sq;
  const int keys = heads * 2 * blocks, channels = heads * p.Dv;
  if (i < queries) return store_scale(p.q_scale, p.q_from, p.q_order, i, p.Sq);
  i -= queries;
  if (i < keys) return store_scale(p.k_scale, p.k_from, p.k_order, i, 2 * blocks);
  i -= keys;
  if (i < channels) store_scale(p.v_scale, p.v_from, p.v_order, i, p.Dv);
}
