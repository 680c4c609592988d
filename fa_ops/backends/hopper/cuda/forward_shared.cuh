// Tile sizes, and the layout of shared memory, of the forward kernel.
#pragma once
#include "block_info.cuh"
#include "forward_params.cuh"
#include "named_barriers.cuh"
#include "pipeline.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that own 64 queries each
// A tile in shared memory consists of columns of 64 features, each one swizzle atom of 128 bytes wide. Copies
// zero-fill columns beyond the existing HEAD_FEATURES and VALUE_FEATURES, and products read features in steps
// of 16.
constexpr int QK_COLUMNS = HEAD_DIM / 64, V_COLUMNS = VALUE_DIM / 64;
// Bytes from column to column of a tile of keys or values. With WHOLE_ROWS the columns of 8 rows are
// adjacent, so that one copy loads all features of its keys.
constexpr u32 KV_COLUMN_BYTES = WHOLE_ROWS ? 8 * 128 : BLOCK_N * 128;
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_FEATURES / 2;  // accumulator registers of a thread
constexpr u32 Q_BYTES = 64 * HEAD_DIM * 2, K_BYTES = BLOCK_N * HEAD_DIM * 2,
              V_BYTES = BLOCK_N * VALUE_DIM * 2;
constexpr u32 MASK_BYTES = HAS_MASK ? 64 * 16 : 0;  // per consumer: one bit for each row and key of a block
constexpr u32 BIAS_BYTES = 64 * BLOCK_N * BIAS_BITS / 8;  // per consumer
constexpr bool HAS_HELPERS = HAS_MASK || BIAS_BITS;       // one warp per consumer loads the mask or bias
constexpr int READERS =
    128 * CONSUMERS + (HAS_HELPERS ? 32 * CONSUMERS : 0) + 32 * IS_PAGED;  // threads that read a work item

static_assert(BLOCK_M % 64 == 0 && BLOCK_N % 16 == 0, "whole products");
static_assert(QUERY_STAGES <= 2, "a slot for each of two work items");
static_assert(!HAS_MASK || BLOCK_N <= 128, "eight lanes of 16 keys, and four words per row");
static_assert(!HAS_HELPERS || CONSUMERS <= 3, "a warp for each consumer beside the one that copies");
static_assert(!IS_PAGED || !(HAS_HELPERS || HAS_RANGES),
              "pages may hold anything before the begin of a range");
static_assert(PACKED_HEADS == 1 || !(HAS_HELPERS || HAS_RANGES || HAS_ALIBI || HAS_DROPOUT),
              "one head's are looked up");
static_assert(!PACKED_QUERIES || IS_PAGED, "contiguous keys are packed too, and have ranges");
static_assert(!SPLITS_KEYS || !(HAS_HELPERS || HAS_RANGES || HAS_DROPOUT || HAS_SINKS),
              "a sink joins the sum of all parts; ranges may begin inside a block");
static_assert(!HAS_DROPOUT || SCORES / 2 <= 32, "a bit for each of a row's weights");
static_assert(!SKIPS_TILES || HAS_HELPERS, "tiles of a mask");

// With SKIPS_TILES the producer publishes one word per K stage: the block that it copies there, whether the
// mask keeps everything in that block, and whether it is the work item's last. The warps that load the mask
// read the word as soon as the copy is issued, consumers once it has completed.
DEVICE constexpr u32 step_of(int block, bool is_full, bool is_last) {
  return (u32)block << 2 | is_full << 1 | is_last;
}
DEVICE constexpr int block_of_step(u32 step) { return step >> 2; }
DEVICE constexpr bool step_is_full(u32 step) { return step & 2; }
DEVICE constexpr bool step_is_last(u32 step) { return step & 1; }
// The number of arrivals that release a K stage.
constexpr int KEY_READERS = 4 * CONSUMERS + (SKIPS_TILES ? 32 * CONSUMERS : 0);

// Offsets in shared memory, in order. Barriers have one mbarrier for each slot.
struct ForwardShared {
  u32 q, k, v, bias;
  u32 q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty;
  u32 work, mask, helper_full, helper_empty;
  u32 pages;              // per K stage: one bit for each copy, set if its page exists
  u32 steps_full, steps;  // per K stage: the published word of its block
  u32 end;

  DEVICE constexpr explicit ForwardShared(u32 base)
      : q(base),
        k(q + QUERY_STAGES * CONSUMERS * Q_BYTES),
        v(k + STAGES * K_BYTES),
        bias(v + STAGES * V_BYTES),
        q_full(bias + CONSUMERS * BIAS_BYTES),
        q_empty(q_full + 8 * QUERY_STAGES * CONSUMERS),
        k_full(q_empty + 8 * QUERY_STAGES * CONSUMERS),
        k_empty(k_full + 8 * STAGES),
        v_full(k_empty + 8 * STAGES),
        v_empty(v_full + 8 * STAGES),
        work_full(v_empty + 8 * STAGES),
        work_empty(work_full + 8 * 2),
        work((work_empty + 8 * 2 + 15) & ~15),
        mask(work + 2 * WORK_ITEM_BYTES),
        helper_full(mask + CONSUMERS * MASK_BYTES),
        helper_empty(helper_full + 8 * CONSUMERS),
        pages(mask),
        steps_full(helper_empty + 8 * CONSUMERS),
        steps(steps_full + 8 * STAGES),
        end(SKIPS_TILES   ? steps + 4 * STAGES
            : HAS_HELPERS ? helper_empty + 8 * CONSUMERS
                          : pages + (IS_PAGED ? 4 * STAGES : 0)) {}
};
constexpr ForwardShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");
