// A consumer warpgroup of the 8-bit forward kernel: 64 queries.
//
// The products of a step are T += P(j + 1).V(j + 1) and S(j) = Q.K(j)^T, from which P(j) is computed. With
// three consumers the two products run one after the other, so that P(j + 1) and S(j) share registers, and
// the consumers take turns at the tensor cores: while one waits for its products, the others compute weights.
// With two consumers there are registers to compute the row maxima of S(j) while the product with the values
// runs, and no order is enforced.
//
// Tensor cores accumulate 8-bit products with a precision of about 14 bits. Accumulation is therefore limited
// to SUMMED_BLOCKS blocks, after which the accumulator is added to the totals.
#pragma once
#include "query_slots.cuh"
#include "quantized_epilogue.cuh"
#include "quantized_queries.cuh"
#include "shared_totals.cuh"
#include "wgmma.cuh"

constexpr u32 SUMMED_BLOCKS = SUMMED_KEYS / BLOCK_N;
constexpr bool TAKES_TURNS = CONSUMERS == 3;
// FIRST_BITS is added to the scores after the turn, rather than written to the accumulators during it, so
// that turns are shorter. With up to 64 features this is slower, as `tests.gpu.compare --groups quantized`
// shows: the additions compete with the row maxima for the ALU.
constexpr bool ADDS_FIRST_BITS = IS_INT8 && TAKES_TURNS && HEAD_FEATURES > 64;

struct QuantizedConsumer : QuantizedEpilogue {
  using QuantizedEpilogue::QuantizedEpilogue;
  PipelineState<STAGES> k, v;
  u32 queries;  // the descriptor of this work item's queries
  const KeyScales* key_scales;
  Scores s;
  u32 summed;        // how many blocks these are, the same in all warps
  u32 existing_copies;  // one bit for each copy of the block, set if its page exists
  Weights weights;
  SharedTotals totals;
  KeyRange range0, range1;  // the keys of this thread's two rows
#if HEAD_SCALES
  float head_scale;                 // of the keys
  bool negative[2], some_negative;  // the product of the scales of a row, and that in some row of this warp
#endif

  DEVICE void start_scores() {
#if IS_INT8
    if (ADDS_FIRST_BITS) return;
#pragma unroll
    for (int i = 0; i < SCORES; i++) asm volatile("mov.b32 %0, %1;" : "=r"(s[i]) : "n"(FIRST_BITS));
#endif
  }

  DEVICE void score_product() {
#if IS_PAGED
    existing_copies = load_shared<u32>(slot_at<4>(sm.pages, k.stage));
    __syncwarp();  // all lanes have read the bits before one lane releases the keys
#endif
    const u32 keys = descriptor_base(slot_at<K_BYTES>(sm.k, k.stage), 16);
    wgmma_fence();
    if (IS_INT8 && !ADDS_FIRST_BITS) wgmma_scores(s, queries, keys);
    else wgmma_scores_start(s, queries, keys);
    wgmma_commit();
  }

  DEVICE void value_product() {
    const u32 values = descriptor_base(slot_at<V_BYTES>(sm.v, v.stage), 16);
    wgmma_fence();
    wgmma_output_if(t, weights, values, summed);
    wgmma_commit();
    summed++;
  }

  // Every warp arrives for itself: a warp that waits for the same values again, in a skipped block, must not
  // miss a phase.
  DEVICE void release_values() {
    if (lane == 0) mbar_arrive(barrier(sm.v_empty, v.stage));
    v.next();
  }

  // After the last block of a work item its queries are released as well.
  DEVICE void release_keys(bool is_last) {
    if (lane == 0) mbar_arrive(barrier(sm.k_empty, k.stage));
    k.next();
    if (is_last && !QUANTISES_QUERIES) release_queries();
  }

  DEVICE void release_queries() {
    if (lane == 0) mbar_arrive(barrier(sm.q_empty, query_slot(work, c)));
  }

