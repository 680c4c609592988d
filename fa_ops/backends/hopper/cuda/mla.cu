// Decoding over a latent KV cache (MLA) for sm_90a, after FlashMLA: few queries of many heads against one
// latent head, whose values are the first VALUE_DIM features of its keys. A CTA attends 64 packed rows:
// `heads` heads of `tokens` queries. Two consumer warpgroups hold half the columns of the output each. Tiles
// of 64 keys alternate between two buffers: warpgroup 0 computes the scores of the tiles in the first,
// warpgroup 1 of those in the second, and each passes its weights to the other through the key features that
// are not values. Both share one running max per row, which is passed from tile to tile, so that their sums
// agree. The halves of a buffer are released and filled separately, and read column by column as they arrive.
// split_keys.cuh divides the keys among CTAs, and merges the items that several CTAs share.
//
// One step of both consumers, over time: warpgroup 0 computes the scores of tile j, warpgroup 1 those of tile
// j + 1. Each product with values reads the columns that belong to its warpgroup, and then releases them.
//
//   warpgroup 0   | S(j) | softmax, P(j) to 1 | O += P(j).V(j)             | O += P(j + 1).V(j + 1)
//   warpgroup 1   | S(j + 1)                  | O += P(j).V(j)             | O += P(j + 1).V(j + 1)
//                                             | softmax, P(j + 1) to 0     |
//
// Compile-time: IS_BF16 HEAD_DIM VALUE_DIM BLOCK_N ROWS SHARED_BYTES RESCALE_THRESHOLD SCALES_DIFFERENCES
// IS_PAGED COPY_KEYS HAS_KV_LENS
#include "elements.cuh"
#include "gathered_keys.cuh"
#include "pipeline.cuh"
#include "split_keys.cuh"
#include "wgmma.cuh"

// fa_ops/backends/hopper/runtime/structs.py reads this declaration.
struct MlaParams {
  TensorMap q, k;
  Element* out;                    // (B, Sq, Hq, VALUE_DIM)
  float* lse;                      // (B, Hq, Sq)
  u32* partial;                    // (2 * CTAs, ROWS, VALUE_DIM / 2) pairs of float16, see split_keys.cuh
  float2* partial_stats;           // (2 * CTAs, ROWS, 2), for each consumer's half of the values
  const int* kv_lens;              // (B,) or null
  const int* table;                // (B, table_stride) or null
  int B, Hq, Sq, Sk;               // Sk: capacity of the cache
  int tokens, heads, head_blocks;  // queries and heads per block of rows, and blocks of heads
  int width, items;                // blocks of rows per CTA group, and CTA groups per batch row
  int window_right, page, page_count, table_stride;
  float scale_log2;
  const Element *q_rows, *k_rows;  // the tensors of the maps, for rows that are attended exactly
  Strides q_strides, k_strides;
};

DEVICE int capacity_tiles(const MlaParams& p) { return ceil_div(p.Sk, BLOCK_N); }
DEVICE BatchRow batch_row(const MlaParams& p, int b) {
  const int keys = keys_of(p, b);
  return {keys, 0, keys, 0, max(1, (int)((u32)(keys + BLOCK_N - 1) / BLOCK_N))};
}
DEVICE int items_per_row(const MlaParams& p) { return p.items; }
DEVICE int group_width(const MlaParams& p) { return p.width; }
DEVICE int packed_rows(const MlaParams& p) { return p.tokens * p.heads; }
DEVICE int stats_per_row(const MlaParams&) { return 2; }
// A lane holds pairs of columns that are 8 apart, and writes four at a time.
DEVICE int partial_column(const MlaParams&, int pair) {
  return (pair >> 4) * 32 + (pair & 3) * 8 + (pair >> 2 & 3) * 2;
}
// The number of tiles that are attended in the time in which the results of a split are written.
DEVICE int tiles_per_write(const MlaParams& p) { return (packed_rows(p) + 32) / 64; }
DEVICE int whole_tiles(const MlaParams& p) { return 2 + 2 * tiles_per_write(p); }

