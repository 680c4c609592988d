// A paged KV cache: key j of batch row b is in page table[b * stride + j / size], if a page of that number
// exists.
#pragma once
#include "ptx.cuh"

struct PageTable {
  const int* table;
  int stride, size, count;
  int key_groups, value_groups;  // from page to page, where copies are of groups of 8 keys
  const int* cu_seqlens_q;       // of packed queries, else null

  DEVICE int page_of(int b, int key) const { return table[(long long)b * stride + key / size]; }
  DEVICE bool exists(int page) const { return (u32)page < (u32)count; }
  DEVICE int clamped(int page) const { return min(max(page, 0), count - 1); }
};
