// Attention forward for sm_90a: FlashAttention-3 with persistent, warp-specialised CTAs. Warpgroup 0 is the
// producer: it schedules tiles and copies Q, K and V by TMA. Each of the other warpgroups is a consumer: it
// owns 64 queries, keeps one product of scores and one of values in flight, and uses the tensor cores in
// ping-pong order, so that its softmax overlaps with another consumer's products.
//
// One step of a consumer's main loop, over time. The products of a step are S(j) = Q.K(j)^T and
// O += P(j + 1).V(j + 1), where P(j + 1) are the weights computed in the previous step. While one consumer
// computes its softmax, the products of another run.
//
//   named barrier   wait PING_PONG + c ......... signal the next consumer's
//   tensor cores        | S(j)          | O += P(j + 1).V(j + 1)      |  (products of other consumers)
//   CUDA cores      .... dropout hashes | mask | max | exp2 of row 0  | exp2 of row 1 | rescale O | pack P(j)
//   mbarriers       v_full(j + 1)       | release K(j)    k_full(j-1) | release V(j + 1)
//
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM HEAD_FEATURES VALUE_FEATURES STAGES QUERY_STAGES
// PACKED_HEADS RESCALE_THRESHOLD SHARED_BYTES HAS_WINDOW HAS_LEFT HAS_KV_LENS HAS_RANGES HAS_SOFTCAP
// HAS_ALIBI HAS_SINKS HAS_MASK HAS_DROPOUT BIAS_BITS IS_PAGED COPY_KEYS WHOLE_ROWS SPLITS_KEYS
// PACKED_QUERIES CTAS SKIPS_TILES HAS_PROGRAM
#include "forward_rows.cuh"
#include "tile_producer.cuh"
#include "wgmma.cuh"

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
static_assert(PACKED_HEADS == 1 || !(HAS_HELPERS || HAS_RANGES || HAS_ALIBI || HAS_DROPOUT || HAS_PROGRAM),
              "one head's are looked up");
static_assert(!PACKED_QUERIES || IS_PAGED, "contiguous keys are packed too, and have ranges");
static_assert(!SPLITS_KEYS || !(HAS_HELPERS || HAS_RANGES || HAS_DROPOUT || HAS_SINKS),
              "a sink joins the sum of all parts; ranges may begin inside a block");
static_assert(!HAS_DROPOUT || SCORES / 2 <= 32, "a bit for each of a row's weights");
static_assert(!SKIPS_TILES || HAS_HELPERS || HAS_PROGRAM, "tiles of a mask");
static_assert(!HAS_PROGRAM || !(HAS_HELPERS || IS_PAGED || SPLITS_KEYS), "they have no program");

// With SKIPS_TILES the producer publishes one word per K stage: the block that it copies there, whether the
// mask keeps everything in that block, and whether it is the work item's last. The warps that load the mask
// read the word as soon as the copy is issued, consumers once it has completed. The mask of a program is
// computed by the consumers, except in blocks that it keeps.
DEVICE constexpr u32 step_of(int block, bool is_full, bool is_last) {
  return (u32)block << 2 | is_full << 1 | is_last;
}
DEVICE constexpr int block_of_step(u32 step) { return step >> 2; }
DEVICE constexpr bool step_is_full(u32 step) { return step & 2; }
DEVICE constexpr bool step_is_last(u32 step) { return step & 1; }
// The number of arrivals that release a K stage.
constexpr int KEY_READERS = 4 * CONSUMERS + (SKIPS_TILES && HAS_HELPERS ? 32 * CONSUMERS : 0);

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
        steps_full(HAS_HELPERS ? helper_empty + 8 * CONSUMERS : mask),
        steps(steps_full + 8 * STAGES),
        end(SKIPS_TILES   ? steps + 4 * STAGES
            : HAS_HELPERS ? helper_empty + 8 * CONSUMERS
                          : pages + (IS_PAGED ? 4 * STAGES : 0)) {}
};
constexpr ForwardShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");

// The named barriers. Barrier 0 is that of __syncthreads.
struct Barrier {
  enum : u32 {
    WARPGROUP = 1,                      // one per consumer, for its 128 threads
    PING_PONG = WARPGROUP + CONSUMERS,  // consumer c waits at PING_PONG + c until it may issue products
  };
};

// The producer: one warp schedules tiles and copies Q, K and V. With a mask or a bias, one more warp per
// consumer loads it.

// Copies one block of K or V into the next slot of its ring.
template <int COLUMNS>
DEVICE void load_block(u32 slots, u32 full, u32 empty, const TensorMap& map, PipelineState<STAGES>& state,
                       int block, int h, int b) {
  constexpr u32 BYTES = COLUMNS * BLOCK_N * 128;
  const u32 bar = barrier(full, state.stage), at = slot_at<BYTES>(slots, state.stage);
  mbar_wait(barrier(empty, state.stage), state.phase ^ 1);
  mbar_arrive_expect(bar, BYTES);
#pragma unroll
  for (int x = 0; x < COLUMNS; x++) tma_load(at + x * BLOCK_N * 128, map, bar, x * 64, block * BLOCK_N, h, b);
  state.next();
}

DEVICE void load_queries(const ForwardParams& p, const ForwardShared& sm, const Tile& tile,
                         const PipelineState<2>& work) {
#pragma unroll
  for (int c = 0; c < CONSUMERS; c++) {
    const int slot = query_slot(work, c);
    mbar_wait(barrier(sm.q_empty, slot), query_phase(work) ^ 1);
    mbar_arrive_expect(barrier(sm.q_full, slot), CONSUMER_ROWS * HEAD_DIM * 2);
#if PACKED_QUERIES
    const int query = tile.first + query_of(tile.m0 + c * 64), b = 0;
#else
    const int query = query_of(tile.m0 + c * 64), b = tile.b;
#endif
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++)
      tma_load(slot_at<Q_BYTES>(sm.q, slot) + x * 64 * 128, p.q, barrier(sm.q_full, slot), x * 64,
               PACKED_HEADS > 1 ? tile.h : query, PACKED_HEADS > 1 ? query : tile.h, b);
  }
}