// A range of n tiles takes the time of n tiles. It cuts a batch row of N tiles into N / n splits, each of
// which is written and merged in about 0.05 of a tile's time. The sum is least for n = sqrt(0.05 N).
//
// If all items have the same length, each is whole or cut in the same way where that makes no range much
// longer. No CTA then has parts of two items; to write the partial results of 64 rows takes longer than to
// attend a tile. Whole items spare two such writes, and merging, which takes as long as another tile.
DEVICE Partition partition_of(const MlaParams& p, int total, int shortest, int longest) {
  const int least = max(1, (int)sqrtf(0.05f * (float)longest)),
            groups = max(1, (int)min(gridDim.x / (u32)p.width, (u32)total / (u32)least)),
            items = p.B * p.items, share = ceil_div(total, groups), write = tiles_per_write(p);
  if (items == 1 || shortest != longest) return {groups, total};
  if (ceil_div(items, groups) * longest <= share + 2 * write + 1) return {groups, items, true};
  if (groups >= items) {
    const int grain = ceil_div(longest, (u32)groups / (u32)items), splits = ceil_div(longest, grain);
    if (grain <= share + write) return {items * splits, total, false, longest, splits, grain};
  }
  return {groups, total};
}

// The named barriers. Barrier 0 is that of __syncthreads.
struct Barrier {
  enum : u32 {
    WARPGROUP = 1,  // one per consumer, for its 128 threads
    SUMS = 3,       // the row sums of each consumer are in shared memory
  };
};

constexpr int QK_COLUMNS = HEAD_DIM / 64,
              HALF = VALUE_DIM / 128;  // columns of 64 features: of a key, of half a value
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_DIM / 4;
constexpr u32 COLUMN_BYTES = 64 * 128, TILE_BYTES = QK_COLUMNS * COLUMN_BYTES;
static_assert(ROWS == 64 && BLOCK_N == 64 && QK_COLUMNS == 2 * HALF + 1,
              "one column is left for the weights");

constexpr u32 STAGED_BYTES = 16 * 64;  // per warp: 32 columns of its rows of results

// Offsets in shared memory, in order.
struct MlaShared {
  u32 q, k, staged;
  u32 running_max;  // per consumer, of its last tile, for the other
  u32 sums;         // per consumer, for two items
  u32 split;        // for two items
  u32 pages;        // per buffer: one bit for each copy or gathered key, set if its page exists
  u32 q_full, q_empty;
  u32 columns_full;   // per buffer and column of 64 features
  u32 halves_empty;   // per buffer and half of the values
  u32 weights_ready;  // per buffer
  u32 end;

  DEVICE constexpr explicit MlaShared(u32 base)
      : q(base),
        k(q + TILE_BYTES),
        staged(k + 2 * TILE_BYTES),
        running_max(staged + 8 * STAGED_BYTES),
        sums(running_max + 2 * ROWS * 4),
        split(sums + 4 * ROWS * 4),
        pages(split + 2 * SPLIT_BYTES),
        q_full(pages + 2 * PAGES_BYTES),
        q_empty(q_full + 8),
        columns_full(q_empty + 8),
        halves_empty(columns_full + 2 * QK_COLUMNS * 8),
        weights_ready(halves_empty + 4 * 8),
        end(weights_ready + 2 * 8) {}
  DEVICE u32 tile(int stage) const { return k + stage * TILE_BYTES; }
  DEVICE u32 split_slot(int i) const { return split + i * SPLIT_BYTES; }
  DEVICE u32 column_full(int stage, int x) const { return columns_full + 8 * (stage * QK_COLUMNS + x); }
  DEVICE u32 half_empty(int stage, int half) const { return halves_empty + 8 * (stage * 2 + half); }
  DEVICE u32 weights_full(int stage) const { return weights_ready + 8 * stage; }
  DEVICE u32 weights_tile(int stage) const { return tile(stage) + 2 * HALF * COLUMN_BYTES; }
};

constexpr MlaShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");

// The queries of a block of rows: row r holds query `token` + r % tokens of head `head` + r / tokens.
struct QueryBlock {
  int token, head;
};
DEVICE QueryBlock query_block_of(const MlaParams& p, const Split& t) {
  const u32 m = t.item * p.width + blockIdx.x % (u32)p.width, heads = p.head_blocks;
  return {(int)(m / heads) * p.tokens, (int)(m % heads) * p.heads};
}

