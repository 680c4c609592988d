// The scales by which decode.cu multiplies e4m3 keys and values: none (HAS_SCALES 0), of each batch row and
// KV head (1), or of each page and KV head (2).
#pragma once
#include "decode_params.cuh"

// Those of a batch row, for one KV head.
struct RowScales {
#if HAS_SCALES == 1
  float key, value;

  DEVICE static RowScales of(const DecodeParams& p, int b, int h) {
    const int at = b * p.Hkv + h;
    return {p.k_scale ? p.k_scale[at] : 1.f, p.v_scale ? p.v_scale[at] : 1.f};
  }
  DEVICE static RowScales from_bits(int key, int value) {
    return {__int_as_float(key), __int_as_float(value)};
  }
#else
  static constexpr float key = 1.f, value = 1.f;

  DEVICE static RowScales of(const DecodeParams&, int, int) { return {}; }
  DEVICE static RowScales from_bits(int, int) { return {}; }
#endif
};

#if HAS_SCALES == 2
constexpr u32 SCALES_BYTES = COPIES * 8;  // of a tile: a key's and a value's for each copy

// Executed by a warp, of which each lane has the page of a copy, or -1.
DEVICE void copy_page_scales(const DecodeParams& p, u32 to, int h, int page) {
  const int lane = threadIdx.x & 31;
  if (lane >= COPIES) return;
  const float* const both[2] = {p.k_scale, p.v_scale};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (both[i]) copy_word(to + lane * 8 + i * 4, both[i] + (long long)max(page, 0) * p.Hkv + h, page >= 0);
}
#else
constexpr u32 SCALES_BYTES = 0;
#endif

// Those of the page that holds a warp's 16 keys. A weight for values of scale v is 2^(score + log2 |v|),
// relative to the largest such power, as the products with values are of 16-bit numbers. The sum of weights
// without scales is that of weights divided by |v|.
struct PageScales {
  float key, value_log2, value_inverse;
  u32 value_sign;  // of two weights in a word

  DEVICE static PageScales of(const DecodeParams& p, u32 tile_scales, int copy) {
#if HAS_SCALES == 2
    const float2 x = load_shared<float2>(tile_scales + copy * 8);
    const float value = p.v_scale ? x.y : 1.f;
    const float size = fmaxf(fabsf(value), LEAST);
    return {p.k_scale ? x.x : 1.f, log2_fast(size), reciprocal_fast(size), value < 0.f ? 0x80008000u : 0u};
#else
    return {1.f, 0.f, 1.f, 0u};
#endif
  }

  static constexpr float LEAST = 1e-30f;  // a scale may be 0
};
