// Packs a bool mask to bits. A row's bits are in the order of its columns and 0 from `columns` on; a row of
// bits has `pitch` bytes, a multiple of 16, of which the last 8 are the row's key range: the first column
// that is kept and the one after the last. Each of the mask's `all_heads` heads, `heads` in a batch, has a
// row of CTAs.
#include "ptx.cuh"

struct MaskStrides {
  long long b, h, row, column;  // in bytes
};

DEVICE const unsigned char* head_of(const unsigned char* mask, const MaskStrides& s, int heads, int i) {
  return mask + i / heads * s.b + i % heads * s.h;
}

// A bit for each of 16 bytes that is not 0.
DEVICE u32 bits_of(uint4 x) {
  // bytes of 0 and 1 times GATHER have their bits side by side from bit 24 on
  constexpr u32 LOW = 0x7F7F7F7F, GATHER = 0x01020408;
  auto four = [](u32 y) { return ((((y & LOW) + LOW) | y) & ~LOW) / 128 * GATHER >> 24 & 15; };
  return four(x.x) | four(x.y) << 4 | four(x.z) << 8 | four(x.w) << 12;
}

#if ENTRY_pack_rows
// For contiguous columns and rows at multiples of 16 bytes: a thread reads 16 columns at once.
extern "C" __global__ void __launch_bounds__(256)
    pack_rows(const unsigned char* mask, unsigned char* bits, MaskStrides s, int heads, int all_heads,
              int rows, int columns, int pitch) {
  const u32 groups = pitch / 2, i = blockIdx.x * 256 + threadIdx.x, row = i / groups,
            group = i - row * groups;
  if (row >= rows) return;
  const int left = columns - (int)group * 16;
  for (int head = blockIdx.y; head < all_heads; head += gridDim.y) {
    const unsigned char* from = head_of(mask, s, heads, head) + row * s.row + group * 16;
    u32 found = 0;
    if (left >= 16) found = bits_of(*(const uint4*)from);
    else
      for (int j = 0; j < left; j++) found |= (u32)(from[j] != 0) << j;
    *(unsigned short*)(bits + ((long long)head * rows + row) * pitch + group * 2) = found;
  }
}
#endif

#if ENTRY_pack_words
// For any strides: a warp packs 32 rows of 32 columns, its lanes along the smaller stride, and each lane ends
// with the word of one row. A CTA is four warps by two.
extern "C" __global__ void __launch_bounds__(256)
    pack_words(const unsigned char* mask, unsigned char* bits, MaskStrides s, int heads, int all_heads,
               int rows, int columns, int pitch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, across = pitch / 8;
  const int column = (blockIdx.x % across * 2 + warp % 2) * 32,
            row = (blockIdx.x / across * 4 + warp / 2) * 32;
  if (row >= rows) return;
  const bool lanes_are_columns = s.column <= s.row || rows == 1;
  for (int head = blockIdx.y; head < all_heads; head += gridDim.y) {
    const unsigned char* from = head_of(mask, s, heads, head) + row * s.row + column * s.column;
    unsigned char x[32];
    u32 word = 0;
    if (lanes_are_columns) {
      const int there = column + lane < columns ? rows - row : 0;
#pragma unroll
      for (int j = 0; j < 32; j++) x[j] = j < there ? from[j * s.row + lane * s.column] : 0;
#pragma unroll
      for (int j = 0; j < 32; j++) {
        const u32 found = __ballot_sync(~0u, x[j] != 0);
        if (j == lane) word = found;
      }
    } else {
      const int there = row + lane < rows ? columns - column : 0;
#pragma unroll
      for (int j = 0; j < 32; j++) x[j] = j < there ? from[lane * s.row + j * s.column] : 0;
#pragma unroll
      for (int j = 0; j < 32; j++) word |= (u32)(x[j] != 0) << j;
    }
    if (row + lane < rows) *(u32*)(bits + ((long long)head * rows + row + lane) * pitch + column / 8) = word;
  }
}
#endif

#if ENTRY_find_ranges
// After the bits: a warp finds the key range of a row. It is empty, with its begin at UNBOUNDED, where
// nothing is kept.
extern "C" __global__ void __launch_bounds__(256) find_ranges(unsigned char* bits, int rows, int pitch) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  unsigned char* at = bits + (long long)row * pitch;
  int first = UNBOUNDED, end = 0;
  for (int i = lane; i < pitch / 4 - 2; i += 32) {
    const u32 x = ((const u32*)at)[i];
    if (x) first = min(first, i * 32 + __ffs(x) - 1), end = max(end, i * 32 + 32 - __clz(x));
  }
  first = __reduce_min_sync(~0u, first), end = __reduce_max_sync(~0u, end);
  if (lane == 0) *(int2*)(at + pitch - 8) = make_int2(first, end);
}
#endif
