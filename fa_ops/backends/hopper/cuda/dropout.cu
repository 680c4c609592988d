// Writes the dropout seed of every query row, which the other kernels read. In a packed batch, where each
// head has one row per token, the seed is adjusted so that columns count from the first key of the token's
// sequence. One thread per row.
#include "dropout.cuh"
#include "sequences.cuh"

extern "C" __global__ void __launch_bounds__(256)
    row_seeds(const u64* seed, const int* cu_seqlens_q, const int* cu_seqlens_k, u32* row_seeds,
              int sequences, int heads, u32 rows, u32 count) {
  const bool sorted_q = !cu_seqlens_q || are_sorted(cu_seqlens_q, sequences);
  const bool sorted_k = !cu_seqlens_k || are_sorted(cu_seqlens_k, sequences);
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  u32 head = i / rows, row = i - head * rows, column = 0;
  if (cu_seqlens_q) {
    const int b = sequence_of(cu_seqlens_q, sequences, row, sorted_q);
    if (b < 0 || b >= sequences) return;  // outside every sequence: attends nothing
    head += b * heads, row -= sequence_begin(cu_seqlens_q, b, UNBOUNDED, sorted_q);
    column = sequence_begin(cu_seqlens_k, b, UNBOUNDED, sorted_k);
  }
  row_seeds[i] = row_seed(*seed, head, row) - column * COLUMN_STEP;
}
