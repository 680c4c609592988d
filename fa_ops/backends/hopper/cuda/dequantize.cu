// Converts an e4m3 cache to 16 bits and multiplies it by its scales, for kernels that attend 16-bit caches. A
// CTA converts some tokens of a batch row for all KV heads. In the result the pages of a batch row are
// consecutive; its page table marks which of them exist.
#include "elements.cuh"
#include "sequences.cuh"

constexpr int TOKENS = 16, THREADS = 256;  // per CTA; a page has a multiple of 16 tokens

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct DequantizeParams {
  const E4m3 *k, *v;
  const float *k_scale, *v_scale;  // or null
  const int* kv_lens;              // (B,)
  const int* table;                // (B, table_stride) or null
  Element *k_out, *v_out;          // (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv)
  int* table_out;                  // (B, Sk / page) or null
  Strides k_strides, v_strides;    // of batch rows or pages, heads and tokens
  int B, Hkv, Sk, D, Dv, page, page_count, table_stride;
  int scales;  // 1: (B, Hkv), 2: (pages, Hkv), 3: (pages, page, Hkv) or (B, Hkv, Sk)
};

// The source and destination of a batch row's tokens: they are copied from token `token` of page or batch row
// `from` to token `to` of the result.
struct TokenRange {
  int b, from, token, count;
  long long to;
};

// The index of a token's scale, for one KV head.
DEVICE long long scale_at(const DequantizeParams& p, const TokenRange& t, int h, int s) {
  if (p.scales == 1) return (long long)t.b * p.Hkv + h;
  if (p.scales == 2) return (long long)t.from * p.Hkv + h;
  if (p.table) return ((long long)t.from * p.page + t.token + s) * p.Hkv + h;
  return ((long long)t.b * p.Hkv + h) * p.Sk + t.token + s;
}

DEVICE void convert(const DequantizeParams& p, const TokenRange& t, const E4m3* x, const Strides& strides,
                    const float* scales, int dim, Element* out) {
  const int chunks = dim / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < t.count * p.Hkv * chunks; i += THREADS) {
    const int row = (u32)i / (u32)chunks, column = (i - row * chunks) * 8;
    const int s = (u32)row / (u32)p.Hkv, h = row - s * p.Hkv;
    const uint2 found = __ldg((const uint2*)(row_at(x, strides, t.from, h, t.token + s) + column));
    const float scale = scales ? scales[scale_at(p, t, h, s)] : 1.f;
    const u32 words[2] = {found.x, found.y};
    u32 y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 z = unpack_e4m3((unsigned short)(words[j / 2] >> 16 * (j % 2)));
      y[j] = pack(z.x * scale, z.y * scale);
    }
    *(uint4*)(out + (t.to * p.Hkv + row) * dim + column) = make_uint4(y[0], y[1], y[2], y[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(const __grid_constant__ DequantizeParams p) {
  const int first = blockIdx.x * TOKENS;
  for (int b = blockIdx.y; b < p.B; b += gridDim.y) {
    const int end = keys_of(p, b);
    TokenRange t = {b, b, first, min(TOKENS, end - first), (long long)b * p.Sk + first};
    if (p.table) {
      const int number = first / p.page;
      t.from = first < end ? p.table[(long long)b * p.table_stride + number] : -1, t.token = first % p.page;
      const bool exists = (u32)t.from < (u32)p.page_count;
      const int own = b * (p.Sk / p.page) + number;
      if (t.token == 0 && threadIdx.x == 0) p.table_out[own] = exists ? own : -1;
      if (!exists) continue;
    }
    if (t.count <= 0) continue;
    convert(p, t, p.k, p.k_strides, p.k_scale, p.D, p.k_out);
    convert(p, t, p.v, p.v_strides, p.v_scale, p.Dv, p.v_out);
  }
}
