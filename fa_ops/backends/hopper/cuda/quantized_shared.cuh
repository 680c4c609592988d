// Tile sizes and shared memory layout of the 8-bit forward kernel.
#pragma once
#include "quantized_params.cuh"

#include "block_info.cuh"
#include "named_barriers.cuh"
#include "pipeline.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that own 64 queries each
// A tile of Q or K consists of columns of 128 features, each one swizzle atom of 128 bytes wide. A tile of V
// is transposed: its rows are the BLOCK_N keys of a channel, one swizzle atom wide. They are followed by ONES
// rows of ones, whose products with the weights are the row sums.
constexpr int QK_COLUMNS = HEAD_DIM / 128;
constexpr int QUERY_SLOTS = QUERY_STAGES * CONSUMERS;
constexpr int ONES = SUMS_BY_PRODUCT ? 8 : 0;
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_FEATURES / 2;  // accumulator registers of a thread
constexpr int PRODUCTS = OUTPUTS + ONES / 2;
#if QUANTISES_QUERIES
constexpr int RAW_COLUMNS = (HEAD_FEATURES + 63) / 64;  // of queries before, one swizzle atom each
#else
constexpr int RAW_COLUMNS = 0;
#endif
constexpr u32 RAW_BYTES = 64 * 128 * RAW_COLUMNS;
constexpr u32 Q_BYTES = 64 * HEAD_DIM, K_BYTES = BLOCK_N * HEAD_DIM,
              V_COPY_BYTES = BLOCK_N * VALUE_FEATURES, V_BYTES = V_COPY_BYTES + BLOCK_N * ONES;
// The totals of a consumer, accumulated over earlier blocks, in 16-byte pieces per thread.
constexpr int TOTAL_FEATURES = (VALUE_FEATURES + 15) / 16 * 16;
constexpr u32 TOTAL_BYTES = 64 * TOTAL_FEATURES * 2;
#if IS_PAGED
constexpr u32 PAGE_BYTES = 4 * STAGES;
#else
constexpr u32 PAGE_BYTES = 0;
#endif
constexpr int READERS = 128 * CONSUMERS;  // threads that read a work item

static_assert(CONSUMERS == 2 || CONSUMERS == 3, "as registers are divided");
static_assert(BLOCK_M % 64 == 0 && BLOCK_N == 128, "whole products, and keys of V in one swizzle atom");
static_assert(VALUE_FEATURES % 8 == 0, "whole swizzle atoms");
static_assert(!QUANTISES_QUERIES || (QUERY_STAGES == 1 && HEAD_DIM == 128), "a slot that is filled here");
static_assert(QUERY_STAGES <= 2, "a slot for each of two work items");

// Offsets in shared memory, in order. Barriers have one mbarrier for each slot.
struct QuantizedShared {
  u32 q, raw, k, v, totals;  // raw: queries of 16 bits
  u32 q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty;
  u32 work, pages, end;  // pages: per slot of keys, one bit for each copy, set if its page exists

  DEVICE constexpr explicit QuantizedShared(u32 base)
      : q(base),
        raw(q + QUERY_SLOTS * Q_BYTES),
        k(raw + CONSUMERS * RAW_BYTES),
        v(k + STAGES * K_BYTES),
        totals(v + STAGES * V_BYTES),
        q_full(totals + CONSUMERS * TOTAL_BYTES),
        q_empty(q_full + 8 * QUERY_SLOTS),
        k_full(q_empty + 8 * QUERY_SLOTS),
        k_empty(k_full + 8 * STAGES),
        v_full(k_empty + 8 * STAGES),
        v_empty(v_full + 8 * STAGES),
        work_full(v_empty + 8 * STAGES),
        work_empty(work_full + 8 * 2),
        work((work_empty + 8 * 2 + 15) & ~15),
        pages(work + 2 * WORK_ITEM_BYTES),
        end(pages + PAGE_BYTES) {}
};
constexpr QuantizedShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");
