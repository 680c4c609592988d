// The work of a cluster of backward_wide.cu, and its shared memory. In the pass for dK and dV a cluster owns
// 64 keys and iterates over the queries that attend them; in the pass for dQ it owns 64 queries and iterates
// over their keys.
#pragma once
#include "backward_tiles.cuh"
#include "pipeline.cuh"
#include "query_blocks.cuh"

#if ENTRY_wide_queries
#define OF_QUERIES 1
#else
#define OF_QUERIES 0
#endif

constexpr int TOKENS = 64, COLUMNS = HEAD_DIM / 64, HALF_COLUMNS = COLUMNS / 2;
constexpr u32 COLUMN_BYTES = TOKENS * 128, HALF_BYTES = HALF_COLUMNS * COLUMN_BYTES;
// SLOTS hold half a block each; NUMBER_SLOTS hold the LSE or delta of whole blocks.
constexpr int SLOTS = 5, NUMBER_SLOTS = (SLOTS + 1) / 2;
constexpr u32 NUMBER_BYTES = TOKENS * 4, RANGE_BYTES = TOKENS * 8;
static_assert(BLOCK_M == TOKENS && BLOCK_N == TOKENS && QUERY_BLOCK_N == TOKENS, "copies of 64 tokens");
static_assert(HEAD_DIM == VALUE_DIM && HEAD_FEATURES == HEAD_DIM && COLUMNS % 4 == 0, "halves of halves");
static_assert(!ADDS_DQ, "nothing is added in memory");
static_assert(!(HAS_MASK || HAS_DROPOUT || HAS_SOFTCAP || HAS_ALIBI || BIAS_BITS), "not in this kernel");

// The rank of a CTA in its cluster: 0 computes weights, 1 their gradients.
DEVICE int cta_rank() { return blockIdx.x & 1; }

// Offsets in shared memory, in order. Data with several slots has as many mbarriers.
struct WideShared {
  u32 resident;  // the cluster's own tokens, K or V, or Q or dO: the half that is not in registers
  u32 stream;    // the streamed tensor: Q or dO, or K or V; first the half that goes to registers
  u32 sent, received;  // weights or their gradients, to and from the other CTA
  u32 numbers;         // the LSE or delta of each query of a block
  u32 ranges;
  u32 nonfinite;  // whether a warp's gradients are not finite
  u32 resident_full;
  u32 full, empty;
  u32 received_full, sent_empty;
  u32 end;

  DEVICE constexpr explicit WideShared(u32 base)
      : resident(base),
        stream(resident + HALF_BYTES),
        sent(stream + SLOTS * HALF_BYTES),
        received(sent + 2 * COLUMN_BYTES),
        numbers(received + 2 * COLUMN_BYTES),
        ranges(numbers + NUMBER_SLOTS * NUMBER_BYTES),
        nonfinite(ranges + NUMBER_SLOTS * RANGE_BYTES),
        resident_full(nonfinite + 8 * 4),
        full(resident_full + 8),
        empty(full + 8 * SLOTS),
        received_full(empty + 8 * SLOTS),
        sent_empty(received_full + 8 * 2),
        end(sent_empty + 8 * 2) {}
};
constexpr WideShared LAYOUT(0);
static_assert(LAYOUT.end == SHARED_BYTES, "SHARED_BYTES is the layout's size");

#if OF_QUERIES
// 64 queries of a head. Within a section the longest blocks of all heads come first.
struct WideWork {
  QueryBlock t;
  QueryBlockKeys span;
  KeyBlocks blocks;

  DEVICE explicit WideWork(const BackwardParams& p) {
    const int heads = p.B * p.Hq, per = p.query_section * p.m_blocks, i = blockIdx.x / 2;
    const int sec = i / per, r = i - sec * per;
    const int inside = min(p.query_section, heads - sec * p.query_section);
    const int head = sec * p.query_section + r % inside;
    t.m = HAS_WINDOW ? p.m_blocks - 1 - r / inside : r / inside;
    t.b = head / p.Hq;
    t.h = head - t.b * p.Hq;
    t.keys = keys_of(p, t.b);
    span = keys_of_block(p, t);
    blocks = keys_of(span);
  }

  DEVICE bool has_blocks() const { return blocks.first < blocks.end; }
  DEVICE int first_token() const { return t.m * TOKENS; }
  DEVICE int head(const BackwardParams&) const { return t.h; }

  // Calls `self.step` for every block of keys, with their head and whether some query does not attend the
  // whole block.
  template <class Self> DEVICE void for_each_block(const BackwardParams& p, Self& self) const {
#pragma unroll 1
    for (int j = blocks.first; j < blocks.end; j++)
      self.step(t.h / p.group, j, j * TOKENS < span.all_lo || (j + 1) * TOKENS > span.all_hi);
  }
};
#else
// 64 keys of a head, or of a part of its group of query heads.
struct WideWork {
  KeyTile t;

  DEVICE explicit WideWork(const BackwardParams& p) : t(tile_at(p, blockIdx.x / 2)) {}

  DEVICE bool has_blocks() const { return t.first < t.last; }
  DEVICE int first_token() const { return t.n0; }
  DEVICE int head(const BackwardParams& p) const { return key_head(p, t); }

  // Calls `self.step` for every block of queries. Executed by whole warps.
  template <class Self> DEVICE void for_each_block(const BackwardParams& p, Self& self) const {
    for (int h = first_head(p, t), end = h + p.part_heads; h < end; h++)
      for (int base = t.first; base < t.last; base += 32) {
        const QueryBlocks found = query_blocks(p, t, h, base);
#pragma unroll 1
        for (u32 left = found.some; left; left &= left - 1) {
          const int bit = __ffs(left) - 1;
          self.step(h, base + bit, found.edge >> bit & 1);
        }
      }
  }
};
#endif
