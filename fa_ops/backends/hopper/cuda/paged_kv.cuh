// A paged KV cache: key j of batch row b is in page table[b * stride + j / size], if a page with that number
// exists.
#pragma once
#include "ptx.cuh"

struct PageTable {
  const int* table;
  int stride, size, count;
  int key_groups, value_groups;  // page strides in groups of 8 keys, where copies are of such groups
  const int* cu_seqlens_q;       // for packed queries, else null

  DEVICE int page_of(int b, int key) const { return table[(long long)b * stride + key / size]; }
  DEVICE bool exists(int page) const { return (u32)page < (u32)count; }
  DEVICE int clamped(int page) const { return min(max(page, 0), count - 1); }
};
