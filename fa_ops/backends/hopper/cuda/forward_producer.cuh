// Warpgroup 0 of the forward kernel: one warp schedules tiles and copies Q, K and V by TMA. With a mask or a
// bias, one more warp per consumer loads it.
#pragma once
#include "forward_shared.cuh"
#include "query_slots.cuh"
#include "paged_copies.cuh"
#include "tile_producer.cuh"

// Copies one block of K or V into the next slot of its ring.
template <int COLUMNS>
DEVICE void load_block(u32 slots, u32 full, u32 empty, const TensorMap& map, PipelineState<STAGES>& state,
                       int block, int h, int b) {
  constexpr u32 BYTES = COLUMNS * BLOCK_N * 128;
  const u32 bar = barrier(full, state.stage), at = slot_at<BYTES>(slots, state.stage);
  mbar_wait(barrier(empty, state.stage), state.phase ^ 1);
  mbar_arrive_expect(bar, BYTES);
#pragma unroll
  for (int x = 0; x < COLUMNS; x++) tma_load(at + x * BLOCK_N * 128, map, bar, x * 64, block * BLOCK_N, h, b);
  state.next();
}

DEVICE void load_queries(const ForwardParams& p, const ForwardShared& sm, const Tile& tile,
                         const PipelineState<2>& work) {
#pragma unroll
  for (int c = 0; c < CONSUMERS; c++) {
    const int slot = query_slot(work, c);
    mbar_wait(barrier(sm.q_empty, slot), query_phase(work) ^ 1);
    mbar_arrive_expect(barrier(sm.q_full, slot), CONSUMER_ROWS * HEAD_DIM * 2);
#if PACKED_QUERIES
    const int query = tile.first + query_of(tile.m0 + c * 64), b = 0;
#else
    const int query = query_of(tile.m0 + c * 64), b = tile.b;
#endif
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++)
      tma_load(slot_at<Q_BYTES>(sm.q, slot) + x * 64 * 128, p.q, barrier(sm.q_full, slot), x * 64,
               PACKED_HEADS > 1 ? tile.h : query, PACKED_HEADS > 1 ? query : tile.h, b);
  }
}

#if IS_PAGED
// Copies a block of K or V from pages. Executed by one warp, each lane of which holds the source of one copy.
// Zeros are copied for a page that does not exist; unless 0, `found` is where consumers read which copies
// have a page. `groups` is the number of key groups from page to page.
template <int COLUMNS>
DEVICE void load_paged_block(const ForwardParams& p, u32 slots, u32 full, u32 empty, u32 found,
                             const TensorMap& map, PipelineState<STAGES>& state, int h, const PagedCopy& own,
                             [[maybe_unused]] int groups, bool leader) {
  constexpr u32 BYTES = COLUMNS * BLOCK_N * 128;
  const u32 bar = barrier(full, state.stage), at = slot_at<BYTES>(slots, state.stage),
            exists = __ballot_sync(~0u, p.pages.exists(own.page));
#if WHOLE_ROWS
  const int first = p.pages.exists(own.page) ? own.page * groups + own.token / 8 : -COPY_KEYS;
#endif
  mbar_wait(barrier(empty, state.stage), state.phase ^ 1);
  if (leader) {
    if (found) store_shared(found + 4 * state.stage, exists);
    mbar_arrive_expect(bar, BYTES);
  }
#pragma unroll
  for (int j = 0; j < COPIES; j++) {
#if WHOLE_ROWS
    const int group = __shfl_sync(~0u, first, j);
    if (leader) tma_load_groups(at + j * COPY_KEYS * COLUMNS * 128, map, bar, group, h);
#else
    const int page = __shfl_sync(~0u, own.page, j);
    const int token = COPY_KEYS < 64 ? 0 : __shfl_sync(~0u, own.token, j);
    if (leader)
#pragma unroll
      for (int x = 0; x < COLUMNS; x++)
        tma_load(at + (x * BLOCK_N + j * COPY_KEYS) * 128, map, bar, x * 64, token, h, page);
#endif
  }
  state.next();
}

