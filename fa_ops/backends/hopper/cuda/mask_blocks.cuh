// The lists of fa::mask_blocks, which hold the tiles of a dense mask that are not empty. Entries are not
// trusted but clamped: for any contents, reads stay within the tensors and all loops end.
#pragma once
#include "ptx.cuh"

constexpr int MASK_TILE = 128;  // MASK_BLOCK of fa_ops/types.py

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
