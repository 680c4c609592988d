// Writes the range of packed keys that each token of a packed batch attends. One thread per token; a token
// outside every sequence attends nothing.
#include "cu_seqlens.cuh"

extern "C" __global__ void __launch_bounds__(256)
    packed_ranges(const int* cu_seqlens_q, const int* cu_seqlens_k, const int* kv_lens, int2* ranges,
                  int sequences, int Tq, int Tk, int window_left, int window_right) {
  const bool sorted_q = are_sorted(cu_seqlens_q, sequences);
  const bool sorted_k = are_sorted(cu_seqlens_k, sequences);
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= Tq) return;
  const int b = sequence_of(cu_seqlens_q, sequences, i, sorted_q);
  int2 range = make_int2(0, 0);
  if (b >= 0 && b < sequences) {
    const int first = sequence_begin(cu_seqlens_k, b, Tk, sorted_k);
    const int end = sequence_begin(cu_seqlens_k, b + 1, Tk, sorted_k);
    const int last = kv_lens ? first + max(0, min(kv_lens[b], end - first)) : end;
    const int diagonal = i + last - sequence_begin(cu_seqlens_q, b + 1, Tq, sorted_q);
    range.x = max(first, diagonal - window_left);
    range.y = min(last, diagonal + window_right + 1);
    if (range.y <= range.x) range = make_int2(0, 0);
  }
  ranges[i] = range;
}
