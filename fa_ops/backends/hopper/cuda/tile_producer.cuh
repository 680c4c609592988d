// The producer's loop over the tiles of a forward kernel, and the barriers between producer and consumers.
#pragma once
#include "block_info.cuh"
#include "pipeline.cuh"

// Initialises the barriers of tiles, of work items, and of the query slots. A slot of keys is free after
// `key_readers` arrivals.
template <class Shared>
DEVICE void init_tile_barriers(const Shared& sm, int query_slots, int key_readers = 4 * CONSUMERS) {
  for (int i = 0; i < query_slots; i++)
    mbar_init(barrier(sm.q_full, i), 1), mbar_init(barrier(sm.q_empty, i), 4);
  for (int i = 0; i < 2; i++)
    mbar_init(barrier(sm.work_full, i), 1), mbar_init(barrier(sm.work_empty, i), READERS);
  for (int i = 0; i < STAGES; i++) {
    mbar_init(barrier(sm.k_full, i), 1), mbar_init(barrier(sm.v_full, i), 1);
    mbar_init(barrier(sm.k_empty, i), key_readers), mbar_init(barrier(sm.v_empty, i), 4 * CONSUMERS);
  }
}

// Executed by one warp. All lanes compute the bounds of a tile, and `load(item, work, leader)` copies it.
template <class Params, class Shared, class Load>
DEVICE void produce_tiles(const Params& p, const Shared& sm, Load load) {
  const bool leader = elect_one();
  PipelineState<2> work;
  Cursor at;
  for (int t = blockIdx.x;; work.next()) {
    WorkItem item;
    if (t < p.tiles) item = work_item_at(p, t, at);
    else item.tile.m0 = NO_WORK;
    if (leader) {
      mbar_wait(barrier(sm.work_empty, work.stage), work.phase ^ 1);
      store_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage), item);
      mbar_arrive(barrier(sm.work_full, work.stage));
    }
#if PACKED_QUERIES  // the number of tiles depends on cu_seqlens
    if (item.tile.m0 == NO_WORK) break;
#else
    if (t >= p.tiles) break;
#endif
    if (leader) t = next_tile(p, t);
    load(item, work, leader);
    t = __reduce_max_sync(~0u, leader ? t : 0);
  }
}
