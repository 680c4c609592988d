// The TMA copies that load a block of keys or values from pages.
#pragma once
#include "block_info.cuh"

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