// Copies the keys of a work item; another warp copies its values. The pages of a block are looked up while
// the previous block is copied. Executed by one warp.
DEVICE void load_work_item(const ForwardParams& p, const ForwardShared& sm, const WorkItem& item,
                           const PipelineState<2>& work, PipelineState<STAGES>& k, bool leader) {
  const int h = item.tile.h / p.group;
  const BlockRange& n = item.blocks;
  PagedCopy keys, next = find_copy(p, item, n.end - 1);
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    keys = next, next = find_copy(p, item, j - 1);
    if (j >= n.begin)
      load_paged_block<QK_COLUMNS>(p, sm.k, sm.k_full, sm.k_empty, sm.pages, p.k, k, h, keys,
                                   p.pages.key_groups, leader);
    if (j == n.end - 1 && leader) load_queries(p, sm, item.tile, work);
    if (j <= n.begin) break;
  }
}
#else
// Copies the keys, queries and values of a work item: K one block ahead of V, and Q after the first block of
// K. The loop is not unrolled, since four iterations would be a sixth of the kernel's code. Executed by one
// thread.
DEVICE void load_work_item(const ForwardParams& p, const ForwardShared& sm, const Tile& tile,
                           const BlockRange& n, const PipelineState<2>& work, PipelineState<STAGES>& k,
                           PipelineState<STAGES>& v) {
  const int h = tile.h / p.group;
  auto load_k = [&](int j) { load_block<QK_COLUMNS>(sm.k, sm.k_full, sm.k_empty, p.k, k, j, h, tile.b); };
  auto load_v = [&](int j) { load_block<V_COLUMNS>(sm.v, sm.v_full, sm.v_empty, p.v, v, j, h, tile.b); };
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    if (j >= n.begin) load_k(j);
    if (j == n.end - 1) load_queries(p, sm, tile, work);
    else load_v(j + 1);
    if (j < n.begin) break;
  }
}
#endif

#if SKIPS_TILES
// Publishes a step before the keys of its block are copied. Executed by one thread.
DEVICE void publish_step(const ForwardShared& sm, const PipelineState<STAGES>& k, u32 step) {
  mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
  store_shared(slot_at<4>(sm.steps, k.stage), step);
  mbar_arrive(barrier(sm.steps_full, k.stage));
}

// The same as `load_work_item`, for the listed tiles of an item.
DEVICE void load_walk(const ForwardParams& p, const ForwardShared& sm, WorkItem item,
                      const PipelineState<2>& work, PipelineState<STAGES>& k, PipelineState<STAGES>& v) {
  const Tile& tile = item.tile;
  const int h = tile.h / p.group, begin = item.blocks.begin;
  auto load_v = [&](int j) { load_block<V_COLUMNS>(sm.v, sm.v_full, sm.v_empty, p.v, v, j, h, tile.b); };
  int block = item.blocks.end - 1, before = -1;
  if (block < begin) load_queries(p, sm, tile, work);
#pragma unroll 1
  while (block >= begin) {
    const bool is_full = item.walk.is_full(block);
    const int next = item.walk.seek(block - 1);
    publish_step(sm, k, step_of(block, is_full, next < begin));
    load_block<QK_COLUMNS>(sm.k, sm.k_full, sm.k_empty, p.k, k, block, h, tile.b);
    if (before < 0) load_queries(p, sm, tile, work);
    else load_v(before);
    before = block, block = next;
  }
  if (before >= 0) load_v(before);
}
#endif

// Executed by one warp.
DEVICE void produce(const ForwardParams& p, const ForwardShared& sm) {
  PipelineState<STAGES> k, v;
  produce_tiles(p, sm, [&](const WorkItem& item, const PipelineState<2>& work, bool leader) {
#if IS_PAGED
    load_work_item(p, sm, item, work, k, leader);
#elif SKIPS_TILES
    if (leader) load_walk(p, sm, item, work, k, v);
#else
    if (leader) load_work_item(p, sm, item.tile, item.blocks, work, k, v);
#endif
  });
}

// Waits for the next work item. Executed by a warp that serves a consumer.
DEVICE WorkItem take_work_item(const ForwardShared& sm, const PipelineState<2>& work) {
  mbar_wait(barrier(sm.work_full, work.stage), work.phase);
  const WorkItem item = load_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage));
  // every thread arrives: racecheck does not accept one arrival per warp
  mbar_arrive(barrier(sm.work_empty, work.stage));
  return item;
}

#if IS_PAGED
// Copies the values of all work items. Executed by one warp.
DEVICE void produce_values(const ForwardParams& p, const ForwardShared& sm) {
  const bool leader = elect_one();
  PipelineState<2> work;
  PipelineState<STAGES> v;
  for (;; work.next()) {
    const WorkItem item = take_work_item(sm, work);
    if (item.tile.m0 == NO_WORK) break;
    const int h = item.tile.h / p.group;
    const BlockRange& n = item.blocks;
    PagedCopy values, next = find_copy(p, item, n.end - 1);
#pragma unroll 1
    for (int j = n.end - 1; j >= n.begin; j--) {
      values = next, next = find_copy(p, item, j - 1);
      load_paged_block<V_COLUMNS>(p, sm.v, sm.v_full, sm.v_empty, 0, p.v, v, h, values, p.pages.value_groups,
                                  leader);
    }
  }
}
#endif

