// The sequences of a packed batch. The entries of `cu_seqlens` are not trusted: an entry that is less than
// its predecessor is treated as equal to it.
#pragma once
#include "ptx.cuh"

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