#if IS_PAGED
// Copies a block of K or V from pages. Executed by one warp, each lane of which holds the source of one copy.
// Zeros are copied for a page that does not exist; unless 0, `found` is where consumers read which copies
// have a page. `groups` is the number of key groups from page to page.
template <int COLUMNS>
DEVICE void load_paged_block(const ForwardParams& p, u32 slots, u32 full, u32 empty, u32 found,
                             const TensorMap& map, PipelineState<STAGES>& state, int h, const PagedCopy& own,
                             [[maybe_unused]] int groups, bool leader) {
  constexpr u32 BYTES = COLUMNS * BLOCK_N * 128;
  const u32 bar = barrier(full, state.stage), at = slot_at<BYTES>(slots, state.stage),
            exists = __ballot_sync(~0u, p.pages.exists(own.page));
#if WHOLE_ROWS
  const int first = p.pages.exists(own.page) ? own.page * groups + own.token / 8 : -COPY_KEYS;
#endif
  mbar_wait(barrier(empty, state.stage), state.phase ^ 1);
  if (leader) {
    if (found) store_shared(found + 4 * state.stage, exists);
    mbar_arrive_expect(bar, BYTES);
  }
#pragma unroll
  for (int j = 0; j < COPIES; j++) {
#if WHOLE_ROWS
    const int group = __shfl_sync(~0u, first, j);
    if (leader) tma_load_groups(at + j * COPY_KEYS * COLUMNS * 128, map, bar, group, h);
#else
    const int page = __shfl_sync(~0u, own.page, j);
    const int token = COPY_KEYS < 64 ? 0 : __shfl_sync(~0u, own.token, j);
    if (leader)
#pragma unroll
      for (int x = 0; x < COLUMNS; x++)
        tma_load(at + (x * BLOCK_N + j * COPY_KEYS) * 128, map, bar, x * 64, token, h, page);
#endif
  }
  state.next();
}

// Copies the keys of a work item; another warp copies its values. The pages of a block are looked up while
// the previous block is copied. Executed by one warp.
DEVICE void load_work_item(const ForwardParams& p, const ForwardShared& sm, const WorkItem& item,
                           const PipelineState<2>& work, PipelineState<STAGES>& k, bool leader) {
  const int h = item.tile.h / p.group;
  const BlockRange& n = item.blocks;
  PagedCopy keys, next = find_copy(p, item, n.end - 1);
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    keys = next, next = find_copy(p, item, j - 1);
    if (j >= n.begin)
      load_paged_block<QK_COLUMNS>(p, sm.k, sm.k_full, sm.k_empty, sm.pages, p.k, k, h, keys,
                                   p.pages.key_groups, leader);
    if (j == n.end - 1 && leader) load_queries(p, sm, item.tile, work);
    if (j <= n.begin) break;
  }
}
#else
// Copies the keys, queries and values of a work item: K one block ahead of V, and Q after the first block of
// K. The loop is not unrolled, since four iterations would be a sixth of the kernel's code. Executed by one
// thread.
DEVICE void load_work_item(const ForwardParams& p, const ForwardShared& sm, const Tile& tile,
                           const BlockRange& n, const PipelineState<2>& work, PipelineState<STAGES>& k,
                           PipelineState<STAGES>& v) {
  const int h = tile.h / p.group;
  auto load_k = [&](int j) { load_block<QK_COLUMNS>(sm.k, sm.k_full, sm.k_empty, p.k, k, j, h, tile.b); };
  auto load_v = [&](int j) { load_block<V_COLUMNS>(sm.v, sm.v_full, sm.v_empty, p.v, v, j, h, tile.b); };
#pragma unroll 1
  for (int j = n.end - 1;; j--) {
    if (j >= n.begin) load_k(j);
    if (j == n.end - 1) load_queries(p, sm, tile, work);
    else load_v(j + 1);
    if (j < n.begin) break;
  }
}
#endif

#if SKIPS_TILES
// Publishes a step before the keys of its block are copied. Executed by one thread.
DEVICE void publish_step(const ForwardShared& sm, const PipelineState<STAGES>& k, u32 step) {
  mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
  store_shared(slot_at<4>(sm.steps, k.stage), step);
  mbar_arrive(barrier(sm.steps_full, k.stage));
}

// The same as `load_work_item`, for the listed tiles of an item.
DEVICE void load_walk(const ForwardParams& p, const ForwardShared& sm, WorkItem item,
                      const PipelineState<2>& work, PipelineState<STAGES>& k, PipelineState<STAGES>& v) {
  const Tile& tile = item.tile;
  const int h = tile.h / p.group, begin = item.blocks.begin;
  auto load_v = [&](int j) { load_block<V_COLUMNS>(sm.v, sm.v_full, sm.v_empty, p.v, v, j, h, tile.b); };
  int block = item.blocks.end - 1, before = -1;
  if (block < begin) load_queries(p, sm, tile, work);
#pragma unroll 1
  while (block >= begin) {
#if HAS_PROGRAM
    const bool is_full = item.walk.is_full(block, p.program.runs.columns);
#else
    const bool is_full = item.walk.is_full(block);
#endif
    const int next = item.walk.seek(block - 1);
    publish_step(sm, k, step_of(block, is_full, next < begin));
    load_block<QK_COLUMNS>(sm.k, sm.k_full, sm.k_empty, p.k, k, block, h, tile.b);
    if (before < 0) load_queries(p, sm, tile, work);
    else load_v(before);
    before = block, block = next;
  }
  if (before >= 0) load_v(before);
}
#endif