  // Called once for each block of a tile, including skipped ones.
  DEVICE void take_turn() {
    if (TAKES_TURNS) named_barrier_sync(QuantizedBarriers::TURN + c, 256);
  }
  DEVICE void pass_turn() {
    if (TAKES_TURNS) named_barrier_arrive(QuantizedBarriers::TURN + (c + 1 == CONSUMERS ? 0 : c + 1), 256);
  }

  DEVICE void wait_keys() { mbar_wait(barrier(sm.k_full, k.stage), k.phase); }
  DEVICE void wait_values() { mbar_wait(barrier(sm.v_full, v.stage), v.phase); }

  // Called after a block's product with values: adds `t` to the totals once it covers SUMMED_BLOCKS blocks.
  DEVICE void finish_block() {
    finish_values();
    if (summed == SUMMED_BLOCKS) add_to_totals(), summed = 0;
  }

  DEVICE void add_to_totals() {
    float whole[2] = {sums[0], sums[1]};
    if (!SUMS_BY_PRODUCT)
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)
        whole[0] += __shfl_xor_sync(~0u, whole[0], lanes), whole[1] += __shfl_xor_sync(~0u, whole[1], lanes);
    totals.add(t, whole);
  }

  // Rescales all sums if this warp's maxima have moved.
  DEVICE void rescale() {
    if (!softmax.max_moved) return;
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) t[i] *= softmax.rescale[i >> 1 & 1];
    totals.rescale(softmax.rescale);
    sums[0] *= softmax.rescale[0], sums[1] *= softmax.rescale[1];
  }

  // Adds the row sums in every block: they grow faster than the products with values and would lose more
  // precision in the tensor cores, which therefore start them anew in each block.
  DEVICE void add_row_sums() {
    if (!SUMS_BY_PRODUCT) return;
#pragma unroll
    for (int r = 0; r < 2; r++) sums[r] += t[OUTPUTS + 2 * r], t[OUTPUTS + 2 * r] = 0.f;
  }

  // All operations between the product of the scores and the softmax.
  DEVICE void modify_scores(int block, const BlockRange& n) {
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const float unit = p.tanh_scale * softmax.row_scale[i >> 1 & 1] * softmax.key_scale[i / KEY_SCORES];
      set(s[i], softcap_tanh((as_float(s[i]) - FIRST) * unit));
    }
#elif HEAD_SCALES
    if (some_negative)
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (negative[i >> 1 & 1]) s[i] = -s[i];
#elif HAS_SIGNS
#pragma unroll
    for (int part = 0; part < KEY_SCALES; part++) {
      const bool negative0 = softmax.row_scale[0] * softmax.key_scale[part] < 0.f,
                 negative1 = softmax.row_scale[1] * softmax.key_scale[part] < 0.f;
      if (__any_sync(~0u, negative0 || negative1))
#pragma unroll
        for (int i = part * KEY_SCORES; i < (part + 1) * KEY_SCORES; i++)
          if (i & 2 ? negative1 : negative0) s[i] = -s[i];
    }
