// Tile scheduler of the forward pass: persistent CTAs take tiles of BLOCK_M queries of one head.
#pragma once
#include "forward_params.cuh"

struct Tile {
  int m0, h, b;  // m0: the first query
};

// The tile after `t`. Where tiles differ in length they are handed out on demand, so that no CTA is left with
// a long one at the end.
DEVICE int next_tile(const ForwardParams& p, int t) {
  return gridDim.x + (p.tile_counter ? atomicAdd(p.tile_counter, 1) : t);
}

// Tiles in order of sections of heads whose K and V share the L2. Inside a section of a causal call the
// longest tiles of all heads come first.
DEVICE Tile tile_at(const ForwardParams& p, int t) {
  const int heads = p.B * p.Hq, per = p.section * p.m_blocks;
  const int sec = t / per, r = t - sec * per;
  const int inside = min(p.section, heads - sec * p.section);
#if HAS_WINDOW || HAS_RANGES || HAS_MASK  // nearly every mask is causal
  const int m = p.m_blocks - 1 - r / inside, head = sec * p.section + r % inside;
#else
  const int m = r % p.m_blocks, head = sec * p.section + r / p.m_blocks;
#endif
  Tile tile;
  tile.b = head / p.Hq;
  tile.h = head - tile.b * p.Hq;
  tile.m0 = m * BLOCK_M;
  return tile;
}
