// A consumer warpgroup of the forward kernel with 8-bit products: 64 queries.
//
// A block of keys is two halves, a and b, whose scores have registers of their own: while the weights of one
// half are made, tensor cores compute with the other. One step of the loop, over time:
//
//   tensor cores   | Sa(j - 1)  Oj = Pa(j).V(j)  | Sb(j - 1)  Oj += Pb(j).V(j)        |
//   CUDA cores     | exp2 of Sb(j), pack Pb(j)   | max of S(j - 1), exp2 of Sa(j - 1) | pack, O += Oj
//   mbarriers      k_full(j - 1), v_full(j)        release K(j - 1)                     release V(j)
//
// Tensor cores add 8-bit products with about 14 bits, so no sum of theirs is longer than a block: each
// block's product with the values is added to the output in float32.
#pragma once
#include "quantized_epilogue.cuh"
#include "wgmma.cuh"

struct QuantizedConsumer : QuantizedEpilogue {
  using QuantizedEpilogue::QuantizedEpilogue;
  PipelineState<STAGES> k, v;
  u32 queries;  // this work item's, as a descriptor
  const float2* key_scales;
  HalfScores sa, sb;
  float wa[HALF_SCORES];  // weights of the first half
  float t[PRODUCTS];      // of one block: its part of the output, and of the row sums
  u32 weights_a[HALF_SCORES / 4], weights_b[HALF_SCORES / 4];
  KeyRange range0, range1;  // of this thread's two rows

  template <int HALF> DEVICE void score_product(HalfScores& s) {
    const u32 keys = descriptor_base(slot_at<K_BYTES>(sm.k, k.stage) + HALF * 64 * 128, 16);
#if IS_INT8
#pragma unroll
    for (int i = 0; i < HALF_SCORES; i++) asm volatile("mov.b32 %0, %1;" : "=r"(s[i]) : "n"(FIRST_BITS));
    wgmma_fence();
    wgmma_scores(s, queries, keys);
#else
    wgmma_fence();
    wgmma_scores_start(s, queries, keys);
#endif
    wgmma_commit();
  }

  template <int HALF> DEVICE void value_product(const u32 (&weights)[HALF_SCORES / 4]) {
    const u32 values = descriptor_base(slot_at<V_BYTES>(sm.v, v.stage) + HALF * 64, 16);
    wgmma_fence();
    if (HALF == 0) wgmma_output_start(t, weights, values);
    else wgmma_output(t, weights, values);
    wgmma_commit();
  }

  // Every warp releases for itself: one that waits for values another time, for dropout or in a block that is
  // skipped, must not find the phase after the next.
  DEVICE void release_values() {
    if (lane == 0) mbar_arrive(barrier(sm.v_empty, v.stage));
    v.next();
  }

  // After the last block of a work item nothing reads its queries, and the next item's may be copied.
  DEVICE void release_keys(bool is_last) {
    if (lane == 0) mbar_arrive(barrier(sm.k_empty, k.stage));
    k.next();
    if (is_last) release_queries();
  }

  DEVICE void release_queries() {
    if (lane == 0) mbar_arrive(barrier(sm.q_empty, c));
  }

  DEVICE void wait_keys() { mbar_wait(barrier(sm.k_full, k.stage), k.phase); }
  DEVICE void wait_values() { mbar_wait(barrier(sm.v_full, v.stage), v.phase); }

  // Adds the products of a block to the output, and rescales both to the maxima of the block after it.
  DEVICE void add_products() {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) o[i] += t[i];
    sums[0] += t[OUTPUTS], sums[1] += t[OUTPUTS + 2];
    if (softmax.max_moved) {
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) o[i] *= softmax.rescale[i >> 1 & 1];
      sums[0] *= softmax.rescale[0], sums[1] *= softmax.rescale[1];
    }
  }

  // Everything between the product of the scores and the softmax, for one half of the keys.
  template <int HALF> DEVICE void modify_scores(HalfScores& s, int block, const BlockRange& n) {
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < HALF_SCORES; i++) {
      const float unit = p.tanh_scale * softmax.row_scale[i >> 1 & 1] * softmax.key_scale[HALF];
      set(s[i], softcap_tanh((as_float(s[i]) - FIRST) * unit));
    }
#elif HAS_SIGNS
    const bool negative0 = softmax.row_scale[0] * softmax.key_scale[HALF] < 0.f,
               negative1 = softmax.row_scale[1] * softmax.key_scale[HALF] < 0.f;
    if (__any_sync(~0u, negative0 || negative1))
#pragma unroll
      for (int i = 0; i < HALF_SCORES; i++)
        if (i & 2 ? negative1 : negative0) s[i] = -s[i];