// Executed by one warp.
DEVICE void produce(const ForwardParams& p, const ForwardShared& sm) {
  PipelineState<STAGES> k, v;
  produce_tiles(p, sm, [&](const WorkItem& item, const PipelineState<2>& work, bool leader) {
#if IS_PAGED
    load_work_item(p, sm, item, work, k, leader);
#elif SKIPS_TILES
    if (leader) load_walk(p, sm, item, work, k, v);
#else
    if (leader) load_work_item(p, sm, item.tile, item.blocks, work, k, v);
#endif
  });
}

// Waits for the next work item. Executed by a warp that serves a consumer.
DEVICE WorkItem take_work_item(const ForwardShared& sm, const PipelineState<2>& work) {
  mbar_wait(barrier(sm.work_full, work.stage), work.phase);
  const WorkItem item = load_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage));
  // every thread arrives: racecheck does not accept one arrival per warp
  mbar_arrive(barrier(sm.work_empty, work.stage));
  return item;
}

#if IS_PAGED
// Copies the values of all work items. Executed by one warp.
DEVICE void produce_values(const ForwardParams& p, const ForwardShared& sm) {
  const bool leader = elect_one();
  PipelineState<2> work;
  PipelineState<STAGES> v;
  for (;; work.next()) {
    const WorkItem item = take_work_item(sm, work);
    if (item.tile.m0 == NO_WORK) break;
    const int h = item.tile.h / p.group;
    const BlockRange& n = item.blocks;
    PagedCopy values, next = find_copy(p, item, n.end - 1);
#pragma unroll 1
    for (int j = n.end - 1; j >= n.begin; j--) {
      values = next, next = find_copy(p, item, j - 1);
      load_paged_block<V_COLUMNS>(p, sm.v, sm.v_full, sm.v_empty, 0, p.v, v, h, values, p.pages.value_groups,
                                  leader);
    }
  }
}
#endif

// Calls `bring(block)` for each block of an item whose mask or bias must be read; `blocks` counts them.
template <class Bring>
DEVICE void bring_blocks([[maybe_unused]] const ForwardShared& sm, const BlockRange& n,
                         [[maybe_unused]] PipelineState<STAGES>& steps, PipelineState<1>& blocks,
                         Bring bring) {
#if SKIPS_TILES
  if (n.end <= n.begin) return;
  for (bool is_last = false; !is_last; steps.next()) {
    mbar_wait(barrier(sm.steps_full, steps.stage), steps.phase);
    const u32 step = load_shared<u32>(slot_at<4>(sm.steps, steps.stage));
    mbar_arrive(barrier(sm.k_empty, steps.stage));  // every thread arrives, as for work items
    if (!step_is_full(step)) bring(block_of_step(step)), blocks.next();
    is_last = step_is_last(step);
  }
#else
  for (int j = n.end - 1; j >= n.begin; j--, blocks.next()) bring(j);
#endif
}

#if HAS_MASK
// Loads the mask of a consumer's rows, one block ahead. Eight lanes share a row, with 16 keys each. Executed
// by one warp per consumer.
DEVICE void produce_mask(const ForwardParams& p, const ForwardShared& sm, int c) {
  const int lane = threadIdx.x & 31, chunk = lane & 7, first = lane >> 3;  // rows `first`, `first` + 4, ...
  const u32 to = slot_at<MASK_BYTES>(sm.mask, c) + first * 16 + chunk * 2;
  PipelineState<2> work;
  PipelineState<STAGES> steps;
  PipelineState<1> blocks;
  for (;; work.next()) {
    const WorkItem item = take_work_item(sm, work);
    if (item.tile.m0 == NO_WORK) break;
    const int row = item.tile.m0 + c * 64 + first;
    const int rows = chunk >= BLOCK_N / 16 ? 0 : p.mask_q ? p.Sq - row : 64;
    const unsigned char* from =
        p.mask + item.tile.b * p.mask_b + item.tile.h * p.mask_h + row * p.mask_q + chunk * 2;
    bring_blocks(sm, item.blocks, steps, blocks, [&](int j) {
      const unsigned char* at = from + j * (BLOCK_N / 8);
      unsigned short bits[16];
#pragma unroll
      for (int i = 0; i < 16; i++, at += 4 * p.mask_q)
        bits[i] = i * 4 < rows ? *(const unsigned short*)at : 0;
      mbar_wait(barrier(sm.helper_empty, c), blocks.phase ^ 1);
#pragma unroll
      for (int i = 0; i < 16; i++) store_shared(to + i * 64, bits[i]);
      mbar_arrive(barrier(sm.helper_full, c));
    });
  }
}
#endif

#if BIAS_BITS
// Executed by one thread.
DEVICE void bring_bias(const ForwardParams& p, const ForwardShared& sm, const Tile& tile, int c, int block,
                       u32 phase) {
  const u32 full = barrier(sm.helper_full, c);
  mbar_wait(barrier(sm.helper_empty, c), phase ^ 1);
  mbar_arrive_expect(full, BIAS_BYTES);
  load_bias_tile<BLOCK_N>(slot_at<BIAS_BYTES>(sm.bias, c), p.bias, full, tile.m0 + c * 64, block * BLOCK_N,
                          tile.h, tile.b);
}

// Loads the bias of a consumer's rows, one block ahead. Executed by one warp per consumer.
DEVICE void produce_bias(const ForwardParams& p, const ForwardShared& sm, int c) {
  const bool leader = elect_one();
  PipelineState<2> work;
  [[maybe_unused]] PipelineState<STAGES> steps;
  PipelineState<1> blocks;
  for (;; work.next()) {
    const WorkItem item = take_work_item(sm, work);
    if (item.tile.m0 == NO_WORK) break;
#if SKIPS_TILES
    bring_blocks(sm, item.blocks, steps, blocks, [&](int j) {
      if (leader) bring_bias(p, sm, item.tile, c, j, blocks.phase);
    });
#else
    for (int j = item.blocks.end - 1; j >= item.blocks.begin; j--, blocks.next())
      if (leader) bring_bias(p, sm, item.tile, c, j, blocks.phase);
#endif
  }
}
#endif

