// What changes the scores of a call: lists of a mask's tiles, a float mask (bias) and ALiBi.
//
// Compile-time: BIAS_BITS, 16 for the input type and 32 for fp32; SKIPS_TILES; HAS_ALIBI, 2 for packed
// sequences, whose slopes and positions differ
#pragma once
#include "elements.cuh"

// The lists of fa::mask_blocks, which hold the tiles of a dense mask that are not empty. Entries are not
// trusted but clamped: for any contents, reads stay within the tensors and all loops end.

constexpr int MASK_TILE = 128;  // MASK_BLOCK of fa_ops/call/options.py

struct MaskBlocks {
  const int* lists;             // of all batches and heads, or null
  long long b, h;               // strides in bytes, 0 for broadcast dimensions
  int tile_rows, tile_columns;  // tiles of the mask along queries and along keys
};

// The listed tiles of one row of tiles (OF_KEYS), or of one column.
struct TileList {
  const int* entries;  // twice the index of a tile, plus 1 if it is mixed, in ascending order
  int count;           // the number of listed tiles
  int tiles;           // the number of tiles of the mask; 1: broadcast over keys, or queries
};

// The list of the row (or column) of tiles that contains query (or key) `position`.
template <bool OF_KEYS>
DEVICE TileList tile_list(const MaskBlocks& blocks, int b, int h, int position) {
  const int lines = OF_KEYS ? blocks.tile_rows : blocks.tile_columns,
            tiles = OF_KEYS ? blocks.tile_columns : blocks.tile_rows;
  const int* lists = (const int*)((const char*)blocks.lists + b * blocks.b + h * blocks.h) +
                     (OF_KEYS ? 0 : blocks.tile_rows * (blocks.tile_columns + 1ll));
  const int* list = lists + min(position / MASK_TILE, lines - 1) * (tiles + 1ll);
  return {list + 1, max(0, min(list[0], tiles)), tiles};
}

// The number of tiles in a list before `tile`. Executed by one warp, whose lanes compare 32 entries at a
// time.
DEVICE int tiles_before(const TileList& list, int tile) {
  const int lane = threadIdx.x & 31;
  int first = 0, size = list.count;
  while (size > 0) {
    const int step = (size + 31) / 32, at = lane * step;
    const u32 later = ~__ballot_sync(~0u, at < size && list.entries[first + min(at, size - 1)] >> 1 < tile);
    const int found = later ? __ffs(later) - 1 : 32;  // lanes whose tile comes before `tile`
    if (found == 0) break;
    first += (found - 1) * step + 1, size = min(step, size - (found - 1) * step) - 1;
  }
  return first;
}

// Iterates backwards over the blocks of BLOCK keys (or queries) that overlap a listed tile.
template <int BLOCK> struct TileWalk {
  static_assert(BLOCK <= MASK_TILE, "a block overlaps two tiles at most");
  TileList list;
  int at, entry;  // the next entry to visit, -1 if there is none, and its value

  // Starts at block `last`. Executed by one warp. Unless BOUNDED, the list must not continue past that block.
  template <bool BOUNDED> DEVICE void start(const TileList& from, int last) {
    list = from;
    at = (BOUNDED && list.tiles > 1 ? tiles_before(list, last_tile(last) + 1) : list.count) - 1;
    load();
  }

  // The last block up to `block` that overlaps a listed tile, or -1.
  DEVICE int seek(int block) {
    if (list.tiles == 1) return at < 0 ? -1 : block;
    while (at >= 0 && entry >> 1 > last_tile(block)) at--, load();
    return at < 0 ? -1 : min(block, last_block(entry >> 1));
  }

  // Whether the mask keeps all of `block`, which `seek` has returned last.
  DEVICE bool is_full(int block) const {
    if (list.tiles == 1) return !(entry & 1);
    const int first = block * BLOCK / MASK_TILE, last = min(last_tile(block), list.tiles - 1);
    if (entry != 2 * last) return false;
    return first == last || (at > 0 && list.entries[at - 1] == 2 * first);
  }

 private:
  DEVICE static int last_tile(int block) { return (block * BLOCK + BLOCK - 1) / MASK_TILE; }
  DEVICE static int last_block(int tile) { return (tile * MASK_TILE + MASK_TILE - 1) / BLOCK; }
  DEVICE void load() { entry = at >= 0 ? list.entries[at] : 0; }
};

