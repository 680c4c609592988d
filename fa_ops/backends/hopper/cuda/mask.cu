// Packs a bool mask into bits and finds the key range of each row, in one launch. The bits of a row are in
// the order of its columns, and 0 from `columns` on. A row has `pitch` bytes, a multiple of 16, of which the
// last 8 are its key range: the first column that is kept and the one after the last. If nothing is kept, the
// range is empty and begins at UNBOUNDED. Each head has a row of CTAs, whose warps share the rows.
#include "ptx.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct MaskParams {
  const unsigned char* mask;
  unsigned char* bits;          // (all_heads, rows, pitch)
  long long b, h, row, column;  // strides of the mask in bytes, 0 for dimensions of one element
  int heads, all_heads;         // heads per batch row, and in all batch rows
  int rows, columns, pitch;
  int row_warps;  // `pack_rows`: warps that share a row, a power of two
};

DEVICE const unsigned char* head_of(const MaskParams& p, int head) {
  return p.mask + head / p.heads * p.b + head % p.heads * p.h;
}

DEVICE unsigned char* bits_of_row(const MaskParams& p, int head, int row) {
  return p.bits + ((long long)head * p.rows + row) * p.pitch;
}

// The words of a row before its key range.
DEVICE int words_of_row(const MaskParams& p) { return p.pitch / 4 - 2; }

// The half-open range of columns that are kept.
struct KeptRange {
  int begin = UNBOUNDED, end = 0;

  DEVICE void add_word(u32 bits, int column) {
    if (!bits) return;
    begin = min(begin, column + __ffs(bits) - 1), end = max(end, column + 32 - __clz(bits));
  }
};

// The key ranges of a CTA's rows in shared memory, since each warp sees only some of the columns.
struct SharedRanges {
  int begin[32], end[32];

  DEVICE void clear() {
    if (threadIdx.x < 32) begin[threadIdx.x] = UNBOUNDED, end[threadIdx.x] = 0;
    __syncthreads();
  }
  DEVICE void add(int slot, const KeptRange& range) {
    atomicMin(&begin[slot], range.begin), atomicMax(&end[slot], range.end);
  }
  DEVICE void store(const MaskParams& p, int head, int first_row, int count) {
    __syncthreads();
    const int slot = threadIdx.x;
    if (slot < count && first_row + slot < p.rows)
      *(int2*)(bits_of_row(p, head, first_row + slot) + p.pitch - 8) = make_int2(begin[slot], end[slot]);
  }
};

#if ENTRY_pack_rows
constexpr int STEP = 1024;  // columns that a warp packs at once, a word in each lane

// One bit for each of 16 bytes, set if the byte is not 0.
DEVICE u32 bits_of(uint4 x) {
  // multiplying bytes of 0 and 1 by GATHER collects their bits from bit 24 on
  constexpr u32 LOW = 0x7F7F7F7F, GATHER = 0x01020408;
  auto four = [](u32 y) { return ((((y & LOW) + LOW) | y) & ~LOW) / 128 * GATHER >> 24 & 15; };
  return four(x.x) | four(x.y) << 4 | four(x.z) << 8 | four(x.w) << 12;
}

// The 32 columns of this lane among the STEP columns starting at `from`, of which `left` are in the row.
// Executed by one warp.
DEVICE u32 pack_columns_of_row(const unsigned char* from, long long stride, int left) {
  const int lane = threadIdx.x & 31;
  unsigned char x[32];
  u32 word = 0;
#pragma unroll
  for (int j = 0; j < 32; j++) x[j] = j * 32 + lane < left ? from[(j * 32 + lane) * stride] : 0;
#pragma unroll
  for (int j = 0; j < 32; j++) {
    const u32 found = __ballot_sync(~0u, x[j] != 0);
    if (j == lane) word = found;
  }
  return word;
}

// For masks whose column stride does not exceed the row stride: the lanes of a warp read consecutive columns
// of one row.
extern "C" __global__ void __launch_bounds__(THREADS) pack_rows(const __grid_constant__ MaskParams p) {
  __shared__ SharedRanges ranges;
  const int lane = threadIdx.x & 31, warp = warp_uniform(threadIdx.x / 32);
  const int count = WARPS / p.row_warps, first_row = blockIdx.x * count;
  const int slot = warp / p.row_warps, row = first_row + slot;
  const bool is_aligned = p.column == 1 && (((u64)p.mask | p.b | p.h | p.row) & 15) == 0;
  for (int head = blockIdx.y; head < p.all_heads; head += gridDim.y) {
    ranges.clear();
    if (row < p.rows) {
      const unsigned char* from = head_of(p, head) + row * p.row;
      u32* to = (u32*)bits_of_row(p, head, row);
      KeptRange range;
      for (int i = warp % p.row_warps * 32; i < words_of_row(p); i += p.row_warps * 32) {
        const int first = i * 32, left = p.columns - first;
        u32 word = 0;
        if (is_aligned && left >= STEP) {
          const uint4* x = (const uint4*)(from + first) + lane * 2;
          word = bits_of(x[0]) | bits_of(x[1]) << 16;
        } else if (left > 0) {
          word = pack_columns_of_row(from + first * p.column, p.column, left);
        }
        if (i + lane < words_of_row(p)) to[i + lane] = word;
        range.add_word(word, (i + lane) * 32);
      }
      range.begin = __reduce_min_sync(~0u, range.begin), range.end = __reduce_max_sync(~0u, range.end);
      if (lane == 0) ranges.add(slot, range);
    }
    ranges.store(p, head, first_row, count);
  }
}
#endif

#if ENTRY_pack_columns
// For masks whose row stride is the smaller one: each lane of a warp packs 32 columns of its own row.
extern "C" __global__ void __launch_bounds__(THREADS) pack_columns(const __grid_constant__ MaskParams p) {
  __shared__ SharedRanges ranges;
  const int lane = threadIdx.x & 31, warp = warp_uniform(threadIdx.x / 32);
  const int first_row = blockIdx.x * 32, row = first_row + lane;
  for (int head = blockIdx.y; head < p.all_heads; head += gridDim.y) {
    ranges.clear();
    const unsigned char* from = head_of(p, head) + row * p.row;
    u32* to = (u32*)bits_of_row(p, head, row);
    KeptRange range;
    for (int i = warp; i < words_of_row(p); i += WARPS) {
      const int left = row < p.rows ? p.columns - i * 32 : 0;
      unsigned char x[32];
      u32 word = 0;
#pragma unroll
      for (int j = 0; j < 32; j++) x[j] = j < left ? from[(i * 32 + j) * p.column] : 0;
#pragma unroll
      for (int j = 0; j < 32; j++) word |= (u32)(x[j] != 0) << j;
      if (row < p.rows) to[i] = word;
      range.add_word(word, i * 32);
    }
    if (row < p.rows) ranges.add(lane, range);
    ranges.store(p, head, first_row, 32);
  }
}
#endif
