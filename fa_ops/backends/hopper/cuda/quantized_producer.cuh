// Warpgroup 0 of the forward kernel with 8-bit products: one warp schedules tiles and copies Q, K and V by
// TMA.
#pragma once
#include "quantized_shared.cuh"
#include "query_slots.cuh"
#include "tile_producer.cuh"

DEVICE void load_keys(const QuantizedParams& p, const QuantizedShared& sm, PipelineState<STAGES>& k,
                      int block, int h, int b) {
  const u32 bar = barrier(sm.k_full, k.stage), at = slot_at<K_BYTES>(sm.k, k.stage);
  mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
  mbar_arrive_expect(bar, K_BYTES);
#pragma unroll
  for (int x = 0; x < QK_COLUMNS; x++)
    tma_load(at + x * BLOCK_N * 128, p.k, bar, x * 128, block * BLOCK_N, h, b);
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
    mbar_arrive_expect(bar, Q_BYTES);
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++)
      tma_load(slot_at<Q_BYTES>(sm.q, slot) + x * 64 * 128, p.q, bar, x * 128, tile.m0 + c * 64, tile.h,
               tile.b);
  }
}

// Executed by one thread. K is a block ahead of V, and Q comes after the first block of K.
DEVICE void load_work_item(const QuantizedParams& p, const QuantizedShared& sm, const WorkItem& item,
                           const PipelineState<2>& work, PipelineState<STAGES>& k, PipelineState<STAGES>& v) {
  const int h = item.tile.h / p.group, b = item.tile.b;
  const BlockRange& n = item.blocks;
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    if (j >= n.begin) load_keys(p, sm, k, j, h, b);
    if (j == n.end - 1) load_queries(p, sm, item.tile, work);
    else load_values(p, sm, v, j + 1, h, b);
    if (j < n.begin) break;
  }
}

// Executed by one warp.
DEVICE void produce(const QuantizedParams& p, const QuantizedShared& sm) {
  PipelineState<STAGES> k, v;
  produce_tiles(p, sm, [&](const WorkItem& item, const PipelineState<2>& work, bool leader) {
    if (leader) load_work_item(p, sm, item, work, k, v);
  });
}