// Writes the LSE of a row of an item. Returns the row's index in the output, or -1 if it does not exist, and
// sets `inverse` to the factor that normalises its sums.
DEVICE int finish_packed_row(const MlaParams& p, const Split& t, int row, float max2, float total,
                             bool writes_lse, float& inverse) {
  const QueryBlock block = query_block_of(p, t);
  const int head = block.head + (u32)row / (u32)p.tokens, token = block.token + (u32)row % (u32)p.tokens;
  const float lse = finish_row(max2, total, 1.f, false, 0.f, inverse);
  if (row >= packed_rows(p) || token >= p.Sq || head >= p.Hq) return -1;
  if (writes_lse) p.lse[((long long)t.b * p.Hq + head) * p.Sq + token] = lse;
  return (t.b * p.Sq + token) * p.Hq + head;
}

// Writes two normalised columns of an output row.
DEVICE void write_columns(const MlaParams& p, int out_row, int column, float2 x, float inverse) {
  if (out_row >= 0)
    *(u32*)(p.out + (long long)out_row * VALUE_DIM + column) = pack(x.x * inverse, x.y * inverse);
}

// A row of an item, computed exactly.
struct MlaExactRow : ExactCacheRow<MlaParams> {
  const int begin = 0;
  int end;
  float scale_log2;
  const Element* query;

  DEVICE MlaExactRow(const MlaParams& p, const Split& t, int row)
      : ExactCacheRow{p, t.b}, scale_log2(p.scale_log2) {
    const QueryBlock block = query_block_of(p, t);
    const int head = block.head + (u32)row / (u32)p.tokens, token = block.token + (u32)row % (u32)p.tokens;
    query = row_at(p.q_rows, p.q_strides, b, min(head, p.Hq - 1), min(token, p.Sq - 1));
    end = warp_uniform(min(t.keys, t.keys - p.Sq + token + p.window_right + 1));
  }

  DEVICE const Element* value(int key) const {
    const int from = find(key);
    return row_at(p.k_rows, p.k_strides, from, 0, key);
  }
  DEVICE float score(int key) const { return dot(query, value(key), HEAD_DIM); }
};

// Replaces two columns of a row in each lane by exact results. Executed by one warp.
DEVICE void replace_columns(const MlaParams& p, const Split& t, int row, int column) {
  ExactColumns found;
  if (attend_exactly(MlaExactRow(p, t, row), column, VALUE_DIM, found)) {
    float inverse;
    const int out_row =
        finish_packed_row(p, t, row, found.max * p.scale_log2, found.sum, column == 0, inverse);
    write_columns(p, out_row, column, found.x, inverse);
  }
}

#if GATHERS_KEYS
template <int COUNT>
DEVICE void gather_columns(const MlaShared& sm, const GatheredRows<Element>& rows, bool leader, int stage,
                           int first, u64 hint) {
  rows.copy<128, COUNT>(sm.tile(stage) + first * COLUMN_BYTES, first * 128, HEAD_DIM * 2, hint);
#pragma unroll
  for (int x = first; x < first + COUNT; x++) {
    if (leader) mbar_arrive(sm.column_full(stage, x));
    copies_arrive(sm.column_full(stage, x));
  }
}
#endif

// Copies a tile into its buffer in halves: first the half of the values that belongs to the warpgroup that
// computes the scores, then the other half, together with the column that the weights overwrite, which the
// other warpgroup reads last.
#if GATHERS_KEYS
DEVICE void copy_tile(const MlaParams& p, const MlaShared& sm, const Split& t, bool leader, int i,
                      u32& phases, GatheredKeys& next) {
  const int stage = i & 1;
  const u64 hint = p.width == 1 ? EVICT_FIRST : EVICT_NORMAL;
  if (i == 0) next.find(p, t.b, t.tile, {0, t.keys});
  next.validate(p);
  const GatheredKeys keys = next;
  next.find(p, t.b, t.tile + i + 1, {0, t.keys});
  const GatheredRows<Element> rows(p.k_rows, p.k_strides, 0, keys);
#pragma unroll 1
  for (int half_index = 0; half_index < 2; half_index++) {
    const int side = stage ^ half_index;
    mbar_wait(sm.half_empty(stage, side), phases >> stage & 1 ^ 1);
    if (half_index == 0) keys.store_existing(slot_at<PAGES_BYTES>(sm.pages, stage), leader);
    gather_columns<HALF>(sm, rows, leader, stage, side * HALF, hint);
    if (half_index) gather_columns<1>(sm, rows, leader, stage, 2 * HALF, hint);
  }
  phases ^= 1 << stage;
}
#else
constexpr int COPIES = BLOCK_N / COPY_KEYS;  // of one column