// One bit for each of 32 blocks: those that overlap a listed tile, and those that the mask keeps entirely.
struct ListedBlocks {
  u32 some, full;
};

// The 32 blocks of BLOCK keys (or queries) starting at block `base`. Executed by one warp.
template <int BLOCK> DEVICE ListedBlocks listed_blocks(const TileList& list, int base) {
  constexpr int PER_TILE = MASK_TILE / BLOCK;
  static_assert(MASK_TILE % BLOCK == 0, "a block is in one tile");
  if (list.tiles == 1) {
    const u32 some = list.count > 0 ? ~0u : 0;
    return {some, list.entries[0] & 1 ? 0 : some};
  }
  const int at = tiles_before(list, base / PER_TILE) + (threadIdx.x & 31);
  u32 some = 0, full = 0;
  if (at < list.count) {
    const int entry = list.entries[at], first = (entry >> 1) * PER_TILE - base;
    constexpr u32 TILE = (1u << PER_TILE) - 1;
    if (first > -PER_TILE && first < 32) some = first < 0 ? TILE >> -first : TILE << first;
    if (!(entry & 1)) full = some;
  }
  return {__reduce_or_sync(~0u, some), __reduce_or_sync(~0u, full)};
}

// Runs of tiles that the mask of a program may keep: lines of `tile_runs`, for each row of tiles and then for
// each column. They are not trusted either.

constexpr int MAX_RUNS = 16;

struct TileRuns {
  const int* lines;     // of all batches and heads
  long long b, h;       // strides in lines, 0 for dimensions that share them
  int rows, columns;    // of tiles
};

// The line of the row (OF_KEYS) or column of tiles that contains query or key `position`: the number of runs,
// then of each its first tile, and twice its length, plus 1 if it is mixed.
template <bool OF_KEYS> DEVICE const int* line_of_runs(const TileRuns& runs, int b, int h, int position) {
  const int line = min(position / MASK_TILE, (OF_KEYS ? runs.rows : runs.columns) - 1);
  return runs.lines + (b * runs.b + h * runs.h + (OF_KEYS ? 0 : runs.rows) + line) * (1 + 2 * MAX_RUNS);
}

// The 32 blocks of BLOCK keys (or queries) starting at block `base`. Executed by one warp.
template <int BLOCK> DEVICE ListedBlocks blocks_of_runs(const int* line, int base) {
  constexpr int PER_TILE = MASK_TILE / BLOCK, MOST = UNBOUNDED / MASK_TILE;
  const int lane = threadIdx.x & 31;
  u32 some = 0, full = 0;
  if (lane < min(line[0], MAX_RUNS)) {
    const int first = max(0, min(line[1 + 2 * lane], MOST)), coded = line[2 + 2 * lane];
    const int end = first + max(0, min(coded >> 1, MOST));
    const int lo = max(first * PER_TILE - base, 0), hi = min(end * PER_TILE - base, 32);
    if (lo < hi) some = ~0u >> (32 - (hi - lo)) << lo;
    if (!(coded & 1)) full = some;
  }
  return {__reduce_or_sync(~0u, some), __reduce_or_sync(~0u, full)};
}

// Iterates backwards over the blocks of BLOCK keys that overlap a run.
template <int BLOCK> struct RunWalk {
  const int* pairs;
  int at, first, end;  // the next run to visit, -1 if there is none, and its tiles
  bool mixed;

  DEVICE void start(const int* line) {
    pairs = line + 1;
    at = max(0, min(line[0], MAX_RUNS)) - 1;
    load();
  }

  // The last block up to `block` that overlaps a run, or a negative number.
  DEVICE int seek(int block) {
    while (at >= 0 && first * MASK_TILE >= (block + 1) * BLOCK) at--, load();
    return at < 0 ? -1 : min(block, (end * MASK_TILE - 1) / BLOCK);
  }

  // Whether the mask keeps all of `block`, which `seek` has returned last; `tiles`: their number in a row.
  DEVICE bool is_full(int block, int tiles) const {
    const int last = min((block * BLOCK + BLOCK - 1) / MASK_TILE, tiles - 1);
    return !mixed && first <= block * BLOCK / MASK_TILE && last < end;
  }

 private:
  DEVICE void load() {
    constexpr int MOST = UNBOUNDED / MASK_TILE;
    first = end = 0, mixed = true;
    if (at < 0) return;
    const int coded = pairs[2 * at + 1];
    first = max(0, min(pairs[2 * at], MOST));
    end = first + max(0, min(coded >> 1, MOST)), mixed = coded & 1;
  }
};

