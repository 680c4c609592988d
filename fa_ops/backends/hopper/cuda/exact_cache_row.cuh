// The keys and values of one batch row of a KV cache, for rows that are attended exactly.
#pragma once
#include "elements.cuh"
#include "ptx.cuh"

template <class Params> struct ExactCacheRow {
  const Params& p;
  const int b;

#if IS_PAGED
  DEVICE int page_of(int key) const { return p.table[(long long)b * p.table_stride + key / p.page]; }
  DEVICE bool attends(int key) const { return (u32)page_of(key) < (u32)p.page_count; }
#else
  DEVICE bool attends(int) const { return true; }
#endif

  // Returns the page (or this batch row) that holds a key, and replaces `key` by its token within the page.
  // For a page that does not exist, an arbitrary valid page is returned.
  DEVICE int find(int& key) const {
    int from = b;
#if IS_PAGED
    from = min(max(page_of(key), 0), p.page_count - 1), key %= p.page;
#endif
    return from;
  }

  DEVICE float weight(int, float x) const { return x; }
};
