// Prepares e4m3 tensors for quantized.cu: transposes their values, and expands the caller's scales to one per
// query, per 64 keys and per channel. `scaled` does so for a batch, `scaled_packed` for packed sequences, of
// which it also writes the first key and the first block of each.
//
// Compile-time: VALUE_LANES, and of packed sequences IS_PAGED
#include "eight_bit.cuh"
#include "elements.cuh"
#include "sequences.cuh"

// The location of the scale of an element of a head: there are `each` scales per head, each for `per`
// elements; `each` is 0 if there is a single scale.
struct ScaleOrder {
  int each, per;
};

// fa_ops/backends/hopper/runtime/structs.py reads these declarations.
struct ScaledParams {
  const unsigned char* v;
  const float *q_from, *k_from, *v_from;  // the caller's scales
  u32* v8;                                // (B, Hkv, Dv, 128 blocks of keys)
  float *q_scale, *k_scale, *v_scale;     // (B, Hq, Sq), (B, Hkv, 2 blocks of keys), (B, Hkv, Dv)
  const int* kv_lens;                     // (B,) or null
  Strides v_strides;
  ScaleOrder q_order, k_order, v_order;
  int B, Hq, Hkv, Sq, Sk, Dv;
};

struct ScaledPackedParams {
  const unsigned char* v;                 // (Tk, Hkv, Dv), or pages (pages, page, Hkv, Dv)
  const float *q_from, *k_from, *v_from;  // one number, or (B, Hq), (B, Hkv), (B, Hkv)
  const int* cu_seqlens_k;                // (B + 1,), or null with pages
  const int* lens_from;                   // (B,), or null without pages
  u32* v8;                                // (Hkv, Dv, 128 key_blocks)
  float *q_scale, *k_scale, *v_scale;     // (Hq, Tq), (Hkv, 2 key_blocks), (B, Hkv, Dv)
  int* kv_lens;                           // (B,): the number of keys of each sequence
  int2* key_starts;                       // (B,): its first key (0 for pages) and its first block
  PageTable pages;
  Strides v_strides;             // b: from page to page
  int q_each, k_each, v_each;    // whether there is one scale per sequence and head
  int B, Hq, Hkv, Tq, keys, Dv;  // keys: tokens, or for pages the capacity of one sequence
  int key_blocks;
};

#if ENTRY_scaled
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
#endif

#if ENTRY_scaled_packed
// The keys of packed sequences, in blocks of VALUE_BLOCK. Each sequence starts in a new block. For contiguous
// keys, sequence b starts at block `first key / VALUE_BLOCK + b`, which leaves room for all sequences before
// it. For pages, each sequence has as many blocks as its row of the page table can hold.
struct PackedKeys {
  const int* cu_seqlens;  // (sequences + 1,), for contiguous keys
  const int* lens;        // (sequences,) or null
  int sequences, tokens;  // tokens: of all sequences, or for pages the capacity of one sequence
  bool sorted;            // whether cu_seqlens is non-decreasing

#if IS_PAGED
  DEVICE int begin(int) const { return 0; }
  DEVICE int count(int b) const { return max(0, min(lens[b], tokens)); }
  DEVICE int first_block(int b) const { return b * ((tokens + VALUE_BLOCK - 1) / VALUE_BLOCK); }
#else
  DEVICE int begin(int b) const { return sequence_begin(cu_seqlens, b, tokens, sorted); }
  DEVICE int count(int b) const {
    const int all = begin(b + 1) - begin(b);
    return lens ? max(0, min(lens[b], all)) : all;
  }
  DEVICE int first_block(int b) const { return begin(b) / VALUE_BLOCK + b; }
#endif

  // The sequence that a block belongs to: the last one that does not start after it, or -1.
  DEVICE int sequence_of(int block) const {
    int after = 0, stop = sequences;  // the first sequence that starts after it lies in [after, stop]
    while (after < stop) {
      const int middle = (after + stop) / 2;
      if (first_block(middle) <= block) after = middle + 1;
      else stop = middle;
    }
    return after - 1;
  }
};

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
#endif