// A float mask that is added to the scores, as tiles of 64 queries in shared memory. A tile is a sequence of
// boxes with 128 swizzled bytes per row.

#if BIAS_BITS || SKIPS_TILES
struct Bias {
  TensorMap map;
  const char* data;                           // the tensor of the map, for reads of single elements
  long long b, h, row;                        // its strides in bytes, 0 for broadcast dimensions
  int step_b, step_h, step_row, step_column;  // 0 for dimensions of the map that are broadcast, else 1
  int last_column;                            // the column of the last pair of a row
  float unit;                                 // one accumulator unit, in scores
  MaskBlocks blocks;                          // with SKIPS_TILES, in the backward of a bool mask too
};
#endif

#if BIAS_BITS
constexpr int BOX_COLUMNS = 1024 / BIAS_BITS, BOX_BYTES = 64 * 128;
constexpr int CHUNK_COLUMNS = 128 / BIAS_BITS;  // of 16 bytes

template <int COLUMNS>
DEVICE void load_bias_tile(u32 to, const Bias& bias, u32 bar, int row, int column, int h, int b) {
  static_assert(COLUMNS % BOX_COLUMNS == 0, "whole boxes");
#pragma unroll
  for (int x = 0; x < COLUMNS; x += BOX_COLUMNS)
    tma_load(to + x / BOX_COLUMNS * BOX_BYTES, bias.map, bar, column * bias.step_column + x,
             row * bias.step_row, h * bias.step_h, b * bias.step_b);
}

// The address of an element of a tile. Tiles start at multiples of 1024 bytes, so advancing by whole chunks
// from an address whose chunk bits are clear is an XOR of address bits.
DEVICE u32 bias_address(u32 tile, int row, int column) {
  return tile + column / BOX_COLUMNS * BOX_BYTES + row * 128 +
         (((column % BOX_COLUMNS / CHUNK_COLUMNS) ^ (row & 7)) << 4) +
         column % CHUNK_COLUMNS * (BIAS_BITS / 8);
}

// Advances an address in the first two chunks of a tile by `columns`, a multiple of two chunks.
DEVICE u32 advance_columns(u32 at, int columns) {
  return (at ^ (columns % BOX_COLUMNS / CHUNK_COLUMNS << 4)) + columns / BOX_COLUMNS * BOX_BYTES;
}

// The bias of scores `i` to `i + 7` of a thread. The rows of TRANSPOSED scores are the columns of the tile.
template <bool TRANSPOSED> DEVICE void load_bias_elements(float (&y)[8], u32 at, int i) {
#if BIAS_BITS == 16
  u32 x[4];
  ldmatrix_x4<TRANSPOSED>(x, TRANSPOSED ? at + i * 2 * 128 : advance_columns(at, i * 2));
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 z = unpack(x[e]);
    y[2 * e] = z.x, y[2 * e + 1] = z.y;
  }
#else
#pragma unroll
  for (int e = 0; e < 8; e++) {
    if (TRANSPOSED) {  // the next query, or the key 8 further on
      y[e] = load_shared<float>((at ^ (e & 3) << 4) + (i * 2 + (e & 4) * 2 + (e & 1)) * 128);
    } else if (e % 2 == 0) {
      const float2 z = load_shared<float2>(advance_columns(at, i * 2 + (e & 4) * 2) + (e & 2) * 4 * 128);
      y[e] = z.x, y[e + 1] = z.y;
    }
  }
#endif
}

