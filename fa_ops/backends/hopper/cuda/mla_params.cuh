// The parameters of mla.cu, and how it partitions its work.
#pragma once
#include "elements.cuh"
#include "work_ranges.cuh"

// fa_ops/backends/hopper/kernel_params.py reads this declaration.
struct MlaParams {
  TensorMap q, k;
  Element* out;                    // (B, Sq, Hq, VALUE_DIM)
  float* lse;                      // (B, Hq, Sq)
  u32* partial;                    // (2 * CTAs, ROWS, VALUE_DIM / 2) pairs of float16, see combine.cuh
  float2* partial_stats;           // (2 * CTAs, ROWS, 2), for each consumer's half of the values
  const int* kv_lens;              // (B,) or null
  const int* table;                // (B, table_stride) or null
  int B, Hq, Sq, Sk;               // Sk: capacity of the cache
  int tokens, heads, head_blocks;  // queries and heads per block of rows, and blocks of heads
  int width, items;                // blocks of rows per CTA group, and CTA groups per batch row
  int window_right, page, page_count, table_stride;
  float scale_log2;
  const Element *q_rows, *k_rows;  // the tensors of the maps, for rows that are attended exactly
  Strides q_strides, k_strides;
};

DEVICE int capacity_tiles(const MlaParams& p) { return ceil_div(p.Sk, BLOCK_N); }
DEVICE BatchRow batch_row(const MlaParams& p, int b) {
  const int keys = keys_of(p, b);
  return {keys, 0, keys, 0, max(1, (int)((u32)(keys + BLOCK_N - 1) / BLOCK_N))};
}
DEVICE int items_per_row(const MlaParams& p) { return p.items; }
DEVICE int group_width(const MlaParams& p) { return p.width; }
DEVICE int packed_rows(const MlaParams& p) { return p.tokens * p.heads; }
DEVICE int stats_per_row(const MlaParams&) { return 2; }
// A lane holds pairs of columns that are 8 apart, and writes four at a time.
DEVICE int partial_column(const MlaParams&, int pair) {
  return (pair >> 4) * 32 + (pair & 3) * 8 + (pair >> 2 & 3) * 2;
}
// The number of tiles that are attended in the time in which the results of a split are written.
DEVICE int tiles_per_write(const MlaParams& p) { return (packed_rows(p) + 32) / 64; }
DEVICE int whole_tiles(const MlaParams& p) { return 2 + 2 * tiles_per_write(p); }

// A range of n tiles takes the time of n tiles. It cuts a batch row of N tiles into N / n splits, each of
// which is written and merged in about 0.05 of a tile's time. The sum is least for n = sqrt(0.05 N).
//
// If all items have the same length, each is whole or cut in the same way where that makes no range much
// longer. No CTA then has parts of two items; to write the partial results of 64 rows takes longer than to
// attend a tile. Whole items spare two such writes, and merging, which takes as long as another tile.
DEVICE Partition partition_of(const MlaParams& p, int total, int shortest, int longest) {
  const int least = max(1, (int)sqrtf(0.05f * (float)longest)),
            groups = max(1, (int)min(gridDim.x / (u32)p.width, (u32)total / (u32)least)),
            items = p.B * p.items, share = ceil_div(total, groups), write = tiles_per_write(p);
  if (items == 1 || shortest != longest) return {groups, total};
  if (ceil_div(items, groups) * longest <= share + 2 * write + 1) return {groups, items, true};
  if (groups >= items) {
    const int grain = ceil_div(longest, (u32)groups / (u32)items), splits = ceil_div(longest, grain);
    if (grain <= share + write) return {items * splits, total, false, longest, splits, grain};
  }
  return {groups, total};
}
