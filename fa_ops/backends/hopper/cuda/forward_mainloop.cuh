// A consumer warpgroup of the forward kernel: 64 queries, in the ping-pong schedule of FlashAttention-3.
//
// One step, over time. The products of a step are S(j) = Q.K(j)^T and O += P(j + 1).V(j + 1), where P(j + 1)
// are the weights computed in the previous step. The consumers share the tensor cores: while one computes its
// softmax, the products of another run.
//
//   named barrier   wait PING_PONG + c ......... signal the next consumer's
//   tensor cores        | S(j)          | O += P(j + 1).V(j + 1)      |  (products of other consumers)
//   CUDA cores      .... dropout hashes | mask | max | exp2 of row 0  | exp2 of row 1 | rescale O | pack P(j)
//   mbarriers       v_full(j + 1)       | release K(j)    k_full(j-1) | release V(j + 1)
#pragma once
#include "forward_epilogue.cuh"
#include "wgmma.cuh"

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
// each block of the tile.
constexpr bool SKIPS_BLOCKS = !HAS_HELPERS;

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

struct ForwardConsumer : EpilogueConsumer {
  using Barrier = ForwardBarriers<CONSUMERS>;
  using EpilogueConsumer::EpilogueConsumer;

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
      softmax.update_max<0>(s, p.scale_log2), softmax.update_max<1>(s, p.scale_log2);
      partial0 = softmax.exponentiate<0>(s, p.scale_log2),
      partial1 = softmax.exponentiate<1>(s, p.scale_log2);
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
    bool max_moved = compares && softmax.update_max<0>(s, p.scale_log2);
    float partial0 = softmax.exponentiate<0>(s, p.scale_log2);
    drop<0>(block);
    if (compares) max_moved |= softmax.update_max<1>(s, p.scale_log2);
    softmax.fence();
    fence_operand(s);
    if (SKIPS_TILES ? !step_is_last(current) : block > n.begin)
      mbar_wait(barrier(sm.k_full, k.stage), k.phase);
    wgmma_wait<0>();
    fence_operand(o);
    release_values();
    float partial1 = softmax.exponentiate<1>(s, p.scale_log2);
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
    softmax.update_max<0>(s, p.scale_log2), softmax.update_max<1>(s, p.scale_log2);
    if (SPECULATES_MAX) max_is_uninitialised = softmax.has_uninitialised_max();
    softmax.add_sums(softmax.exponentiate<0>(s, p.scale_log2), softmax.exponentiate<1>(s, p.scale_log2));
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