#endif
#if IS_PAGED
    if (existing_copies != (1u << BLOCK_N / COPY_KEYS) - 1)
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!(existing_copies & 1u << (i >> 2) * 8 / COPY_KEYS)) set(s[i], -INFINITE);
#endif
    if (block >= n.full_end || block < n.full_begin)
      mask_by_position(s, block * BLOCK_N + (lane & 3) * 2, range0, range1);
  }

  DEVICE void load_key_scale(int block) {
    if (HEAD_SCALES) return;
    const KeyScales x = key_scales[block];
#pragma unroll
    for (int part = 0; part < KEY_SCALES; part++) softmax.key_scale[part] = x.scales[part];
  }

  // Computes the scores of `block`, and the product of the weights of the previous block with their values.
  DEVICE void step(int block, const BlockRange& n) {
    load_key_scale(block);
    if (TAKES_TURNS) step_in_turn(block, n);
    else step_with_both_products(block, n);
  }

  DEVICE void step_in_turn(int block, const BlockRange& n) {
    wait_values();
    take_turn();
    value_product();
    wait_keys();  // during the product
    wgmma_wait<0>();
    fence_operand(t);
    if (summed == SUMMED_BLOCKS) {  // while there are no scores, whose registers it needs
      add_row_sums();
      add_to_totals(), summed = 0;
    }
    start_scores();
    score_product();
    pass_turn();
    release_values();
    add_row_sums();  // adds 0 if the branch above has added them
    wgmma_wait<0>();
    find_max(block, n, summed == 0);
    rescale();  // before the exponentials, so that rounding overlaps with them
    exponentiate();
    add_sums(round_weights());
  }

  DEVICE void step_with_both_products(int block, const BlockRange& n) {
    start_scores();
    wait_keys(), score_product();
    wait_values(), value_product();
    wgmma_wait<1>();
    find_max(block, n, summed == SUMMED_BLOCKS);
    exponentiate();
    fence_operand(s);
    wait_values();  // returns at once; keeps the wait for the product below the maxima
    wgmma_wait<0>();
    fence_operand(weights);
    const float2 added = round_weights();  // first, to free the registers of the scores
    finish_block();
    rescale();
    add_sums(added);
  }

  // Called after all products.
  DEVICE void finish_values() {
    fence_operand(t);
    release_values();
    add_row_sums();
  }

  // Called after the product of the scores. `begins_sum`: the accumulation of weights times values starts
  // from 0, and there are earlier sums.
  DEVICE void find_max(int block, const BlockRange& n, bool begins_sum) {
    fence_operand(s);
    release_keys(block == n.begin);
#if IS_INT8
#pragma unroll
    for (int i = 0; ADDS_FIRST_BITS && i < SCORES; i++) s[i] += FIRST_BITS;
#endif
    modify_scores(block, n);
    if (begins_sum) softmax.update_max_of_sum(p, s, sums);
    else softmax.update_max(p, s);
  }

  DEVICE void exponentiate() { softmax.exponentiate<0>(p, s), softmax.exponentiate<1>(p, s); }

  // Returns this thread's sums of the rounded weights, unless the sums are computed by products.
  DEVICE float2 round_weights() { return {softmax.round<0>(s, weights), softmax.round<1>(s, weights)}; }

  DEVICE void add_sums(const float2& added) {
    if (!SUMS_BY_PRODUCT) sums[0] += added.x, sums[1] += added.y;
  }

  // Reconverges the warps. Without products nothing else does, and the lanes of a warp may diverge under a
  // tool that instruments the kernel: a lane must not release a slot that another lane has not yet seen full,
  // which would then miss a phase. The compiler removes __syncwarp here.
  DEVICE void meet() { named_barrier_sync(QuantizedBarriers::WARPGROUP + c, 128); }

  // Skips blocks of the tile that no row of this consumer attends, from the last to the first.
  DEVICE void skip_blocks(int end, int begin) {
#pragma unroll 1
    for (int j = end - 1; j >= begin; j--) {
      take_turn(), pass_turn();
      wait_keys(), wait_values();
      meet();
      release_keys(false), release_values();
    }
  }

  // The blocks of the tile that some row of this consumer attends.
  DEVICE BlockRange consumer_blocks(const WorkItem& item) const {
    Tile rows = item.tile;
    rows.m0 += c * 64;
    BlockRange n = blocks_of(p, rows, item.keys, 64);
    if (rows.m0 >= queries_of(p, rows) || n.end <= n.begin) n.begin = n.end = item.blocks.begin;
    return n;
  }

  DEVICE void attend(const BlockRange& n) {
    wait_keys();
    load_key_scale(n.end - 1);
    start_scores();
    take_turn();
    score_product();
    finish_scales();
    wgmma_wait<0>();
    pass_turn();
    find_max(n.end - 1, n, false);
    exponentiate();
    add_sums(round_weights());
    summed = 0;
#pragma unroll 1
    for (int j = n.end - 2; j >= n.begin; j--) step(j, n);
    wait_values();
    value_product();
    load_factors();
    wgmma_wait<0>();
    finish_values();
    totals.finish(t);
  }

  // Completes the scales that `begin` has loaded. Called while the first product runs.
  DEVICE void finish_scales() {
    fence_operand(softmax.row_scale);  // the compiler would wait for them before the product
    if (!HAS_SOFTCAP) softmax.row_scale[0] *= p.scale_log2, softmax.row_scale[1] *= p.scale_log2;
#if HEAD_SCALES
    some_negative = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float& scale = softmax.row_scale[r];
      scale *= head_scale;
      negative[r] = scale < 0.f, some_negative |= negative[r];
      if (!HAS_SOFTCAP) scale = QuantizedSoftmax::unit_of(scale);
    }
    some_negative = __any_sync(~0u, some_negative);
    softmax.key_scale[0] = 1.f;
