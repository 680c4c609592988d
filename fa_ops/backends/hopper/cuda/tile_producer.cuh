// The producer of the forward kernels whose consumers own 64 queries each: its loop over tiles, the slots of
// queries, the barriers between producer and consumers, and the copies from pages.
#pragma once
#include "pipeline.cuh"
#include "tiles.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that own 64 queries each

// Queries have a slot for each of two work items, or one that both share: the slot of a consumer, and the
// phase of its barriers.
DEVICE int query_slot(const PipelineState<2>& work, int c) {
  return QUERY_STAGES == 2 ? work.stage * CONSUMERS + c : c;
}
DEVICE u32 query_phase(const PipelineState<2>& work) { return QUERY_STAGES == 2 ? work.phase : work.stage; }

// Initialises the barriers of tiles, of work items, and of the query slots. A work item is read by `readers`
// threads, and a slot of keys is free after `key_readers` arrivals.
template <class Shared>
DEVICE void init_tile_barriers(const Shared& sm, int query_slots, int readers,
                               int key_readers = 4 * CONSUMERS) {
  for (int i = 0; i < query_slots; i++)
    mbar_init(barrier(sm.q_full, i), 1), mbar_init(barrier(sm.q_empty, i), 4);
  for (int i = 0; i < 2; i++)
    mbar_init(barrier(sm.work_full, i), 1), mbar_init(barrier(sm.work_empty, i), readers);
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

#if IS_PAGED
constexpr int COPIES = BLOCK_N / COPY_KEYS;

// The source of one copy of a block, one per lane. `page` is not validated when it is loaded but when it is
// first used, so that the load is not waited for early.
struct PagedCopy {
  int page, token;
};

template <class Params> DEVICE PagedCopy find_copy(const Params& p, const WorkItem& item, int block) {
  const int copy = threadIdx.x & 31, key = block * BLOCK_N + copy * COPY_KEYS, i = key / p.pages.size;
  PagedCopy found = {-1, key - i * p.pages.size};
  if (block >= item.blocks.begin && copy < COPIES && key < item.blocks.key_end)
    found.page = p.pages.table[(long long)item.tile.b * p.pages.stride + i];
  return found;
}

// All copies of a block, in every lane. Pages of fewer than 64 keys are copied whole.
struct PagedBlock {
  int pages[COPIES], tokens[COPIES];
  u32 exists;  // one bit for each copy, set if its page exists
};

// Executed by one warp.
template <class Params> DEVICE PagedBlock gather_copies(const Params& p, const PagedCopy& own) {
  PagedBlock block;
  block.exists = __ballot_sync(~0u, p.pages.exists(own.page));
#pragma unroll
  for (int j = 0; j < COPIES; j++) {
    block.pages[j] = __shfl_sync(~0u, own.page, j);
    block.tokens[j] = COPY_KEYS < 64 ? 0 : __shfl_sync(~0u, own.token, j);
  }
  return block;
}
#endif
