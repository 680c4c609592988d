// The keys of all rows, `rows` a head. Of a packed batch, whose heads have one row a token, they are those of its sequences: a column counts from its
// sequence's first, which the row's key makes up for. One thread a row.
extern "C" __global__ void __launch_bounds__(256) row_keys(const u64* seed, const int* ends_q, const int* ends_k, u32* keys, int sequences, int heads,
                                                          u32 rows, u32 count) {
  const bool sorted_q = !ends_q || are_sorted(ends_q, sequences), sorted_k = !ends_k || are_sorted(ends_k, sequences);
  const u32 at = blockIdx.x * 256 + threadIdx.x;
  if (at >= count) return;
  u32 head = at / rows, row = at - head * rows, column = 0;
  if (ends_q) {
    const int b = sequence_of(ends_q, sequences, row, sorted_q);
    if (b < 0 || b >= sequences) return;  // attends nothing
    head += b * heads, row -= border_of(ends_q, b, FAR, sorted_q), column = border_of(ends_k, b, FAR, sorted_k);
  }
  keys[at] = row_key(*seed, head, row) - column * COLUMN_KEY;
}
