// Tile scheduler of the forward pass: persistent CTAs take tiles of BLOCK_M rows. Rows are the queries of one
// head, or each query of PACKED_HEADS heads in turn (pack_gqa of FlashAttention-3).
#pragma once
#include "ptx.cuh"

struct Tile {
  int m0, h, b;  // m0: the first row, h: the first head
};

// Each consumer has whole queries; what else there is of its 64 rows is unused.
constexpr int CONSUMER_QUERIES = 64 / PACKED_HEADS, CONSUMER_ROWS = CONSUMER_QUERIES * PACKED_HEADS;

DEVICE int query_of(int row) {
  return CONSUMER_ROWS == 64 ? (u32)row / PACKED_HEADS
                             : (u32)row / 64 * CONSUMER_QUERIES + (u32)row % 64 / PACKED_HEADS;
}

// The head of a row among those that the tile packs.
DEVICE int packed_head(int row) { return (u32)row % 64 % PACKED_HEADS; }

// The tile after `t`. Where tiles differ in length they are handed out on demand, so that no CTA is left with
// a long one at the end.
template <class Params> DEVICE int next_tile(const Params& p, int t) {
  return gridDim.x + (p.tile_counter ? atomicAdd(p.tile_counter, 1) : t);
}

// Tiles in order of sections of heads whose K and V share the L2. Inside a section of a causal call the
// longest tiles of all heads come first.
template <class Params> DEVICE Tile tile_at(const Params& p, int t) {
  const int row_heads = p.Hq / PACKED_HEADS, heads = p.B * row_heads, per = p.section * p.m_blocks;
  const int sec = t / per, r = t - sec * per;
  const int inside = min(p.section, heads - sec * p.section);
#if HAS_WINDOW || HAS_RANGES || HAS_MASK  // nearly every mask is causal
  const int m = p.m_blocks - 1 - r / inside, head = sec * p.section + r % inside;
#else
  const int m = r % p.m_blocks, head = sec * p.section + r / p.m_blocks;
#endif
  Tile tile;
  tile.b = head / row_heads;
  tile.h = (head - tile.b * row_heads) * PACKED_HEADS;
  tile.m0 = m * BLOCK_M;
  return tile;
}