// The consumers.

// A step may speculate that its scores do not move the running max: it exponentiates them relative to the
// stale max, and checks the row sum of the weights, which it needs anyway. If the speculation was wrong the
// weights are scaled down; a warp that finds infinite weights recomputes its scores. Steps with a mask, a
// bias or dropout do not speculate, because their scores are expensive to recompute, or their inputs have
// been released by then; large head dimensions do not, because their softmax is hidden behind their products.
constexpr bool SPECULATES_MAX = HEAD_DIM <= 128 && !(HAS_HELPERS || HAS_DROPOUT);
constexpr float MAX_PARTIAL_ROW_SUM = 16384.f;  // of a thread; larger than with an exact running max
constexpr float MAX_INVERTIBLE_SUM = 1e30f;
static_assert(!SPECULATES_MAX || (SCORES / 2 << RESCALE_THRESHOLD) < MAX_PARTIAL_ROW_SUM,
              "a step corrects or moves a running max, not both");

// A consumer visits only the blocks that its own rows attend, unless a helper warp loads a mask or a bias for
// each block of the tile, or the producer lists them.
constexpr bool SKIPS_BLOCKS = !HAS_HELPERS && !SKIPS_TILES;

// With a softcap and nothing that changes scores after it, the softmax computes tanh of small scores on its
// way to the exponents, where its last product costs nothing.
#if HAS_SOFTCAP
constexpr bool CAPS_IN_SOFTMAX = !HAS_ALIBI && !BIAS_BITS;
#else
constexpr bool CAPS_IN_SOFTMAX = false;
#endif

// The address of the `i`-th 16 bytes of a column of keys or values.
DEVICE u32 kv_address(u32 base, int columns, int column, int i) {
  if (!WHOLE_ROWS) return base + column * BLOCK_N * 128 + i * 16;
  return base + (i / 64 * columns + column) * 1024 + i % 64 * 16;
}

// The swizzled address of 16 bytes of a key.
DEVICE u32 key_chunk(u32 base, int row, int chunk) {
  if (!WHOLE_ROWS) return swizzled(base, BLOCK_N, row, chunk);
  return swizzled(base + (row >> 3) * QK_COLUMNS * 1024, 8, row & 7, chunk);
}

// The 64 queries of a warpgroup.
struct ForwardConsumer {
  const ForwardParams& p;
  const ForwardShared& sm;
  const int c, tid, lane;
  PipelineState<2> work;
  u32 queries;  // the descriptor of this work item's queries
  PipelineState<STAGES> k, v;
  PipelineState<1> helper;  // the pipeline of the mask or the bias
  float s[SCORES], o[OUTPUTS];
  u32 weights[SCORES / 2];
  Softmax<SCORES> softmax;
  KeyRange range0, range1;    // the keys of this thread's two rows
  u32 existing_copies;        // one bit for each copy of the block, set if its page exists
  u32 current;                // with SKIPS_TILES: the word that the producer published for this step
  bool max_is_uninitialised;  // in some row of this warp; then the next step must not speculate
  bool is_uncapped;           // with CAPS_IN_SOFTMAX: the scores are small, and still products
#if HAS_ALIBI
  AlibiRows alibi;
#endif
#if HAS_PROGRAM
  ProgramTile program;
  ProgramRow program_values[2];  // of this thread's two rows
  int first_query;               // the first of them
#endif

  DEVICE ForwardConsumer(const ForwardParams& p, const ForwardShared& sm, int c)
      : p(p), sm(sm), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31) {}

  DEVICE int column(int block, int i) const {
    return block * BLOCK_N + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
  }

  // Whether the mask keeps all of this step's block, so that no helper warp loads it.
  DEVICE bool mask_is_full() const { return SKIPS_TILES && step_is_full(current); }

#if HAS_MASK
  // Applies a mask whose rows have 128 bits; this thread uses two of every eight.
  DEVICE void apply_mask() {
    if (mask_is_full()) return;
    const u32 at = slot_at<MASK_BYTES>(sm.mask, c) + ((tid >> 5) * 16 + (lane >> 2)) * 16;
    mbar_wait(barrier(sm.helper_full, c), helper.phase);
    int4 x[2] = {load_shared<int4>(at), load_shared<int4>(at + 8 * 16)};
    mbar_arrive(barrier(sm.helper_empty, c));
    helper.next();
    const u32 words[2][4] = {{(u32)x[0].x, (u32)x[0].y, (u32)x[0].z, (u32)x[0].w},
                             {(u32)x[1].x, (u32)x[1].y, (u32)x[1].z, (u32)x[1].w}};
    constexpr int WORDS = (BLOCK_N + 31) / 32;
    bool all = true;
#pragma unroll
    for (int w = 0; w < WORDS; w++)
      all = all && (words[0][w] & words[1][w]) == (w * 32 + 32 <= BLOCK_N ? ~0u : (1u << BLOCK_N % 32) - 1);
    if (__all_sync(~0u, all)) return;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const u32 bits = words[i >> 1 & 1][i >> 4] >> (lane & 3) * 2;
      if (!(bits & 1u << ((i >> 2 & 3) * 8 + (i & 1)))) s[i] = -INFINITE;
    }
  }
#endif

#if BIAS_BITS
  // Converts the scores from accumulator units to those of the bias, and adds it.
  DEVICE void add_bias() {
    if (mask_is_full()) {
#pragma unroll
      for (int i = 0; i < SCORES; i++) s[i] *= p.bias.unit;
      return;
    }
    mbar_wait(barrier(sm.helper_full, c), helper.phase);
    add_bias_tile<false>(s, slot_at<BIAS_BYTES>(sm.bias, c), 0, p.bias.unit);
    // Reads may still be in flight, and where products keep shared memory busy the next copy would overtake
    // them.
    fence_async_shared();
    mbar_arrive(barrier(sm.helper_empty, c));
    helper.next();
  }
