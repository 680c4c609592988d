// The scales of e4m3 keys and values in decode.cu. HAS_SCALES is 0 without scales, 1 for (B, Hkv), 2 for
// (pages, Hkv), and 3 for scales of tokens: (pages, page, Hkv) or (B, Hkv, Sk).
#pragma once
#include "decode_params.cuh"

// Whether a tile has a scale for each token, also where the 16 keys of a warp may be in several pages.
#define SCALES_TOKENS (HAS_SCALES == 3 || (HAS_SCALES == 2 && COPY_KEYS < 16))

// The scales of a batch row, for one KV head.
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

// The scales of a tile in shared memory: those of the keys (one per copy or token), then those of the values.
constexpr bool HAS_TILE_SCALES = HAS_SCALES >= 2;
constexpr int TILE_SCALES = SCALES_TOKENS ? BLOCK_N : HAS_SCALES == 2 ? COPIES : 0;
constexpr u32 SCALES_BYTES = TILE_SCALES * 8;

// The index of a token's scale: token `key` of batch row `b`, or token `slot` of a page.
DEVICE long long scale_at(const DecodeParams& p, int b, int h, int page, int slot, int key) {
  if (HAS_SCALES == 2) return (long long)page * p.Hkv + h;
  if (IS_PAGED) return ((long long)page * p.page + slot) * p.Hkv + h;
  return ((long long)b * p.Hkv + h) * p.Sk + key;
}

// Copies COUNT scales of a tile, from scale `begin` on; those of keys that are not attended become 0.
// Executed by one warp. `page_of(i)` returns the page of this lane's scale among 32 from `begin + i` on, or
// -1.
template <int COUNT, class PageOf>
DEVICE void copy_tile_scales(const DecodeParams& p, u32 to, int b, int h, int tile, int begin, KeyRange keys,
                             PageOf page_of) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int base = 0; base < COUNT; base += 32) {
    const int i = begin + base + lane, key = tile * BLOCK_N + (SCALES_TOKENS ? i : i * COPY_KEYS);
    const int own_page = page_of(base);
    if (base + lane >= COUNT) continue;
    bool is_there = !IS_PAGED || own_page >= 0;
    if (SCALES_TOKENS) is_there = is_there && key >= keys.begin && key < keys.end;
    const long long at = is_there ? scale_at(p, b, h, own_page, IS_PAGED ? key % p.page : 0, key) : 0;
    if (p.k_scale) copy_word(to + i * 4, p.k_scale + at, is_there);
    if (p.v_scale) copy_word(to + (TILE_SCALES + i) * 4, p.v_scale + at, is_there);
  }
}

// The scales of a lane's keys among the 16 of its warp, two in each half. In the product with values of scale
// v, which is in 16 bits, a weight is 2^(score + log2 |v|) relative to a reference near the row's largest
// such power. The sum of weights does not contain scales.
struct TileScales {
#if SCALES_TOKENS
  float2 keys[2], values[2];

  DEVICE static TileScales of(const DecodeParams& p, u32 at, int first) {
    TileScales s;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 own = at + (first + j * 8 + (threadIdx.x & 3) * 2) * 4;
      s.keys[j] = p.k_scale ? load_shared<float2>(own) : make_float2(1.f, 1.f);
      s.values[j] = p.v_scale ? load_shared<float2>(own + TILE_SCALES * 4) : make_float2(1.f, 1.f);
    }
    return s;
  }
  DEVICE float key(int j, int i) const { return i ? keys[j].y : keys[j].x; }
  DEVICE float value(int j, int i) const { return i ? values[j].y : values[j].x; }
#elif HAS_SCALES == 2
  float of_keys, of_values;

  DEVICE static TileScales of(const DecodeParams& p, u32 at, int first) {
    const u32 own = at + first / COPY_KEYS * 4;
    return {p.k_scale ? load_shared<float>(own) : 1.f,
            p.v_scale ? load_shared<float>(own + TILE_SCALES * 4) : 1.f};
  }
  DEVICE float key(int, int) const { return of_keys; }
  DEVICE float value(int, int) const { return of_values; }
#else
  DEVICE static TileScales of(const DecodeParams&, u32, int) { return {}; }
  DEVICE float key(int, int) const { return 1.f; }
  DEVICE float value(int, int) const { return 1.f; }
#endif

  DEVICE float log2_size(int j, int i) const {
    return HAS_TILE_SCALES ? log2_fast(fabsf(value(j, i))) : 0.f;
  }
  // The sign bits of two packed weights.
  DEVICE u32 signs(int j) const {
    return HAS_TILE_SCALES ? (value(j, 0) < 0.f ? 0x8000u : 0u) | (value(j, 1) < 0.f ? 0x80000000u : 0u) : 0u;
  }
};
