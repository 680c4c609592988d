// Warpgroup 0 of the forward kernel with 8-bit products: one warp schedules tiles and copies Q, K and V by
// TMA.
#pragma once
#include "paged_copies.cuh"
#include "quantized_rows.cuh"
#include "query_slots.cuh"
#include "tile_producer.cuh"

// A block of keys, counted from key `first` of the tensor.
DEVICE void load_keys(const QuantizedParams& p, const QuantizedShared& sm, PipelineState<STAGES>& k,
                      int block, int h, int b, int first = 0) {
  const u32 bar = barrier(sm.k_full, k.stage), at = slot_at<K_BYTES>(sm.k, k.stage);
  mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
  mbar_arrive_expect(bar, K_BYTES);
#pragma unroll
  for (int x = 0; x < QK_COLUMNS; x++)
    tma_load(at + x * BLOCK_N * 128, p.k, bar, x * 128, first + block * BLOCK_N, h, b);
  k.next();
}

DEVICE void load_values(const QuantizedParams& p, const QuantizedShared& sm, PipelineState<STAGES>& v,
                        int block, int h, int b) {
  const u32 bar = barrier(sm.v_full, v.stage);
  mbar_wait(barrier(sm.v_empty, v.stage), v.phase ^ 1);
  mbar_arrive_expect(bar, V_COPY_BYTES);
  tma_load(slot_at<V_BYTES>(sm.v, v.stage), p.v, bar, block * BLOCK_N, 0, h, b);
  v.next();
}

DEVICE void load_queries(const QuantizedParams& p, const QuantizedShared& sm, const Tile& tile,
                         const PipelineState<2>& work) {
#pragma unroll
  for (int c = 0; c < CONSUMERS; c++) {
    const int slot = query_slot(work, c);
    const u32 bar = barrier(sm.q_full, slot);
    mbar_wait(barrier(sm.q_empty, slot), query_phase(work) ^ 1);
    mbar_arrive_expect(bar, QUANTISES_QUERIES ? RAW_BYTES : Q_BYTES);
#if PACKED_QUERIES
    const int first = tile.first + tile.m0 + c * 64, b = 0;
#else
    const int first = tile.m0 + c * 64, b = tile.b;
#endif
#if QUANTISES_QUERIES
#pragma unroll
    for (int x = 0; x < RAW_COLUMNS; x++)
      tma_load(slot_at<RAW_BYTES>(sm.raw, c) + x * 64 * 128, p.q, bar, x * 128, first, tile.h, b);
#else
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++)
      tma_load(slot_at<Q_BYTES>(sm.q, slot) + x * 64 * 128, p.q, bar, x * 128, first, tile.h, b);
#endif
  }
}

#if IS_PAGED
// Executed by one thread. Where a page does not exist zeros are copied, and consumers read which copies have
// a page.
DEVICE void load_paged_keys(const QuantizedParams& p, const QuantizedShared& sm, PipelineState<STAGES>& k,
                            const PagedBlock& block, int h) {
  const u32 bar = barrier(sm.k_full, k.stage), at = slot_at<K_BYTES>(sm.k, k.stage);
  mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
  store_shared(slot_at<4>(sm.pages, k.stage), block.exists);
  mbar_arrive_expect(bar, K_BYTES);
#pragma unroll
  for (int j = 0; j < COPIES; j++)
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++)
      tma_load(at + (x * BLOCK_N + j * COPY_KEYS) * 128, p.k, bar, x * 128, block.tokens[j], h,
               block.pages[j]);
  k.next();
}

// Executed by one warp, whose lanes look up a block's pages while its leader copies the block before it.
DEVICE void load_work_item(const QuantizedParams& p, const QuantizedShared& sm, const WorkItem& item,
                           const PipelineState<2>& work, PipelineState<STAGES>& k, PipelineState<STAGES>& v,
                           bool leader) {
  const int h = item.tile.h / p.group, first_block = key_start(p, item.tile).y;
  const BlockRange& n = item.blocks;
  PagedCopy next = find_copy(p, item, n.end - 1);
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    const PagedBlock block = gather_copies(p, next);
    next = find_copy(p, item, j - 1);
    if (leader) {
      if (j >= n.begin) load_paged_keys(p, sm, k, block, h);
      if (j == n.end - 1) load_queries(p, sm, item.tile, work);
      else load_values(p, sm, v, first_block + j + 1, h, 0);
    }
    if (j < n.begin) break;
  }
}
#else
// Executed by one thread. K is a block ahead of V, and Q comes after the first block of K.
DEVICE void load_work_item(const QuantizedParams& p, const QuantizedShared& sm, const WorkItem& item,
                           const PipelineState<2>& work, PipelineState<STAGES>& k, PipelineState<STAGES>& v) {
#if PACKED_QUERIES
  const int2 start = key_start(p, item.tile);
  const int h = item.tile.h / p.group, b = 0, first_key = start.x, first_block = start.y;
#else
  const int h = item.tile.h / p.group, b = item.tile.b, first_key = 0, first_block = 0;
#endif
  const BlockRange& n = item.blocks;
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    if (j >= n.begin) load_keys(p, sm, k, j, h, b, first_key);
    if (j == n.end - 1) load_queries(p, sm, item.tile, work);
    else load_values(p, sm, v, first_block + j + 1, h, b);
    if (j < n.begin) break;
  }
}
#endif

// Executed by one warp.
DEVICE void produce(const QuantizedParams& p, const QuantizedShared& sm) {
  PipelineState<STAGES> k, v;
  produce_tiles(p, sm, [&](const WorkItem& item, const PipelineState<2>& work, bool leader) {
#if IS_PAGED
    load_work_item(p, sm, item, work, k, v, leader);
#else
    if (leader) load_work_item(p, sm, item, work, k, v);
#endif
  });
}