#endif

  template <int ROW> DEVICE bool update_max() {
#if HAS_SOFTCAP
    if (CAPS_IN_SOFTMAX && is_uncapped) {
      const float x = softmax.largest<ROW>(s);
      return softmax.move_max<ROW>(x * SmallTanh(p.tanh_scale, 1.f).factor(x), p.scale_log2);
    }
#endif
    return softmax.update_max<ROW>(s, p.scale_log2);
  }
  template <int ROW> DEVICE float exponentiate() {
#if HAS_SOFTCAP
    if (CAPS_IN_SOFTMAX && is_uncapped)
      return softmax.exponentiate_capped<ROW>(s, SmallTanh(p.tanh_scale, p.scale_log2),
                                                       p.scale_log2);
#endif
    return softmax.exponentiate<ROW>(s, p.scale_log2);
  }

#if HAS_PROGRAM
  // Calls `change(i, r, c, R, C)` for each score: its number, its row and column, and their offsets in `x`.
  template <class Change> DEVICE void for_each_score(const ProgramBlock& x, Change change) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      ProgramColumn columns[2] = {};
      program_columns(x, column_offset(i), columns[0], columns[1]);
#pragma unroll
      for (int e = 0; e < 4; e++)
        change(i + e, program_values[e >> 1], columns[e & 1], (e >> 1) * 8, column_offset(i + e));
    }
  }

  // The offset of the queries is opaque: the compiler would keep values of all columns for a whole loop. It
  // is faster to change all scores first than each on the way to its exponent, 1.07 to 1.13 for a product.
  DEVICE void apply_program(int block) {
    const ProgramBlock x = program_block(program, (int)opaque(first_query), column(block, 0));
    if (PROGRAM_HAS_SCORE)
      for_each_score(x, [&](int i, const ProgramRow& r, const ProgramColumn& c, int R, int C) {
        s[i] = program_score(program, r, c, x, R, C, s[i]);
      });
    if (PROGRAM_HAS_MASK && !mask_is_full())
      for_each_score(x, [&](int i, const ProgramRow& r, const ProgramColumn& c, int R, int C) {
        if (!program_keeps(program, r, c, x, R, C)) s[i] = -INFINITE;
      });
  }
#endif

  // All operations between the product of the scores and the softmax.
  DEVICE void modify_scores(int block, const BlockRange& n) {
#if HAS_SOFTCAP
    is_uncapped = CAPS_IN_SOFTMAX && are_small(s, p.tanh_scale);
    if (!CAPS_IN_SOFTMAX) softcap_scores(s, p.tanh_scale);
    else if (!is_uncapped)
#pragma unroll
      for (int i = 0; i < SCORES; i++) s[i] = softcap_tanh(s[i] * p.tanh_scale);
#endif
#if HAS_ALIBI
    const AlibiBlock x = alibi.block(column(block, 0));
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = x.lowered(s[i], i);
#endif
#if HAS_PROGRAM
    apply_program(block);
#endif
#if HAS_MASK
    apply_mask();
#endif
#if BIAS_BITS
    add_bias();
#endif
#if IS_PAGED
    if (existing_copies != (1u << BLOCK_N / COPY_KEYS) - 1)
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!(existing_copies & 1u << (i >> 2) * 8 / COPY_KEYS)) s[i] = -INFINITE;
#endif
    if (block >= n.full_end || block < n.full_begin)
      mask_by_position(s, column(block, 0), range0, range1);
  }

#if HAS_DROPOUT
  static constexpr int EARLY_ROWS = 1;  // of a thread's two rows, those hashed early by `find_dropped`
  u32 row_seeds[2], dropped[2];         // dropped: one bit for each weight of a row

  DEVICE void read_row_seeds(const Tile& tile, int row) {
    const u32* seeds = p.dropout.row_seeds + (long long)(tile.b * p.Hq + tile.h) * p.dropout.rows;
#pragma unroll
    for (int r = 0; r < 2; r++) row_seeds[r] = seeds[min(row + 8 * r, p.Sq - 1)];
  }

  // The hash input of the `i`-th weight of a row.
  DEVICE u32 hash_input(int row, int block, int i) const {
    return row_seeds[row] + column(block, 0) * COLUMN_STEP + ((i >> 1) * 8 + (i & 1)) * p.dropout.column_step;
  }
#endif

  // Computes hashes while the product of the scores runs: only as many as it hides, since keeping more
  // results costs more than computing them at their use. `arrived` is a barrier whose phase is already
  // complete: ptxas keeps code between two waits in place if the second wait depends on it. `rows` is a
  // multiple of 64, so the amount added to the barrier's address is 0.
  DEVICE void find_dropped([[maybe_unused]] int block, [[maybe_unused]] u32 arrived,
                           [[maybe_unused]] u32 phase) {
#if HAS_DROPOUT
    mbar_wait(arrived, phase);
    asm volatile("" : "+r"(row_seeds[0]), "+r"(row_seeds[1])::"memory");
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < EARLY_ROWS; r++) {
      u32 found[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < SCORES / 2; i++)
        note_dropped(found[i & 1], i, hash_input(r, block, i), p.dropout.threshold);
      dropped[r] = found[0] | found[1];
      any |= dropped[r];
    }
    mbar_wait(arrived + (any & p.dropout.rows & 1), phase);
