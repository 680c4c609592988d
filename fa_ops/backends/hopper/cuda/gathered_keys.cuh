// The copies of decode.cu and mla.cu from pages of few keys, or of a number that is not a multiple of what a
// TMA box brings. A box of one key would have 128 or 256 bytes, and memory delivers that many to
// each SM within 7 or 14 cycles, in which one thread cannot issue a box. Here `cp.async` copies 16 bytes for
// each lane of two warps, which have half of a tile's keys each.
#pragma once
#include "elements.cuh"
#include "sequences.cuh"

#define GATHERS_KEYS (COPY_KEYS == 1)
constexpr u32 PAGES_BYTES = GATHERS_KEYS ? BLOCK_N / 8 : 4;  // one bit for each key or copy that has a page
constexpr int GATHERING_WARPS = 2, GATHERED_KEYS = BLOCK_N / GATHERING_WARPS;  // keys of a tile of each warp
constexpr int OWN_KEYS = GATHERED_KEYS / 32;
constexpr int GATHERED_ARRIVALS = GATHERING_WARPS * 32;  // each lane, when its copies have completed
constexpr u32 NO_ROW = ~0u;

// Where a warp's keys of a tile are. Lane l holds keys l, l + 32, ... from key `first` of the tile on. Pages
// are not validated when they are loaded, so that the load is not waited for early.
struct GatheredKeys {
  int first;
  int page[OWN_KEYS];  // -1 for a key that is not attended or, once validated, whose page does not exist
  int slot[OWN_KEYS];

  DEVICE explicit GatheredKeys(int warp) : first(warp * GATHERED_KEYS) {}

  template <class Params> DEVICE void find(const Params& p, int b, int tile, KeyRange keys) {
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
      const int key = tile * BLOCK_N + first + i * 32 + (threadIdx.x & 31);
      page[i] = -1, slot[i] = (u32)key % (u32)p.page;
      if (key >= keys.begin && key < keys.end)
        page[i] = p.table[(long long)b * p.table_stride + (u32)key / (u32)p.page];
    }
  }

  template <class Params> DEVICE void validate(const Params& p) {
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++)
      if (page[i] >= p.page_count) page[i] = -1;
  }

  // Executed by one warp.
  DEVICE void store_existing(u32 at, bool leader) const {
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
      const u32 found = __ballot_sync(~0u, page[i] >= 0);
      if (leader) store_shared(at + first / 8 + i * 4, found);
    }
  }
};

// The rows of these keys, as offsets in units of 16 bytes, or NO_ROW.
template <class T> struct GatheredRows {
  const char* base;
  int first;
  u32 offset[OWN_KEYS];

  DEVICE GatheredRows(const T* rows, const Strides& strides, int h, const GatheredKeys& keys)
      : base((const char*)(rows + h * strides.h)), first(keys.first) {
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++)
      offset[i] = keys.page[i] < 0
                      ? NO_ROW
                      : (u32)((keys.page[i] * strides.b + keys.slot[i] * strides.s) * sizeof(T) >> 4);
  }

  // Copies COLUMNS columns of LINE bytes of a tile, from byte `from` of the rows on, swizzled as TMA does.
  // Bytes from `end` on, and rows that do not exist, become 0. Executed by one warp.
  template <int LINE, int COLUMNS> DEVICE void copy(u32 to, int from, int end, u64 hint = EVICT_FIRST) const {
    constexpr int LANES = LINE / 16, ROWS_AT_ONCE = 32 / LANES;
    const int lane = threadIdx.x & 31, own_row = lane / LANES, chunk = lane % LANES;
    const char* source = base + from + chunk * 16;
    to += first * LINE;
    u32 bytes[COLUMNS];
#pragma unroll
    for (int x = 0; x < COLUMNS; x++) {
      const int rest = end - from - x * LINE - chunk * 16;
      bytes[x] = sizeof(T) == 1 ? min(max(rest, 0), 16) : rest > 0 ? 16 : 0;  // others are multiples of 16
    }
#pragma unroll
    for (int i = 0; i < GATHERED_KEYS; i += ROWS_AT_ONCE) {
      const u32 own = __shfl_sync(~0u, offset[i / 32], i % 32 + own_row);
      const char* row = source + (u64)own * 16;  // not read where there is no row
      const int of_pattern = i % 8 + own_row;    // the swizzle repeats after 8 rows
      const u32 at = to + i / 8 * 8 * LINE + of_pattern * LINE +
                     ((chunk ^ (of_pattern * LINE / 128 & (LANES - 1))) << 4);
#pragma unroll
      for (int x = 0; x < COLUMNS; x++)
        copy_chunk(at + x * BLOCK_N * LINE, row + x * LINE, own == NO_ROW ? 0 : bytes[x], hint);
    }
  }
};
