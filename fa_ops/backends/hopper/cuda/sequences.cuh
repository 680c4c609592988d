// The sequences of a call: ranges and numbers of keys, the pages of a cache, and packed batches.
#pragma once
#include "ptx.cuh"

// The half-open range of keys [begin, end).
struct KeyRange {
  int begin, end;
};

// The number of keys of batch row `b`; the kernel's parameters must have `kv_lens` and `Sk`.
template <class Params> DEVICE int keys_of(const Params& p, int b) {
#if PACKED_QUERIES  // tokens outside every sequence, which attend nothing, are before 0 or from B on
  return (u32)b < (u32)p.B ? max(0, min(p.kv_lens[b], p.Sk)) : 0;
#elif HAS_KV_LENS
  return max(0, min(p.kv_lens[b], p.Sk));
#else
  return p.Sk;
#endif
}

// A paged KV cache: key j of batch row b is in page table[b * stride + j / size], if a page with that number
// exists.
struct PageTable {
  const int* table;
  int stride, size, count;
  int key_groups, value_groups;  // page strides in groups of 8 keys, where copies are of such groups
  const int* cu_seqlens_q;       // for packed queries, else null

  DEVICE int page_of(int b, int key) const { return table[(long long)b * stride + key / size]; }
  DEVICE bool exists(int page) const { return (u32)page < (u32)count; }
  DEVICE int clamped(int page) const { return min(max(page, 0), count - 1); }
};

// The entries of `cu_seqlens`, the borders of the sequences of a packed batch, are not trusted: an entry that
// is less than its predecessor is treated as equal to it.

// Whether `cu_seqlens` is non-decreasing. Executed by a CTA of 256 threads.
DEVICE bool are_sorted(const int* cu_seqlens, int sequences) {
  bool sorted = true;
  for (int b = threadIdx.x; b < sequences; b += 256) sorted = sorted && cu_seqlens[b] <= cu_seqlens[b + 1];
  return __syncthreads_and(sorted);
}

// The sequence of token `i`: -1 before the first, `sequences` after the last.
DEVICE int sequence_of(const int* cu_seqlens, int sequences, int i, bool sorted) {
  int after = 0, stop = sequences + 1;  // the first entry above i lies in [after, stop]
  if (!sorted)
    while (after < stop && cu_seqlens[after] <= i) after++;
  else
    while (after < stop) {
      const int middle = (after + stop) / 2;
      if (cu_seqlens[middle] <= i) after = middle + 1;
      else stop = middle;
    }
  return after - 1;
}

// Entry `b` of `cu_seqlens`, with the rule above applied, clamped to [0, tokens].
DEVICE int sequence_begin(const int* cu_seqlens, int b, int tokens, bool sorted) {
  int at = cu_seqlens[b];
  if (!sorted)
    for (int i = 0; i < b; i++) at = max(at, cu_seqlens[i]);
  return max(0, min(at, tokens));
}