#endif
  }

  // Zeroes the dropped weights of a row, after the row has been summed, by multiplication, whose pipe is less
  // busy than that of selects.
  template <int ROW> DEVICE void drop([[maybe_unused]] int block) {
#if HAS_DROPOUT
    const u32 threshold = p.dropout.threshold;
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
      float& weight = s[(i >> 1) * 4 + ROW * 2 + (i & 1)];
      if (ROW < EARLY_ROWS)
        asm("{ .reg .pred q; .reg .b32 bit; and.b32 bit, %1, %2; setp.ne.u32 q, bit, 0; "
            "@q mul.f32 %0, %0, 0f00000000; }"
            : "+f"(weight)
            : "r"(dropped[ROW]), "r"(1u << i));
      else
        asm("{ .reg .pred q; setp.lo.u32 q, %1, %2; @q mul.f32 %0, %0, 0f00000000; }"
            : "+f"(weight)
            : "r"(comparable_hash(hash_input(ROW, block, i), threshold)), "r"(threshold));
    }
#endif
  }

  DEVICE void ping_pong_wait() { named_barrier_sync(Barrier::PING_PONG + c, 256); }
  DEVICE void ping_pong_signal() {
    named_barrier_arrive(Barrier::PING_PONG + (c + 1 == CONSUMERS ? 0 : c + 1), 256);
  }

  DEVICE void score_product() {
#if IS_PAGED
    existing_copies = load_shared<u32>(slot_at<4>(sm.pages, k.stage));
    __syncwarp();  // all lanes have read the bits before one lane releases the keys
#endif
    const u32 keys = descriptor_base(slot_at<K_BYTES>(sm.k, k.stage), 16);
    wgmma_fence();
    wgmma_scores_start(s, queries, keys);
    wgmma_commit();
  }

  DEVICE void value_product() {
    const u32 values = descriptor_base(slot_at<V_BYTES>(sm.v, v.stage), KV_COLUMN_BYTES);
    wgmma_fence();
    wgmma_output(o, weights, values);
    wgmma_commit();
  }

  // Every warp arrives for itself: a warp that waits for the same values again, for dropout or in a skipped
  // block, must not miss a phase.
  DEVICE void release_values() {
    if (lane == 0) mbar_arrive(barrier(sm.v_empty, v.stage));
    v.next();
  }

  // After the last block of a work item its queries are released as well.
  DEVICE void release_keys(int slot, bool is_last) {
    if (lane == 0) mbar_arrive(barrier(sm.k_empty, slot));
    if (is_last) release_queries();
  }

  DEVICE void release_queries() {
    if (lane == 0) mbar_arrive(barrier(sm.q_empty, query_slot(work, c)));
  }

  DEVICE void pack_weights() {
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) weights[i] = pack(s[2 * i], s[2 * i + 1]);
  }

  // Zeroes the values past the last attended key: that memory is arbitrary, and 0 * NaN is NaN. Every
  // consumer writes the same zeros to all of them, since waiting for another consumer here would break the
  // ping-pong order.
  DEVICE void clear_values(int from) {
    const u32 values_at = slot_at<V_BYTES>(sm.v, v.stage);
#pragma unroll 1  // once per tile
    for (int i = from * 8 + tid; i < BLOCK_N * 8; i += 128)
#pragma unroll
      for (int x = 0; x < V_COLUMNS; x++)
        store_shared(kv_address(values_at, V_COLUMNS, x, i), make_int4(0, 0, 0, 0));
    fence_async_shared();
    named_barrier_sync(Barrier::WARPGROUP + c, 128);
  }

  DEVICE void wait_values(int block, const BlockRange& n) {
    mbar_wait(barrier(sm.v_full, v.stage), v.phase);
#if HAS_KV_LENS || HAS_RANGES
    if (n.key_end < min((block + 1) * BLOCK_N, p.Sk)) clear_values(n.key_end - block * BLOCK_N);
#endif
  }

  // Recomputes the scores of this warp's rows with warp-level mma, while keys and queries are still in shared
  // memory: 16 keys at a time, to save registers.
  DEVICE void recompute_scores(int slot) {
    const u32 rows = slot_at<Q_BYTES>(sm.q, query_slot(work, c)) + (tid >> 5) * 16 * 128,
              keys = slot_at<K_BYTES>(sm.k, slot);
#pragma unroll 1
    for (int key = 0; key < BLOCK_N; key += 16) {
#pragma unroll
      for (int i = 0; i < SCORES; i++) s[i] = i + 8 < SCORES ? s[(i + 8) % SCORES] : 0.f;
#pragma unroll 1
      for (int chunk = 0; chunk < HEAD_FEATURES / 8; chunk += 2) {
        u32 a[4], b[4];
        ldmatrix_x4<false>(a, swizzled(rows, 64, lane & 15, chunk + (lane >> 4)));
        ldmatrix_x4<false>(
            b, key_chunk(keys, key + (lane & 7) + (lane >> 4) * 8, chunk + (lane >> 3 & 1)));
        mma(*(float (*)[4])(s + SCORES - 8), a, b[0], b[1]),
            mma(*(float (*)[4])(s + SCORES - 4), a, b[2], b[3]);
      }
    }
  }

  // Corrects the weights of a speculative step if its stale max was too small. Returns whether it was.
  DEVICE bool correct_speculation(int slot, int block, const BlockRange& n, float& partial0,
                                  float& partial1) {
    const float largest = fmaxf(partial0, partial1);
    if (!__any_sync(~0u, largest > MAX_PARTIAL_ROW_SUM)) return false;
    if (__any_sync(~0u, largest > MAX_INVERTIBLE_SUM)) {
      recompute_scores(slot);
      modify_scores(block, n);
      update_max<0>(), update_max<1>();
      partial0 = exponentiate<0>(),
      partial1 = exponentiate<1>();
    } else {
      softmax.lower_weights<0>(s, p.scale_log2, partial0),
          softmax.lower_weights<1>(s, p.scale_log2, partial1);
    }
    return true;
  }

  // Reads which block the next keys, which have arrived, belong to.
  DEVICE void read_step() {
#if SKIPS_TILES
    current = warp_uniform(load_shared<u32>(slot_at<4>(sm.steps, k.stage)));
#endif
  }

  // One step of the main loop, as drawn above: computes the scores of `block` while the weights of block
  // `before` are multiplied with their values. Half of the exponentials run during that product and half
  // during the rescaling of its output, since the special-function unit is the bottleneck of both. The wait
  // for the next keys comes before the wait for the output because it ends a basic block: otherwise ptxas
  // moves the latter above the softmax.
  DEVICE void step(int block, int before, const BlockRange& n) {
    ping_pong_wait();
    score_product();
    wait_values(before, n);
    value_product();
    ping_pong_signal();
    find_dropped(block, barrier(sm.v_full, v.stage), v.phase);
    wgmma_wait<1>();
    fence_operand(s);
    const int slot = k.stage;
    k.next();
    if (!SPECULATES_MAX) release_keys(slot, SKIPS_TILES ? step_is_last(current) : block == n.begin);
    modify_scores(block, n);
    const bool compares = !SPECULATES_MAX || max_is_uninitialised;
    bool max_moved = compares && update_max<0>();
    float partial0 = exponentiate<0>();
    drop<0>(block);
    if (compares) max_moved |= update_max<1>();
    softmax.fence();
    fence_operand(s);
    if (SKIPS_TILES ? !step_is_last(current) : block > n.begin)
      mbar_wait(barrier(sm.k_full, k.stage), k.phase);
    wgmma_wait<0>();
    fence_operand(o);
    release_values();
    float partial1 = exponentiate<1>();
    drop<1>(block);
    if (SPECULATES_MAX) {
      max_moved |= correct_speculation(slot, block, n, partial0, partial1);
      release_keys(slot, SKIPS_TILES ? step_is_last(current) : block == n.begin);
      if (max_is_uninitialised) max_is_uninitialised = softmax.has_uninitialised_max();
    }
    pack_weights();
    if (max_moved) softmax.rescale_output(o), softmax.rescale_sums();
    softmax.add_sums(partial0, partial1);
  }

  // Skips blocks of the tile that no row of this consumer attends, from the last to the first, but keeps its
  // turn in the ping-pong order, which the other consumers rely on.
  DEVICE void skip_blocks(int end, int begin) {
#pragma unroll 1
    for (int j = end - 1; j >= begin; j--) {
      mbar_wait(barrier(sm.k_full, k.stage), k.phase);
      ping_pong_wait(), ping_pong_signal();
      release_keys(k.stage, false), k.next();
      mbar_wait(barrier(sm.v_full, v.stage), v.phase);
      release_values();
    }
  }

  // The blocks of the tile that some row of this consumer attends.
  DEVICE BlockRange consumer_blocks(const WorkItem& item) const {
    BlockRange n = item.blocks;
    if (SKIPS_BLOCKS) {
      Tile rows = item.tile;
      rows.m0 += c * 64;
      n = blocks_of(p, rows, item.keys, 64);
      if (query_of(rows.m0) >= queries_of(p, rows) || n.end <= n.begin) n.begin = n.end = item.blocks.begin;
      n.key_end = item.blocks.key_end;
    }
    return n;
  }

  DEVICE void attend(const BlockRange& n) {
    mbar_wait(barrier(sm.k_full, k.stage), k.phase);
    read_step();
    ping_pong_wait();
    score_product();
    ping_pong_signal();
    find_dropped(n.end - 1, barrier(sm.k_full, k.stage), k.phase);
    wgmma_wait<0>();
    fence_operand(s);
    release_keys(k.stage, SKIPS_TILES ? step_is_last(current) : n.end - 1 == n.begin);
    k.next();
    modify_scores(n.end - 1, n);
    update_max<0>(), update_max<1>();
    if (SPECULATES_MAX) max_is_uninitialised = softmax.has_uninitialised_max();
    softmax.add_sums(exponentiate<0>(), exponentiate<1>());
    drop<0>(n.end - 1), drop<1>(n.end - 1);
    pack_weights();
#if SKIPS_TILES
    int last = n.end - 1;
    if (!step_is_last(current)) mbar_wait(barrier(sm.k_full, k.stage), k.phase);
#pragma unroll 1
    while (!step_is_last(current)) {
      read_step();
      const int before = last;
      last = block_of_step(current);
      step(last, before, n);
    }
#else
    const int last = n.begin;
    if (n.end - 2 >= n.begin) mbar_wait(barrier(sm.k_full, k.stage), k.phase);
#pragma unroll 1
    for (int j = n.end - 2; j >= n.begin; j--) step(j, j + 1, n);
#endif
    wait_values(last, n);
    value_product();
    wgmma_wait<0>();
    fence_operand(o);
    release_values();
  }

  // Recomputes rows that have overflowed or contain values that are not finite; a probe is nonzero if this
  // thread's part of the row does. Executed by one warp, whose first row is `top`.
  DEVICE void replace_unusable_rows(const Tile& tile, int top, const u32 (&probes)[2]) const {
    const bool overflowed0 = has_overflowed(p, softmax.max0, softmax.sum0);
    const bool overflowed1 = has_overflowed(p, softmax.max1, softmax.sum1);
    const u32 unusable = vote_rows(overflowed0 || probes[0], overflowed1 || probes[1]);
    const u32 existing = (1u << warp_uniform(max(0, min(16, existing_rows(p, tile, top))))) - 1;
    if (unusable & existing)
      replace_rows(p, tile, top, unusable & existing, vote_rows(overflowed0, overflowed1));
  }

  // Writes the normalised output and the LSE of this consumer's rows.
  DEVICE void finish() {
    const Tile packed = load_tile(slot_at<WORK_ITEM_BYTES>(
        sm.work, work.stage));  // loaded again here to save registers until now
    mbar_arrive(barrier(sm.work_empty, work.stage));
    softmax.reduce_sums();
    const int first = packed.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
    u32 probes[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = query_of(first + 8 * r);
      const Tile tile = tile_of_row(packed, first + 8 * r);
      float inverse;
      const float row_max = r ? softmax.max1 : softmax.max0, sum = r ? softmax.sum1 : softmax.sum0;
      const float lse = finish_row(p, tile, row_max, sum, inverse);
      if ((lane & 3) == 0 && p.lse && row_exists(p, packed, first + 8 * r)) write_lse(p, tile, row, lse);
      Output* to = output_row(p, tile, row);
#if SPLITS_KEYS
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 4) {
        const int column = i / 4 * 8 + (lane & 3) * 2;
        const float x = o[i] * inverse, y = o[i + 1] * inverse;
        add_times_zero(probes[r], pack(x, y));
        if (row_exists(p, packed, first + 8 * r) && column < p.Dv) write_columns(to, column, x, y);
      }
#else
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 16) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          x[j] = 0;
          if (i + 4 * j >= OUTPUTS) continue;
          x[j] = pack(o[i + 4 * j] * inverse, o[i + 4 * j + 1] * inverse);
          add_times_zero(probes[r], x[j]);
        }
        transpose_quad(x);
        const int column = (i / 4 + (lane & 3)) * 8;
        if (row_exists(p, packed, first + 8 * r) && column < p.Dv)
          *(uint4*)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
