// The sequence of a packed batch that token `i` is of: -1 before the first, `sequences` after the last.
DEVICE int sequence_of(const int* ends, int sequences, int i) {
  int after = 0, stop = sequences + 1;  // the first boundary above i lies in [after, stop]
  while (after < stop) {
    const int middle = (after + stop) / 2;
    if (ends[middle] <= i) after = middle + 1; else stop = middle;
  }
  return after - 1;
}