DEVICE void copy_tile(const MlaParams& p, const MlaShared& sm, const Split& t, bool leader, int i,
                      u32& phases, GatheredKeys&) {
  const int lane = threadIdx.x & 31, stage = i & 1;
  int at = (t.tile + i) * BLOCK_N + lane * COPY_KEYS, found = -1;  // -1: no such page, zeros are copied
  if (lane < COPIES && at < t.keys) {
#if IS_PAGED
    found = p.table[(long long)t.b * p.table_stride + at / p.page], at %= p.page;
    if (found >= p.page_count) found = -1;
#else
    found = t.b;
#endif
  }
  const u32 valid = __ballot_sync(~0u, found >= 0);
  int token[COPIES], page[COPIES];
#pragma unroll
  for (int j = 0; j < COPIES; j++)  // pages of fewer than 64 keys are copied whole
    page[j] = __shfl_sync(~0u, found, j), token[j] = COPY_KEYS < 64 ? 0 : __shfl_sync(~0u, at, j);
#pragma unroll 1
  for (int half_index = 0; half_index < 2; half_index++) {
    const int side = stage ^ half_index;
    mbar_wait(sm.half_empty(stage, side), phases >> stage & 1 ^ 1);
    if (!leader) continue;
    if (half_index == 0) store_shared(slot_at<PAGES_BYTES>(sm.pages, stage), valid);
#pragma unroll 1
    for (int i = 0; i < HALF + half_index; i++) {
      const int x = i == HALF ? 2 * HALF : side * HALF + i;
      const u32 full = sm.column_full(stage, x), to = sm.tile(stage) + x * COLUMN_BYTES;
      mbar_arrive_expect(full, COLUMN_BYTES);
#pragma unroll
      for (int j = 0; j < COPIES; j++)
        tma_load_hinted(to + j * COPY_KEYS * 128, p.k, full, x * 64, token[j], 0, page[j],
                        p.width == 1 ? EVICT_FIRST : EVICT_NORMAL);
    }
  }
  phases ^= 1 << stage;
}
#endif

// Executed by each warp that copies, of which only the first copies queries.
DEVICE void produce(const MlaParams& p, const MlaShared& sm, int warp) {
  const bool leader = elect_one();
  u32 phases = 0;  // one bit per buffer; an item begins in the first
  PipelineState<2> items;
  GatheredKeys next(warp);
  u32 q_phase = 0;
  for (WorkIterator<MlaParams> iterator(p);; items.next(), q_phase ^= 1) {
    Split t = {};
    if (iterator.at < iterator.stop) t = iterator.split(), iterator.find_splits(t);
    if (warp == 0) mbar_wait(sm.q_empty, q_phase ^ 1);
    if (leader && warp == 0) {
      store_split(sm.split_slot(items.stage), t);
      if (t.count == 0) mbar_arrive(sm.q_full);
      else {
        const QueryBlock block = query_block_of(p, t);
        mbar_arrive_expect(sm.q_full, packed_rows(p) * HEAD_DIM * 2);
#pragma unroll 1
        for (int x = 0; x < QK_COLUMNS; x++)
          tma_load(sm.q + x * COLUMN_BYTES, p.q, sm.q_full, x * 64, block.token, block.head, t.b);
      }
    }
    if (t.count == 0) break;
#pragma unroll 1
    for (int i = 0; i < t.count; i++) copy_tile(p, sm, t, leader, i, phases, next);
    iterator.next(t.count);
  }
}

// Which keys of a tile have a page.
struct ExistingKeys {
#if GATHERS_KEYS
  int2 bits;