#endif
    }
    bool is_usual = fminf(softmax.sum0, softmax.sum1) > 0.f && fmaxf(softmax.sum0, softmax.sum1) < INFINITE;
    if (!BIAS_BITS)
      is_usual =
          is_usual && fmaxf(fabsf(softmax.max0), fabsf(softmax.max1)) * p.scale_log2 <= MAX_EXACT_SCORE;
    if (__any_sync(~0u, (probes[0] | probes[1]) != 0 || !is_usual))
      replace_unusable_rows(packed, first - (lane >> 2), probes);
  }

  DEVICE void run() {
    if (c == CONSUMERS - 1) ping_pong_signal();
    for (;; work.next()) {
      mbar_wait(barrier(sm.work_full, work.stage), work.phase);
      const WorkItem item = load_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage));
      const Tile& tile = item.tile;
      if (tile.m0 == NO_WORK) break;
      const int row = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
      range0 = row_range(p, tile, query_of(row), item.keys),
      range1 = row_range(p, tile, query_of(row + 8), item.keys);
#if HAS_ALIBI
#pragma unroll
      for (int r = 0; r < ALIBI_ROWS; r++) {
        const Alibi x = alibi_of_row(p, tile, row + 8 * r, item.keys);
        alibi.slope[r] = x.slope, alibi.column[r] = row + 8 * r + x.shift;
      }
