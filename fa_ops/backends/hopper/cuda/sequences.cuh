// The sequences of a packed batch. Their borders may hold anything: one that is less than the one before it counts as equal to it.

// Executed by a CTA of 256 threads: whether each border is at least the one before it.
DEVICE bool are_sorted(const int* ends, int sequences) {
  bool sorted = true;
  for (int b = threadIdx.x; b < sequences; b += 256) sorted = sorted && ends[b] <= ends[b + 1];
  return __syncthreads_and(sorted);
}

// The sequence that token `i` is of: -1 before the first, `sequences` after the last.
DEVICE int sequence_of(const int* ends, int sequences, int i, bool sorted) {
  int after = 0, stop = sequences + 1;  // the first border above i lies in [after, stop]
  if (!sorted)
    while (after < stop && ends[after] <= i) after++;
  else
    while (after < stop) {
      const int middle = (after + stop) / 2;
      if (ends[middle] <= i) after = middle + 1; else stop = middle;
    }
  return after - 1;
}

// Border `b` as it counts, in [0, tokens].
DEVICE int border_of(const int* ends, int b, int tokens, bool sorted) {
  int at = ends[b];
  if (!sorted)
    for (int i = 0; i < b; i++) at = max(at, ends[i]);
  return max(0, min(at, tokens));
}