#endif
    if (block >= n.full_end || block < n.full_begin) {
      const int from = block * BLOCK_N + HALF * 64 + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < HALF_SCORES; i++) {
        const int j = column_offset(i);
        const KeyRange r = i & 2 ? range1 : range0;
        bool keep = j < r.end - from;
        if (HAS_LEFT) keep = keep && j >= r.begin - from;
        if (!keep) set(s[i], -INFINITE);
      }
    }
  }

  DEVICE void load_key_scale(int block) {
    const float2 x = key_scales[block];
    softmax.key_scale[0] = x.x, softmax.key_scale[1] = x.y;
  }

  // Starts both products of a block with its values, and makes the weights of its second half in between.
  // With HAS_NEXT, half of the next block's scores are computed before each of the two.
  template <bool HAS_NEXT> DEVICE void multiply_values() {
    if (HAS_NEXT) {
      wait_keys();
      score_product<0>(sa);
    }
    wait_values();
    value_product<0>(weights_a);
    float wb[HALF_SCORES];
    softmax.exponentiate<0, 1>(p, sb, wb), softmax.exponentiate<1, 1>(p, sb, wb);
    pack_weights(weights_b, wb);
    fence_operand(weights_b);
    if (HAS_NEXT) score_product<1>(sb);
    value_product<1>(weights_b);
  }

  // From the scores of a block to its maxima and the weights of its first half. PENDING products with values
  // follow the last one of the scores; as many and one more, the first one.
  template <int PENDING> DEVICE void weigh(int block, const BlockRange& n) {
    load_key_scale(block);
    wgmma_wait<PENDING ? PENDING + 2 : 0>();
    fence_operand(sa);
    modify_scores<0>(sa, block, n);
    softmax.find_max<0, 0>(p, sa), softmax.find_max<1, 0>(p, sa);
    wgmma_wait<PENDING>();
    fence_operand(sb);
    release_keys(block == n.begin);
    modify_scores<1>(sb, block, n);
    softmax.find_max<0, 1>(p, sb), softmax.find_max<1, 1>(p, sb);
    softmax.update_max();
    softmax.exponentiate<0, 0>(p, sa, wa), softmax.exponentiate<1, 0>(p, sa, wa);
  }

  // Skips blocks of the tile that no row of this consumer attends, from the last to the first.
  DEVICE void skip_blocks(int end, int begin) {
#pragma unroll 1
    for (int j = end - 1; j >= begin; j--) {
      wait_keys();
      release_keys(false);
      wait_values();
      release_values();
    }
  }

  // The blocks of the tile that some row of this consumer attends.
  DEVICE BlockRange consumer_blocks(const WorkItem& item) const {
    Tile rows = item.tile;
    rows.m0 += c * 64;
    BlockRange n = blocks_of(p, rows, item.keys, 64);
    if (rows.m0 >= p.Sq || n.end <= n.begin) n.begin = n.end = item.blocks.begin;
    return n;
  }

  DEVICE void attend(const BlockRange& n) {
    wait_keys();
    score_product<0>(sa), score_product<1>(sb);
    weigh<0>(n.end - 1, n);
    pack_weights(weights_a, wa);
    fence_operand(weights_a);
#pragma unroll 1
    for (int j = n.end - 2; j >= n.begin; j--) {
      multiply_values<true>();
      weigh<1>(j, n);
      wgmma_wait<0>();
      fence_operand(t);
      release_values();
      pack_weights(weights_a, wa);
      fence_operand(weights_a);
      add_products();
    }
    multiply_values<false>();
    wgmma_wait<0>();
    fence_operand(t);
    release_values();
    softmax.max_moved = false;
    add_products();
  }

  DEVICE void begin(const WorkItem& item) {
    const Tile& tile = item.tile;
    const int row = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
    range0 = row_range(p, tile, row, item.keys), range1 = row_range(p, tile, row + 8, item.keys);
    const float* scales = p.q_scale + (long long)(tile.b * p.Hq + tile.h) * p.Sq;
#pragma unroll
    for (int r = 0; r < 2; r++)
      softmax.row_scale[r] = scales[min(row + 8 * r, p.Sq - 1)] * (HAS_SOFTCAP ? 1.f : p.scale_log2);
    const long long head = tile.b * (p.Hq / p.group) + tile.h / p.group;
    key_scales = (const float2*)p.k_scale + head * ((p.Sk + BLOCK_N - 1) / BLOCK_N);
    softmax.reset();
    sums[0] = sums[1] = 0.f;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) o[i] = 0.f;
    queries = opaque(descriptor_base(slot_at<Q_BYTES>(sm.q, c), 16));  // or each step would compute it again
    mbar_wait(barrier(sm.q_full, c), query_phase(work));
  }

  DEVICE void run() {
    for (;; work.next()) {
      mbar_wait(barrier(sm.work_full, work.stage), work.phase);
      const WorkItem item = load_work_item(slot_at<WORK_ITEM_BYTES>(sm.work, work.stage));
      if (item.tile.m0 == NO_WORK) break;
      begin(item);
      const BlockRange n = consumer_blocks(item);
      skip_blocks(item.blocks.end, n.end);
      if (n.end > n.begin) attend(n);
      else release_queries();
      skip_blocks(n.begin, item.blocks.begin);
      finish();
    }
  }
};