  DEVICE explicit ExistingKeys(u32 at) : bits(load_shared<int2>(at)) {}
  DEVICE bool all() const { return (bits.x & bits.y) == -1; }
  // Of element i of a row of scores.
  DEVICE bool has(int i) const {
    const int j = column_offset(i);
    return (j < 32 ? bits.x : bits.y) >> (j % 32 + (threadIdx.x & 3) * 2) & 1;
  }
#else
  u32 bits = ~0u;  // one for each copy

  DEVICE explicit ExistingKeys([[maybe_unused]] u32 at) {
#if IS_PAGED
    bits = load_shared<u32>(at);
#endif
  }
  DEVICE bool all() const { return !IS_PAGED || bits == (1u << BLOCK_N / COPY_KEYS) - 1; }
  DEVICE bool has(int i) const { return bits >> (i >> 2) * 8 / COPY_KEYS & 1; }
#endif
};

// Warpgroup w computes the scores of the tiles in buffer w, and columns [w * VALUE_DIM / 2, (w + 1) *
// VALUE_DIM / 2) of the output. Both warpgroups run the same code, which halves the compilation time.
struct MlaConsumer {
  const MlaParams& p;
  const MlaShared& sm;
  const int w, tid, warp, lane, row;  // row: this thread's first row of the block; the second is row + 8
  u32 phase = 0, other_phase = 0;     // of buffer w and of the other
  float s[SCORES], o[OUTPUTS];
  u32 weights[SCORES / 2];
  Softmax<SCORES> softmax;
  int diagonal;  // the end of the keys that the block's first query attends, not clamped

  DEVICE MlaConsumer(const MlaParams& p, const MlaShared& sm, int w)
      : p(p),
        sm(sm),
        w(w),
        tid(threadIdx.x & 127),
        warp(tid >> 5),
        lane(threadIdx.x & 31),
        row(warp * 16 + (lane >> 2)) {}