// Calls `bring(block)` for each block of an item whose mask or bias must be read; `blocks` counts them.
template <class Bring>
DEVICE void bring_blocks([[maybe_unused]] const ForwardShared& sm, const BlockRange& n,
                         [[maybe_unused]] PipelineState<STAGES>& steps, PipelineState<1>& blocks,
                         Bring bring) {
#if SKIPS_TILES
  if (n.end <= n.begin) return;
  for (bool is_last = false; !is_last; steps.next()) {
    mbar_wait(barrier(sm.steps_full, steps.stage), steps.phase);
    const u32 step = load_shared<u32>(slot_at<4>(sm.steps, steps.stage));
    mbar_arrive(barrier(sm.k_empty, steps.stage));  // every thread arrives, as for work items
    if (!step_is_full(step)) bring(block_of_step(step)), blocks.next();
    is_last = step_is_last(step);
  }
#else
  for (int j = n.end - 1; j >= n.begin; j--, blocks.next()) bring(j);
#endif
}

#if HAS_MASK
// Loads the mask of a consumer's rows, one block ahead. Eight lanes share a row, with 16 keys each. Executed
// by one warp per consumer.
DEVICE void produce_mask(const ForwardParams& p, const ForwardShared& sm, int c) {
  const int lane = threadIdx.x & 31, chunk = lane & 7, first = lane >> 3;  // rows `first`, `first` + 4, ...
  const u32 to = slot_at<MASK_BYTES>(sm.mask, c) + first * 16 + chunk * 2;
  PipelineState<2> work;
  PipelineState<STAGES> steps;
  PipelineState<1> blocks;
  for (;; work.next()) {
    const WorkItem item = take_work_item(sm, work);
    if (item.tile.m0 == NO_WORK) break;
    const int row = item.tile.m0 + c * 64 + first;
    const int rows = chunk >= BLOCK_N / 16 ? 0 : p.mask_q ? p.Sq - row : 64;
    const unsigned char* from =
        p.mask + item.tile.b * p.mask_b + item.tile.h * p.mask_h + row * p.mask_q + chunk * 2;
    bring_blocks(sm, item.blocks, steps, blocks, [&](int j) {
      const unsigned char* at = from + j * (BLOCK_N / 8);
      unsigned short bits[16];
#pragma unroll
      for (int i = 0; i < 16; i++, at += 4 * p.mask_q)
        bits[i] = i * 4 < rows ? *(const unsigned short*)at : 0;
      mbar_wait(barrier(sm.helper_empty, c), blocks.phase ^ 1);
#pragma unroll
      for (int i = 0; i < 16; i++) store_shared(to + i * 64, bits[i]);
      mbar_arrive(barrier(sm.helper_full, c));
    });
  }
}
#endif

#if BIAS_BITS
// Executed by one thread.
DEVICE void bring_bias(const ForwardParams& p, const ForwardShared& sm, const Tile& tile, int c, int block,
                       u32 phase) {
  const u32 full = barrier(sm.helper_full, c);
  mbar_wait(barrier(sm.helper_empty, c), phase ^ 1);
  mbar_arrive_expect(full, BIAS_BYTES);
  load_bias_tile<BLOCK_N>(slot_at<BIAS_BYTES>(sm.bias, c), p.bias, full, tile.m0 + c * 64, block * BLOCK_N,
                          tile.h, tile.b);
}

// Loads the bias of a consumer's rows, one block ahead. Executed by one warp per consumer.
DEVICE void produce_bias(const ForwardParams& p, const ForwardShared& sm, int c) {
  const bool leader = elect_one();
  PipelineState<2> work;
  [[maybe_unused]] PipelineState<STAGES> steps;
  PipelineState<1> blocks;
  for (;; work.next()) {
    const WorkItem item = take_work_item(sm, work);
    if (item.tile.m0 == NO_WORK) break;
#if SKIPS_TILES
    bring_blocks(sm, item.blocks, steps, blocks, [&](int j) {
      if (leader) bring_bias(p, sm, item.tile, c, j, blocks.phase);
    });
#else
    for (int j = item.blocks.end - 1; j >= item.blocks.begin; j--, blocks.next())
      if (leader) bring_bias(p, sm, item.tile, c, j, blocks.phase);
#endif
  }
}
#endif
