// The parameters of decode.cu, and how it partitions its work.
#pragma once
#include "elements.cuh"
#include "paged_kv.cuh"
#include "work_ranges.cuh"

constexpr int BLOCK_N = 16 * WARPS, COPIES = BLOCK_N / COPY_KEYS;  // keys per tile, and copies per tile
#if IS_E4M3
typedef E4m3 CacheElement;
#else
typedef Element CacheElement;
#endif

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct DecodeParams {
  TensorMap q, k, v;
  Element* out;                       // (B, Sq, Hq, Dv)
  float* lse;                         // (B, Hq, Sq)
  float2* partial;                    // (2 * CTAs, ROWS, VALUE_DIM / 2), see combine.cuh
  float2* partial_stats;              // (2 * CTAs, ROWS)
  const int* kv_lens;                 // (B,) or null
  const int* ranges;                  // (B|1, ranges_b) or null: begin and end of each batch row's keys
  const int* table;                   // (B, table_stride) or null
  const float* sinks;                 // (Hq,) or null
  const float* alibi;                 // (B|1, Hq) or null
  const float *k_scale, *v_scale;     // or null, see decode_scales.cuh
  int B, Hq, Hkv, group, Sq, Sk, Dv;  // Sk: capacity of the cache
  int idle;  // groups of CTAs without work in the last wave, if each processes whole items
  int window_left, window_right, page, page_count, table_stride, alibi_b, ranges_b;
  float tanh_scale, scale_log2, alibi_unit;
  int D;
  int width;  // CTAs per group, one for each kv head
  const Element* q_rows;  // the tensors of the maps, for rows that are attended exactly
  const CacheElement *k_rows, *v_rows;
  Strides q_strides, k_strides, v_strides;
};

DEVICE int capacity_tiles(const DecodeParams& p) { return ceil_div(p.Sk, BLOCK_N); }
DEVICE int whole_tiles(const DecodeParams&) { return WHOLE_TILES; }
DEVICE BatchRow batch_row(const DecodeParams& p, int b) {
  BatchRow r;
  r.keys = keys_of(p, b), r.begin = max(0, r.keys - p.Sq - p.window_left), r.end = r.keys;
#if HAS_RANGES
  r.begin = max(r.begin, p.ranges[b * p.ranges_b]), r.end = max(min(r.end, p.ranges[b * p.ranges_b + 1]), 0);
#endif
  r.begin = min(r.begin, r.end), r.first = r.begin / BLOCK_N;
  r.count = max(1, (r.end + BLOCK_N - 1) / BLOCK_N - r.first);
  return r;
}

// If the heads of a token are adjacent in memory, the CTAs of a group attend the same tokens at about the
// same time, each for one head.
DEVICE int group_width(const DecodeParams& p) { return SHARES_TOKENS ? p.width : 1; }
DEVICE int items_per_row(const DecodeParams& p) { return (u32)p.Hkv / (u32)group_width(p); }
DEVICE int kv_head(const DecodeParams& p, const Split& t) {
  return SHARES_TOKENS ? t.item * p.width + blockIdx.x % (u32)p.width : t.item;
}
DEVICE int packed_rows(const DecodeParams& p) { return p.group * p.Sq; }
DEVICE int stats_per_row(const DecodeParams&) { return 1; }
DEVICE int partial_column(const DecodeParams&, int pair) { return pair * 2; }

// Whole items, if all have the same length and no CTA gets more than one tile beyond its share: then nothing
// needs merging. Otherwise single tiles.
DEVICE Partition partition_of(const DecodeParams& p, int total, int shortest, int longest) {
  const int groups = gridDim.x / (u32)group_width(p);
  if (shortest == longest && (long long)p.idle * longest <= groups) return whole_items(p);
  return {groups, total};
}