  DEVICE void begin(const Split& t) {
    const QueryBlock block = query_block_of(p, t);
    diagonal = t.keys - p.Sq + block.token + p.window_right + 1;
    softmax.reset();
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) o[i] = 0.f;
  }

  DEVICE void wait_for_column(int stage, int x, u32 phase) const {
    mbar_wait(sm.column_full(stage, x), phase);
    if (GATHERS_KEYS) fence_async_shared();  // `wgmma` does not see what `cp.async` has written before this
  }

  // This warpgroup's half comes first, since it is copied first.
  DEVICE void score_product() {
    const u32 queries = descriptor_base(sm.q, 16), keys = descriptor_base(sm.tile(w), 16);
#pragma unroll
    for (int i = 0; i < QK_COLUMNS; i++) {
      const int x = i == 2 * HALF ? i : i % HALF + (i < HALF ? w : 1 - w) * HALF,
                at = x * (COLUMN_BYTES / 16);
      wait_for_column(w, x, phase);
      wgmma_fence();
      if (i == 0) wgmma_scores_start(s, queries + at, keys + at);
      else wgmma_scores(s, queries + at, keys + at);
    }
    wgmma_commit();
  }

  DEVICE void own_value_product() {
    const u32 values = descriptor_base(sm.tile(w) + w * HALF * COLUMN_BYTES, COLUMN_BYTES);
    wgmma_fence();
    wgmma_output(o, weights, values);
    wgmma_commit();
  }

  DEVICE void other_value_product() {
    const u32 values = descriptor_base(sm.tile(1 - w) + w * HALF * COLUMN_BYTES, COLUMN_BYTES),
              from = descriptor_base(sm.weights_tile(1 - w), 16);
    wgmma_fence();
    wgmma_other_output(o, from, values);
    wgmma_commit();
  }

  // Converts scores to weights relative to the running max, which may move. Returns whether it did.
  DEVICE bool exponentiate(const Split& t, int tile) {
    const int first = tile * BLOCK_N;
    const ExistingKeys exists(slot_at<PAGES_BYTES>(sm.pages, w));
    if (first + BLOCK_N > min(t.keys, diagonal) || !exists.all()) {
      const int from = first + (lane & 3) * 2;
      const int ends[2] = {diagonal + (int)((u32)row % (u32)p.tokens),
                           diagonal + (int)((u32)(row + 8) % (u32)p.tokens)};
      const int keys0 = min(t.keys, ends[0]) - from, keys1 = min(t.keys, ends[1]) - from;
#pragma unroll
      for (int i = 0; i < SCORES; i++) {
        const int j = column_offset(i);
        if (!(j < (i & 2 ? keys1 : keys0) && exists.has(i))) s[i] = -INFINITE;
      }
    }
    return softmax.make_weights(s, weights, p.scale_log2);
  }

  // Passes the weights and their running max to the other warpgroup. Only this warpgroup reads the column
  // that they overwrite.
  DEVICE void publish_weights() {
    const int r = warp * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i += 4)
      stmatrix_x4(sm.weights_tile(w) + r * 128 + (((i / 2 + (lane >> 4)) ^ (r & 7)) << 4), weights[i],
                  weights[i + 1], weights[i + 2], weights[i + 3]);
    if ((lane & 3) == 0) {
      const u32 at = sm.running_max + (w * ROWS + row) * 4;
      store_shared(at, softmax.max0), store_shared(at + 32, softmax.max1);
    }
    fence_async_shared();
    mbar_arrive(sm.weights_full(w));
  }

  // Waits for the other warpgroup's weights, and takes over its running max.
  DEVICE void wait_for_other_weights() {
    mbar_wait(sm.weights_full(1 - w), other_phase);
#pragma unroll
    for (int x = 0; x < HALF; x++) wait_for_column(1 - w, w * HALF + x, other_phase);
    const u32 at = sm.running_max + ((1 - w) * ROWS + row) * 4;
    const float other_max0 = load_shared<float>(at), other_max1 = load_shared<float>(at + 32);
    if (!__any_sync(~0u, other_max0 != softmax.max0 || other_max1 != softmax.max1)) return;
    softmax.rescale0 = exp2_fast((softmax.max0 - other_max0) * p.scale_log2),
    softmax.rescale1 = exp2_fast((softmax.max1 - other_max1) * p.scale_log2);
    softmax.max0 = other_max0, softmax.max1 = other_max1, softmax.sum0 *= softmax.rescale0,
    softmax.sum1 *= softmax.rescale1;
    softmax.rescale_output(o);
  }

  // Zeroes this warpgroup's half of the values past the last key: that memory is arbitrary, and 0 * NaN is
  // NaN.
  DEVICE void clear_values(const Split& t, int stage, int tile) {
    const int from = t.keys - tile * BLOCK_N;
    if (GATHERS_KEYS || from >= BLOCK_N) return;  // rows that are not gathered are 0
#pragma unroll 1
    for (int i = from * 8 + tid; i < BLOCK_N * 8; i += 128)
#pragma unroll
      for (int x = 0; x < HALF; x++)
        store_shared(sm.tile(stage) + (w * HALF + x) * COLUMN_BYTES + i * 16, make_int4(0, 0, 0, 0));
    fence_async_shared();
    named_barrier_sync(Barrier::WARPGROUP + w, 128);
  }

  // Attends a tile whose scores the other warpgroup computes.
  DEVICE void attend_other_tile(const Split& t, int tile) {
    wait_for_other_weights();
    clear_values(t, 1 - w, tile);
    other_value_product();
    wgmma_wait<0>();
    fence_operand(o);
    mbar_arrive(sm.half_empty(1 - w, w));
    other_phase ^= 1;
  }

  // Accumulates the values of a tile whose scores this warpgroup has computed.
  DEVICE void finish_tile(const Split& t, int tile, bool max_moved) {
    if (max_moved) softmax.rescale_output(o);
    clear_values(t, w, tile);
    own_value_product();
    wgmma_wait<0>();
    fence_operand(o);
    mbar_arrive(sm.half_empty(w, w));
    phase ^= 1;
  }

  // Attends two tiles. Warpgroup 0 computes its scores, then the product with the other's weights; warpgroup
  // 1, whose tile is the later one, runs that product while its own scores become weights. An item may end
  // with a tile of warpgroup 0.
  DEVICE void attend(const Split& t, int i) {
    const int tile = t.tile + i + w;
    const bool scores = i + w < t.count;
    if (scores) {
      score_product();
      if (w) wait_for_other_weights(), other_value_product(), wgmma_wait<1>();
      else wgmma_wait<0>();
      fence_operand(s);
      if (i + 2 >= t.count) mbar_arrive(sm.q_empty);
      const bool max_moved = exponentiate(t, tile);
      publish_weights();
      softmax.fence();
      wgmma_wait<0>();
      fence_operand(o);
      if (w) mbar_arrive(sm.half_empty(0, 1)), other_phase ^= 1;
      finish_tile(t, tile, max_moved);
    } else mbar_arrive(sm.q_empty);
    if (w ? !scores : i + 1 < t.count) attend_other_tile(t, t.tile + i + 1 - w);
  }

  // Writes the normalised output and the LSE; maxima are in log2 units. Each warp stages 32 columns at a time
  // in shared memory for 16-byte stores, since shuffles would need half as many instructions again.
  DEVICE void write(const Split& t, const float (&maxima)[2], const float (&sums)[2]) {
    float inverse[2];
    unsigned short* to[2];
    bool exists[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int out_row =
          finish_packed_row(p, t, row + 8 * r, maxima[r], sums[r], w == 0 && (lane & 3) == 0, inverse[r]);
      exists[r] = out_row >= 0,
      to[r] = p.out + (long long)out_row * VALUE_DIM + w * (VALUE_DIM / 2) + (lane & 3) * 8;
    }
    const u32 at = sm.staged + (threadIdx.x / 32 - 4) * STAGED_BYTES;
    const u32 write_columns = at + (lane & 7) * 64 + ((lane >> 3 ^ lane >> 1) & 3) * 16,
              got = at + (lane >> 2) * 64 + ((lane ^ lane >> 3) & 3) * 16;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 16) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
          x[j] = pack(o[i + 4 * j + 2 * r] * inverse[r], o[i + 4 * j + 2 * r + 1] * inverse[r]);
        stmatrix_x4(write_columns + r * 512, x[0], x[1], x[2], x[3]);
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int4 x = load_shared<int4>(got + r * 512);
        if (exists[r]) *(int4*)(to[r] + i * 2) = x;
      }
      __syncwarp();
    }
  }

  // One bit for each of this warp's rows that has a finite sum but values that are not finite.
  DEVICE u32 unusable_rows(const float (&sums)[2]) const {
    float probe0 = 0.f, probe1 = 0.f;  // NaN where a value is not finite
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      probe0 += 0.f * o[i] + 0.f * o[i + 1];
      probe1 += 0.f * o[i + 2] + 0.f * o[i + 3];
    }
    return vote_rows(probe0 != 0.f && is_finite(sums[0]), probe1 != 0.f && is_finite(sums[1]));
  }

  // Recomputes this warpgroup's half of the columns of unusable rows. Executed by one warp, after its rows
  // have been written.
  DEVICE void replace_rows(const Split& t, u32 unusable) const {
#pragma unroll 1
    for (; unusable; unusable &= unusable - 1)
#pragma unroll 1
      for (int x = 0; x < VALUE_DIM / 2; x += 64)
        replace_columns(p, t, warp * 16 + __ffs(unusable) - 1, w * (VALUE_DIM / 2) + x + lane * 2);
  }

  // Whether no row of this warp exists.
  DEVICE bool is_padding() const { return warp * 16 >= packed_rows(p); }

  // Writes the output of a split, scaled down by powers of two, in the order of `partial_column`.
  DEVICE void write_partial(const Split& t, const int (&exponents)[2]) const {
    if (is_padding()) return;
    u32* to =
        p.partial + ((own_slot(t) * ROWS + row) * VALUE_DIM + w * (VALUE_DIM / 2)) / 2 + (lane & 3) * 4;
    write_halves<0>(o, power_of_two(-exponents[0]), to);
    write_halves<1>(o, power_of_two(-exponents[1]), to + 8 * (VALUE_DIM / 2));
  }

  DEVICE void finish(const Split& t, int parity) {
    softmax.reduce_sums();
    const u32 of_rows = sm.sums + (parity * 2 * ROWS + row) * 4, own = of_rows + w * ROWS * 4,
              other = of_rows + (1 - w) * ROWS * 4;
    if ((lane & 3) == 0) store_shared(own, softmax.sum0), store_shared(own + 32, softmax.sum1);
    named_barrier_arrive(Barrier::SUMS + w, 256);
    int exponents[2];
    if (t.splits > 1) {
      exponents[0] = partial_exponent<0>(o), exponents[1] = partial_exponent<1>(o);
      write_partial(t, exponents);
    }
    named_barrier_sync(Barrier::SUMS + 1 - w, 256);
    const float maxima[2] = {softmax.max0 * p.scale_log2, softmax.max1 * p.scale_log2};
    const float sums[2] = {softmax.sum0 + load_shared<float>(other),
                           softmax.sum1 + load_shared<float>(other + 32)};
    if (t.splits == 1) {
      const u32 unusable = unusable_rows(sums);
      write(t, maxima, sums);
      if (unusable) replace_rows(t, unusable);
      return;
    }
    if ((lane & 3) == 0 && !is_padding())
#pragma unroll
      for (int r = 0; r < 2; r++)  // the weights are scaled down like the output
        p.partial_stats[((own_slot(t) * ROWS + row) + 8 * r) * 2 + w] =
            make_float2(maxima[r] + (float)exponents[r], sums[r] * power_of_two(-exponents[r]));
  }

  DEVICE void run() {
    for (PipelineState<2> items;; items.next()) {
      mbar_wait(sm.q_full, items.stage);
      const u32 at = sm.split_slot(items.stage);
      const Split t = load_split(at);
      if (t.count == 0) break;
      begin(t);
#pragma unroll 1
      for (int i = 0; i < t.count; i += 2) attend(t, i);
      const Split done =
          load_split(sm.split_slot(items.stage));  // loaded again here to save registers until now
      finish(done, items.stage);
    }
  }
};

