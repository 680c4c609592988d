// The keys of packed sequences, in blocks of KEY_BLOCK. Each sequence starts in a new block. For contiguous
// keys, sequence b starts at block `first key / KEY_BLOCK + b`, which leaves room for all sequences before
// it. For pages, each sequence has as many blocks as its row of the page table can hold.
//
// Compile-time: IS_PAGED
#pragma once
#include "cu_seqlens.cuh"
#include "paged_kv.cuh"

constexpr int KEY_BLOCK = 128;

struct PackedKeys {
  const int* cu_seqlens;  // (sequences + 1,), for contiguous keys
  const int* lens;        // (sequences,) or null
  int sequences, tokens;  // tokens: of all sequences, or for pages the capacity of one sequence
  bool sorted;            // whether cu_seqlens is non-decreasing

#if IS_PAGED
  DEVICE int begin(int) const { return 0; }
  DEVICE int count(int b) const { return max(0, min(lens[b], tokens)); }
  DEVICE int first_block(int b) const { return b * ((tokens + KEY_BLOCK - 1) / KEY_BLOCK); }
#else
  DEVICE int begin(int b) const { return sequence_begin(cu_seqlens, b, tokens, sorted); }
  DEVICE int count(int b) const {
    const int all = begin(b + 1) - begin(b);
    return lens ? max(0, min(lens[b], all)) : all;
  }
  DEVICE int first_block(int b) const { return begin(b) / KEY_BLOCK + b; }
#endif

  // The sequence that a block belongs to: the last one that does not start after it, or -1.
  DEVICE int sequence_of(int block) const {
    int after = 0, stop = sequences;  // the first sequence that starts after it lies in [after, stop]
    while (after < stop) {
      const int middle = (after + stop) / 2;
      if (first_block(middle) <= block) after = middle + 1;
      else stop = middle;
    }
    return after - 1;
  }
};
