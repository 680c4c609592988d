// Writes the range of packed keys that each token of a packed batch attends. One thread per token; a token
// outside every sequence attends nothing. Behind the ranges it writes, of the first `positions` queries and
// keys, what ALiBi depends on: the distance from a query's index to that of the key at its position, and the
// sequence.
#include "sequences.cuh"

extern "C" __global__ void __launch_bounds__(256)
    packed_ranges(const int* cu_seqlens_q, const int* cu_seqlens_k, const int* kv_lens, int2* ranges,
                  int sequences, int Tq, int Tk, int window_left, int window_right, int positions) {
  const bool sorted_q = are_sorted(cu_seqlens_q, sequences);
  const bool sorted_k = are_sorted(cu_seqlens_k, sequences);
  const int i = blockIdx.x * 256 + threadIdx.x;
  const bool is_query = i < Tq;
  if (i >= max(Tq, positions)) return;
  const int token = is_query ? i : i - Tq;
  const int b = is_query ? sequence_of(cu_seqlens_q, sequences, token, sorted_q)
                         : sequence_of(cu_seqlens_k, sequences, token, sorted_k);
  int2 range = make_int2(0, 0), position = make_int2(0, 0);
  if (b >= 0 && b < sequences) {
    const int first = sequence_begin(cu_seqlens_k, b, Tk, sorted_k);
    const int end = sequence_begin(cu_seqlens_k, b + 1, Tk, sorted_k);
    const int last = kv_lens ? first + max(0, min(kv_lens[b], end - first)) : end;
    const int shift = last - sequence_begin(cu_seqlens_q, b + 1, Tq, sorted_q), diagonal = token + shift;
    range.x = max(first, diagonal - window_left);
    range.y = min(last, diagonal + window_right + 1);
    if (range.y <= range.x) range = make_int2(0, 0);
    position = make_int2(shift, b);
  }
  if (is_query) ranges[i] = range;
  if (i < positions) ranges[Tq + i] = position;
}