// Brings the lengths and the page table to the L2 cache. They are read one after the other, and the first
// keys wait for both. All CTAs share the work: each lane prefetches at most one line of each, so that parts
// of very large tables are left out. This runs before the wait for the prior grid, which may still write
// both: its writes go to the L2 cache as well, so that no old values remain there. Executed by one warp.
DEVICE void prefetch_tables([[maybe_unused]] const MlaParams& p) {
  constexpr u32 LINE = 128 / sizeof(int);
  [[maybe_unused]] const u32 i = blockIdx.x * 32 + (threadIdx.x & 31);
#if HAS_KV_LENS
  if (i * LINE < (u32)p.B) prefetch_l2(p.kv_lens + i * LINE);
#endif
#if IS_PAGED
  const u32 pages = (u32)p.Sk / (u32)p.page, lines = (pages + LINE - 1) / LINE, b = i / lines;
  if (b < (u32)p.B) prefetch_l2(p.table + (long long)b * p.table_stride + (i - b * lines) * LINE);
#endif
}

#if ENTRY_mla
extern "C" __global__ void __launch_bounds__(384, 1) mla(const __grid_constant__ MlaParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const MlaShared sm(smem_address(shared));
  if (threadIdx.x == 0) {
    // every thread arrives: racecheck does not accept one arrival per warp
    mbar_init(sm.q_full, 1), mbar_init(sm.q_empty, 256);
#pragma unroll 1
    for (int i = 0; i < 2 * QK_COLUMNS; i++)
      mbar_init(barrier(sm.columns_full, i), GATHERS_KEYS ? GATHERING_WARPS + GATHERED_ARRIVALS : 1);
    for (int i = 0; i < 4; i++) mbar_init(barrier(sm.halves_empty, i), 128);
    for (int i = 0; i < 2; i++) mbar_init(sm.weights_full(i), 128);
    mbar_init_fence();
    prefetch_tensor_map(p.q), prefetch_tensor_map(p.k);
  }
  if (warp_uniform(threadIdx.x / 32) == 1) prefetch_tables(p);
  if (packed_rows(p) < ROWS)  // rows of padding, which no copy writes
    clear_queries(sm.q, TILE_BYTES);
  __syncthreads();
  wait_for_prior_grid(), launch_dependent_grids();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<40>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp < (GATHERS_KEYS ? GATHERING_WARPS : 1)) produce(p, sm, GATHERS_KEYS ? warp : 0);
  } else {
    register_alloc<232>();
    MlaConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
#endif

#if ENTRY_combine
extern "C" __global__ void __launch_bounds__(512) combine(const __grid_constant__ MlaParams p) {
  combine_splits(p);
}
#endif