// Replaces a warpgroup's scores s by s * unit + bias. Their rows are queries, or keys if TRANSPOSED; the
// first one is row, or column, `first` of the tile.
template <bool TRANSPOSED, int COUNT>
DEVICE void add_bias_tile(float (&s)[COUNT], u32 tile, int first, float unit) {
  const int lane = threadIdx.x & 31;
  first += (threadIdx.x >> 5 & 3) * 16;
  u32 at;
  if (BIAS_BITS == 16)
    at = TRANSPOSED ? bias_address(tile, (lane >> 4) * 8 + (lane & 7), first + (lane & 8))
                    : bias_address(tile, first + (lane & 15), (lane >> 4) * 8);
  else
    at = TRANSPOSED ? bias_address(tile, (lane & 3) * 2, first + (lane >> 2))
                    : bias_address(tile, first + (lane >> 2), (lane & 3) * 2);
#pragma unroll
  for (int i = 0; i < COUNT; i += 8) {
    float y[8];
    load_bias_elements<TRANSPOSED>(y, at, i);
#pragma unroll
    for (int e = 0; e < 8; e++) s[i + e] = fmaf(s[i + e], unit, y[e]);
  }
}

// Two neighbouring elements of a row in global memory.
#if BIAS_BITS == 16
typedef u32 BiasPair;
DEVICE float2 to_floats(BiasPair x) { return unpack(x); }
#else
typedef uint2 BiasPair;
DEVICE float2 to_floats(BiasPair x) { return make_float2(__int_as_float(x.x), __int_as_float(x.y)); }
#endif

DEVICE const char* bias_row(const Bias& bias, int b, int h, int row) {
  return bias.data + b * bias.b + h * bias.h + row * bias.row;
}

// The pair at offset `inside` of a block of keys that starts at `column`.
DEVICE BiasPair bias_pair(const char* row, const Bias& bias, int column, int inside) {
  return *(const BiasPair*)(row + (long long)min(column * bias.step_column + inside, bias.last_column) *
                                      (BIAS_BITS / 8));
}

DEVICE float bias_at(const Bias& bias, int b, int h, int row, int column) {
  const float2 pair = to_floats(bias_pair(bias_row(bias, b, h, row), bias, column & ~1, 0));
  return column & 1 ? pair.y : pair.x;
}
#endif

// ALiBi lowers a score by the slope of its head times the distance of its key from its query's position.

#if HAS_ALIBI
// A thread has two rows of scores, 8 apart. In one sequence they have the same slope, and distances that
// differ by 8.
constexpr int ALIBI_ROWS = HAS_ALIBI == 2 ? 2 : 1;

struct Alibi {
  float slope;  // in accumulator units
  int shift;    // the key at the position of query i is i + shift
};

// Of batch row `b`; of packed sequences those of a token are looked up instead, in `tokens`.
template <class Params>
DEVICE Alibi alibi_of(const Params& p, int h, int b, int shift, [[maybe_unused]] const int2* tokens,
                      [[maybe_unused]] int token) {
#if HAS_ALIBI == 2
  const int2 found = tokens[token];
  shift = found.x, b = found.y;
#endif
  return {p.alibi[b * p.alibi_b + h] * p.alibi_unit, shift};
}

// The scores of a thread's rows in a block of columns.
struct AlibiBlock {
  float slope[ALIBI_ROWS], from[ALIBI_ROWS];  // from: the distance from the first column

  // Score `i` of this thread.
  DEVICE float lowered(float s, int i) const {
    const int r = ALIBI_ROWS == 2 ? i >> 1 & 1 : 0, row = ALIBI_ROWS == 2 ? 0 : row_offset(i);
    return s - slope[r] * fabsf(from[r] - (column_offset(i) - row));
  }
};

struct AlibiRows {
  float slope[ALIBI_ROWS];
  int column[ALIBI_ROWS];  // at the row's position

  // Opaque, since the compiler would keep all distances in registers if it found that they are needed again.
  DEVICE AlibiBlock block(int first_column) const {
    AlibiBlock x;
#pragma unroll
    for (int r = 0; r < ALIBI_ROWS; r++)
      x.slope[r] = slope[r], x.from[r] = (float)(int)opaque(column[r] - first_column);
    return x;
  }
};
#endif