#endif
#if HAS_PROGRAM
      first_query = row;
      program = program_tile(p.program.inputs, tile.b, tile.h);
#pragma unroll
      for (int r = 0; r < 2; r++) program_values[r] = program_row(program, row + 8 * r);
#endif
#if HAS_DROPOUT
      read_row_seeds(tile, row);
#endif
      softmax.reset();
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) o[i] = 0.f;
      queries = opaque(descriptor_base(slot_at<Q_BYTES>(sm.q, query_slot(work, c)),
                                       16));  // otherwise each step would compute it again
      mbar_wait(barrier(sm.q_full, query_slot(work, c)), query_phase(work));
      const BlockRange n = consumer_blocks(item);
      skip_blocks(item.blocks.end, n.end);
      if (n.end > n.begin) attend(n);
      else release_queries();
      skip_blocks(n.begin, item.blocks.begin);
      finish();
    }
    if (c == 0) ping_pong_wait();
  }
};

DEVICE void init_barriers(const ForwardShared& sm) {
  init_tile_barriers(sm, QUERY_STAGES * CONSUMERS, READERS, KEY_READERS);
#if SKIPS_TILES
  for (int i = 0; i < STAGES; i++) mbar_init(barrier(sm.steps_full, i), 1);
#endif
  if (HAS_HELPERS)
    for (int c = 0; c < CONSUMERS; c++)
      mbar_init(barrier(sm.helper_full, c), HAS_MASK ? 32 : 1), mbar_init(barrier(sm.helper_empty, c), 128);
  mbar_init_fence();
}

#if 64 % PACKED_HEADS
// Zeroes the rows that no copy fills, since their scores must be finite.
DEVICE void clear_unused_rows(const ForwardShared& sm) {
  constexpr int UNUSED = (64 - CONSUMER_ROWS) * 8, COLUMNS = QUERY_STAGES * CONSUMERS * QK_COLUMNS;
  for (int i = threadIdx.x; i < COLUMNS * UNUSED; i += blockDim.x)
    store_shared(sm.q + i / UNUSED * 64 * 128 + CONSUMER_ROWS * 128 + i % UNUSED * 16, make_int4(0, 0, 0, 0));
  fence_async_shared();
}
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), CTAS)
    forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardShared sm{smem_address(shared)};
#if SPLITS_KEYS
  launch_dependent_grids();
#endif
  if (threadIdx.x == 0) init_barriers(sm);
#if 64 % PACKED_HEADS
  clear_unused_rows(sm);
#endif
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<(CTAS == 3 ? 24 : CONSUMERS == 2 && CTAS == 1 ? 40 : 32)>();
#if BIAS_BITS
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) produce(p, sm);
    else if (warp <= CONSUMERS) produce_bias(p, sm, warp - 1);
#elif IS_PAGED
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) produce(p, sm);
    else if (warp == 1) produce_values(p, sm);
#else
    if (threadIdx.x < 32) produce(p, sm);
#if HAS_MASK
    else if (threadIdx.x < 32 + 32 * CONSUMERS) produce_mask(p, sm, warp_uniform(threadIdx.x / 32) - 1);
#endif
#endif
  } else {
    register_alloc<(CTAS == 3 ? 136 : CTAS == 2 ? 104 : CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112)>();
    ForwardConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