#endif
  }

  // No row of this consumer attends a key.
  DEVICE void skip_item() {
    meet();
    if (!QUANTISES_QUERIES) release_queries();
    load_factors();
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) t[i] = 0.f;
  }

  DEVICE void begin(const WorkItem& item) {
    const Tile& tile = item.tile;
    const int row = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
    range0 = row_range(p, tile, row, item.keys), range1 = row_range(p, tile, row + 8, item.keys);
#if !QUANTISES_QUERIES
    const float* scales = p.q_scale + first_row(p, tile);
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.row_scale[r] = scales[min(row + 8 * r, queries_of(p, tile) - 1)];
#endif
    const float* key_scale = p.k_scale + first_key_scale(p, tile);
#if HEAD_SCALES
    head_scale = *key_scale;
#else
    key_scales = (const KeyScales*)key_scale;
#endif
    softmax.reset();
    sums[0] = sums[1] = 0.f;
    totals.reset(slot_at<TOTAL_BYTES>(sm.totals, c) + tid * 16);
    const int slot = query_slot(work, c);
    // otherwise each step would compute it again
    queries = opaque(descriptor_base(slot_at<Q_BYTES>(sm.q, slot), 16));
    mbar_wait(barrier(sm.q_full, slot), query_phase(work));
#if QUANTISES_QUERIES
    quantize_queries(tile);
#endif
  }

#if QUANTISES_QUERIES
  DEVICE void quantize_queries(const Tile& tile) {
    meet();  // all warps are done with the products of the queries before
    const float* mean = p.mean + (long long)(tile.b * (p.Hq / p.group) + tile.h / p.group) * HEAD_FEATURES;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = (tid >> 5) * 16 + (lane >> 2) + 8 * r;
      RowPart x;
      load_row_part(x, slot_at<RAW_BYTES>(sm.raw, c), row, lane & 3);
      if (p.offset) {  // each lane reads what it writes here
        const float both = product_with_mean(x, mean, lane & 3);
        if (row_of(tile, r) < p.Sq) p.offset[lse_at(tile, r)] = both * p.scale_log2 * LN2;
      }
      softmax.row_scale[r] = quantize_row(x, slot_at<Q_BYTES>(sm.q, c), row, lane & 3);
    }
    release_queries();
    fence_async_shared();
    meet();
  }
#endif

  DEVICE void run() {
    if (c == CONSUMERS - 1) pass_turn();  // consumer 0 has the first turn
    for (;; work.next()) {
      mbar_wait(barrier(sm.work_full, work.stage), work.phase);
      const WorkItem item = load_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage));
      if (item.tile.m0 == NO_WORK) break;
      begin(item);
      const BlockRange n = consumer_blocks(item);
      skip_blocks(item.blocks.end, n.end);
      if (n.end > n.begin) attend(n);
      else skip_item();
      skip_blocks(n.begin, item.blocks.begin);
      finish();
    }
  }
};
