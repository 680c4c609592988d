// Attention forward for sm_90a with up to 512 features. A cluster of two CTAs attends 128 queries, 64 each.
// Each CTA copies half of every block of keys and values to both CTAs by multicast, since with 64 queries per
// read the L2 bandwidth would be exceeded. Within a CTA two consumer warpgroups hold the same 64 queries, and
// half the columns of the output each. They alternate: consumer w computes the scores of blocks w, w + 2, ...
// and passes the weights to the other. Both share one running max per row, which is passed from block to
// block, so that their sums agree. Two warps copy, one K in columns of 64 features and one V in halves of its
// columns, each through a ring of slots.
//
// One step of consumer w, over time. While one consumer computes its softmax, the products of the other run.
//
//   tensor cores   | S(j) = Q.K(j)^T | O += P(j - 1).V(j - 1) | | O += P(j).V(j) |
//   CUDA cores                       | softmax, P(j) to the other consumer |
//
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM KEY_SLOTS VALUE_SLOTS PACKED_HEADS
// RESCALE_THRESHOLD SHARED_BYTES HAS_WINDOW HAS_LEFT HAS_KV_LENS HAS_RANGES HAS_SINKS
#include "forward_rows.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

constexpr int QK_COLUMNS = HEAD_DIM / 64, HALF = VALUE_DIM / 128;  // columns of 64 features; of half a value
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_DIM / 4;
constexpr u32 COLUMN_BYTES = 64 * 128, HALF_BYTES = HALF * COLUMN_BYTES;
constexpr int CTA_KEYS = BLOCK_N / 2;  // keys of a block that each CTA of the cluster copies

// The named barriers. Barrier 0 is that of __syncthreads.
struct Barrier {
  enum : u32 {
    WARPGROUP = 1,  // one per consumer, for its 128 threads
    SUMS = 3,       // the row sums of both consumers are in shared memory
    SCORES = 4,     // consumer w waits at SCORES + w until the other has issued its scores
  };
};

static_assert(BLOCK_M == 128 && BLOCK_N == 64 && PACKED_HEADS == 1, "64 rows of a CTA, and 64 keys");

// Offsets in shared memory, in order. Barriers have one mbarrier for each slot.
struct WideShared {
  u32 q, k, v;
  u32 weights;      // per consumer, of its last block
  u32 running_max;  // per consumer, of the same block
  u32 sums;         // per consumer
  u32 q_full, k_full, k_empty, v_full, v_empty, weights_full, weights_empty;
  u32 end;

  DEVICE constexpr explicit WideShared(u32 base)
      : q(base),
        k(q + QK_COLUMNS * COLUMN_BYTES),
        v(k + KEY_SLOTS * COLUMN_BYTES),
        weights(v + VALUE_SLOTS * HALF_BYTES),
        running_max(weights + 2 * COLUMN_BYTES),
        sums(running_max + 2 * 64 * 4),
        q_full(sums + 2 * 64 * 4),
        k_full(q_full + 8),
        k_empty(k_full + 8 * KEY_SLOTS),
        v_full(k_empty + 8 * KEY_SLOTS),
        v_empty(v_full + 8 * VALUE_SLOTS),
        weights_full(v_empty + 8 * VALUE_SLOTS),
        weights_empty(weights_full + 8 * 2),
        end(weights_empty + 8 * 2) {}
};
constexpr WideShared LAYOUT(0);
static_assert(LAYOUT.end <= SHARED_BYTES && SHARED_BYTES < LAYOUT.end + 16,
              "SHARED_BYTES is the layout's size");

DEVICE void init_barriers(const WideShared& sm) {
  mbar_init(sm.q_full, 1);
  for (int i = 0; i < KEY_SLOTS; i++)  // one warpgroup of each CTA reads what is sent to both
    mbar_init(barrier(sm.k_full, i), 1), mbar_init(barrier(sm.k_empty, i), 8);
  for (int i = 0; i < VALUE_SLOTS; i++)
    mbar_init(barrier(sm.v_full, i), 1), mbar_init(barrier(sm.v_empty, i), 8);
  for (int i = 0; i < 2; i++)
    mbar_init(barrier(sm.weights_full, i), 128), mbar_init(barrier(sm.weights_empty, i), 128);
  mbar_init_fence();
}

// The tile of a cluster and its blocks, which are visited from the last to the first.
struct WideWork {
  Tile tile;
  int keys, rank;  // rank: of the CTA in its cluster
  BlockRange n;

  DEVICE int steps() const { return n.end - n.begin; }
  DEVICE int block(int step) const { return n.end - 1 - step; }
  DEVICE int row0() const { return tile.m0 + rank * 64; }
};

DEVICE WideWork work_of(const ForwardParams& p) {
  WideWork work;
  work.rank = cta_rank();
  Cursor at;
  work.tile = tile_at(p, blockIdx.x >> 1, at);
  work.keys = keys_of(p, work.tile.b);
  work.n = blocks_of(p, work.tile, work.keys);
  return work;
}

// Executed by one thread.
DEVICE void copy_keys(const ForwardParams& p, const WideShared& sm, const WideWork& work) {
  const int h = work.tile.h / p.group;
  mbar_arrive_expect(sm.q_full, QK_COLUMNS * COLUMN_BYTES);
#pragma unroll 1
  for (int x = 0; x < QK_COLUMNS; x++)
    tma_load(sm.q + x * COLUMN_BYTES, p.q, sm.q_full, x * 64, work.row0(), work.tile.h, work.tile.b);
  PipelineState<KEY_SLOTS> k;
#pragma unroll 1
  for (int j = 0; j < work.steps(); j++)
#pragma unroll 1
    for (int x = 0; x < QK_COLUMNS; x++, k.next()) {
      const u32 full = barrier(sm.k_full, k.stage);
      mbar_wait(barrier(sm.k_empty, k.stage), k.phase ^ 1);
      mbar_arrive_expect(full, COLUMN_BYTES);
      tma_load_multicast(slot_at<COLUMN_BYTES>(sm.k, k.stage) + work.rank * CTA_KEYS * 128, p.k, full, x * 64,
                         work.block(j) * BLOCK_N + work.rank * CTA_KEYS, h, work.tile.b);
    }
}

// Copies V. The first half of a block is the one of the consumer that computes its scores. Executed by one
// thread.
DEVICE void copy_values(const ForwardParams& p, const WideShared& sm, const WideWork& work) {
  const int h = work.tile.h / p.group;
  PipelineState<VALUE_SLOTS> v;
#pragma unroll 1
  for (int i = 0; i < 2 * work.steps(); i++, v.next()) {
    const int j = i >> 1, half = (i ^ j) & 1;
    const u32 full = barrier(sm.v_full, v.stage),
              to = slot_at<HALF_BYTES>(sm.v, v.stage) + work.rank * CTA_KEYS * 128;
    mbar_wait(barrier(sm.v_empty, v.stage), v.phase ^ 1);
    mbar_arrive_expect(full, HALF_BYTES);
#pragma unroll
    for (int x = 0; x < HALF; x++)
      tma_load_multicast(to + x * COLUMN_BYTES, p.v, full, (half * HALF + x) * 64,
                         work.block(j) * BLOCK_N + work.rank * CTA_KEYS, h, work.tile.b);
  }
}

struct WideConsumer {
  const ForwardParams& p;
  const WideShared& sm;
  const WideWork& work;
  const int w, warp, lane, row;  // row: this thread's first of the CTA's 64; the second is row + 8
  PipelineState<KEY_SLOTS> k;
  float s[SCORES], o[OUTPUTS];
  u32 weights[SCORES / 2];
  Softmax<SCORES> softmax;
  KeyRange range0, range1;  // the keys of this thread's two rows
  int full_begin, full_end;  // blocks of which every row of the CTA attends every key

  DEVICE WideConsumer(const ForwardParams& p, const WideShared& sm, const WideWork& work, int w)
      : p(p),
        sm(sm),
        work(work),
        w(w),
        warp(threadIdx.x / 32 & 3),
        lane(threadIdx.x & 31),
        row(warp * 16 + (lane >> 2)) {
    Tile rows = work.tile;
    rows.m0 = work.row0();
    const BlockRange own = blocks_of(p, rows, work.keys, 64);
    const bool exists = rows.m0 < p.Sq;
    full_begin = exists ? own.full_begin : 0, full_end = exists ? own.full_end : 0;
    range0 = row_range(p, rows, rows.m0 + row, work.keys),
    range1 = row_range(p, rows, rows.m0 + row + 8, work.keys);
  }

  // A slot has been read, in this CTA as far as this warp goes.
  DEVICE void release(u32 empty) {
    if (lane < 2) mbar_arrive_at(empty, lane);
  }

  DEVICE void advance_keys(int columns) {
    k.stage += columns % KEY_SLOTS, k.phase ^= columns / KEY_SLOTS & 1;
    if (k.stage >= KEY_SLOTS) k.stage -= KEY_SLOTS, k.phase ^= 1;
  }

  // Issues the product of the scores. Each column is released when the next one's product has started.
  DEVICE void score_product() {
    const u32 queries = cluster_descriptor(sm.q, 16);
    u32 last = 0;
#pragma unroll
    for (int x = 0; x < QK_COLUMNS; x++) {
      mbar_wait(barrier(sm.k_full, k.stage), k.phase);
      const u32 keys = cluster_descriptor(slot_at<COLUMN_BYTES>(sm.k, k.stage), 16);
      wgmma_fence();
      if (x == 0) wgmma_scores_start(s, queries, keys);
      else wgmma_scores(s, queries + x * (COLUMN_BYTES / 16), keys);
      wgmma_commit();
      if (x > 0) wgmma_wait<1>(), release(last);
      last = barrier(sm.k_empty, k.stage);
      advance_keys(1);
    }
  }
  DEVICE u32 last_key_slot() const { return barrier(sm.k_empty, k.stage ? k.stage - 1 : KEY_SLOTS - 1); }

  // The slot with this consumer's half of the values of step j.
  DEVICE u32 value_item(int j) const { return 2 * j + ((j ^ w) & 1); }
  DEVICE u32 value_slot(int j) const { return slot_at<HALF_BYTES>(sm.v, value_item(j) % VALUE_SLOTS); }
  DEVICE u32 value_empty(int j) const { return barrier(sm.v_empty, value_item(j) % VALUE_SLOTS); }

  DEVICE void wait_values(int j) {
    const u32 item = value_item(j);
    mbar_wait(barrier(sm.v_full, item % VALUE_SLOTS), item / VALUE_SLOTS & 1);
#if HAS_KV_LENS || HAS_RANGES
    const int block = work.block(j);
    if (work.n.key_end < min((block + 1) * BLOCK_N, p.Sk))
      clear_values(value_slot(j), work.n.key_end - block * BLOCK_N);
#endif
  }

  // Zeroes the values past the last attended key: that memory is arbitrary, and 0 * NaN is NaN.
  DEVICE void clear_values(u32 values, int from) {
#pragma unroll 1
    for (int i = from * 8 + (int)(threadIdx.x & 127); i < BLOCK_N * 8; i += 128)
#pragma unroll
      for (int x = 0; x < HALF; x++) store_shared(values + x * COLUMN_BYTES + i * 16, make_int4(0, 0, 0, 0));
    fence_async_shared();
    named_barrier_sync(Barrier::WARPGROUP + w, 128);
  }

  DEVICE void own_value_product(int j) {
    wgmma_fence();
    wgmma_output(o, weights, cluster_descriptor(value_slot(j), COLUMN_BYTES));
    wgmma_commit();
  }

  DEVICE void other_value_product(int j) {
    wgmma_fence();
    wgmma_other_output(o, cluster_descriptor(slot_at<COLUMN_BYTES>(sm.weights, 1 - w), 16),
                       cluster_descriptor(value_slot(j), COLUMN_BYTES));
    wgmma_commit();
  }

  DEVICE void mask_scores(int block) {
    if (block >= full_end || block < full_begin)
      mask_by_position(s, block * BLOCK_N + (lane & 3) * 2, range0, range1);
  }

  // Passes the weights of step j and their running max to the other consumer.
  DEVICE void publish_weights(int j) {
    mbar_wait(barrier(sm.weights_empty, w), j >> 1 & 1 ^ 1);
    const int r = warp * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i += 4)
      stmatrix_x4(slot_at<COLUMN_BYTES>(sm.weights, w) + r * 128 + (((i / 2 + (lane >> 4)) ^ (r & 7)) << 4),
                  weights[i], weights[i + 1], weights[i + 2], weights[i + 3]);
    if ((lane & 3) == 0) {
      const u32 at = sm.running_max + (w * 64 + row) * 4;
      store_shared(at, softmax.max0), store_shared(at + 32, softmax.max1);
    }
    fence_async_shared();
    mbar_arrive(barrier(sm.weights_full, w));
  }

  // Waits for the other consumer's weights of step j, and takes over its running max.
  DEVICE void wait_for_other_weights(int j) {
    mbar_wait(barrier(sm.weights_full, 1 - w), j >> 1 & 1);
    const u32 at = sm.running_max + ((1 - w) * 64 + row) * 4;
    const float other_max0 = load_shared<float>(at), other_max1 = load_shared<float>(at + 32);
    if (!__any_sync(~0u, other_max0 != softmax.max0 || other_max1 != softmax.max1)) return;
    softmax.rescale0 = exp2_fast((softmax.max0 - other_max0) * p.scale_log2),
    softmax.rescale1 = exp2_fast((softmax.max1 - other_max1) * p.scale_log2);
    softmax.max0 = other_max0, softmax.max1 = other_max1;
    softmax.rescale_sums();
    softmax.rescale_output(o);
  }

  DEVICE void begin_other_step(int j) {
    wait_for_other_weights(j);
    wait_values(j);
    other_value_product(j);
  }
  DEVICE void release_other_step(int j) {
    release(value_empty(j));
    mbar_arrive(barrier(sm.weights_empty, 1 - w));
  }

  // A step whose scores this consumer computes. The product with the other consumer's last weights runs while
  // its own scores become weights. The products of scores are issued in order, also because the parity of a
  // slot's phase is only meaningful once the previous keys have arrived in it.
  DEVICE void step(int j) {
    if (j > 0) named_barrier_sync(Barrier::SCORES + w, 256);
    score_product();
    if (j + 1 < work.steps()) named_barrier_arrive(Barrier::SCORES + 1 - w, 256);
    const u32 last = last_key_slot();
    advance_keys(QK_COLUMNS);  // the keys of the other consumer's block
    if (j > 0) begin_other_step(j - 1), wgmma_wait<1>();
    else wgmma_wait<0>();
    fence_operand(s);
    release(last);
    mask_scores(work.block(j));
    const bool max_moved = softmax.make_weights(s, weights, p.scale_log2);
    publish_weights(j);
    softmax.fence();
    wgmma_wait<0>();
    fence_operand(o);
    if (j > 0) release_other_step(j - 1);
    if (max_moved) softmax.rescale_output(o);
    wait_values(j);
    own_value_product(j);
    wgmma_wait<0>();
    fence_operand(o);
    release(value_empty(j));
  }

  DEVICE void run() {
    softmax.reset();
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) o[i] = 0.f;
    const int steps = work.steps();
    if (steps > 0) {
      mbar_wait(sm.q_full, 0);
      if (w) advance_keys(QK_COLUMNS);
#pragma unroll 1
      for (int j = w; j < steps; j += 2) step(j);
      if ((steps - 1 & 1) != w) {
        begin_other_step(steps - 1);
        wgmma_wait<0>();
        fence_operand(o);
        release_other_step(steps - 1);
      }
    }
    finish();
  }

  // Adds the other consumer's part to the sums of this thread's rows.
  DEVICE void exchange_sums() {
    softmax.reduce_sums();
    const u32 own = sm.sums + (w * 64 + row) * 4, other = sm.sums + ((1 - w) * 64 + row) * 4;
    if ((lane & 3) == 0) store_shared(own, softmax.sum0), store_shared(own + 32, softmax.sum1);
    named_barrier_sync(Barrier::SUMS, 256);
    softmax.sum0 += load_shared<float>(other), softmax.sum1 += load_shared<float>(other + 32);
  }

  // Writes this consumer's half of the normalised output, and consumer 0 the LSE.
  DEVICE void finish() {
    exchange_sums();
    const int first = work.row0() + row;
    u32 probes[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int out_row = first + 8 * r;
      float inverse;
      const float lse = finish_row(p, work.tile, r ? softmax.max1 : softmax.max0,
                                   r ? softmax.sum1 : softmax.sum0, inverse);
      const bool exists = out_row < p.Sq;
      if (w == 0 && (lane & 3) == 0 && p.lse && exists) write_lse(p, work.tile, out_row, lse);
      Element* to = output_row(p, work.tile, out_row);
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 16) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          x[j] = pack(o[i + 4 * j] * inverse, o[i + 4 * j + 1] * inverse);
          add_times_zero(probes[r], x[j]);
        }
        transpose_quad(x);
        const int column = w * (VALUE_DIM / 2) + (i / 4 + (lane & 3)) * 8;
        if (exists && column < p.Dv) *(uint4*)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
    const bool overflowed0 = has_overflowed(p, softmax.max0, softmax.sum0),
               overflowed1 = has_overflowed(p, softmax.max1, softmax.sum1);
    const u32 unusable = vote_rows(overflowed0 || probes[0], overflowed1 || probes[1]);
    const int top = work.row0() + warp * 16;
    const u32 existing = (1u << warp_uniform(max(0, min(16, p.Sq - top)))) - 1;
    if (unusable & existing)
      replace_rows(p, work.tile, top, unusable & existing, vote_rows(overflowed0, overflowed1),
                   w * (VALUE_DIM / 2), (w + 1) * (VALUE_DIM / 2));
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    forward_wide(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WideShared sm(smem_address(shared));
  if (threadIdx.x == 0) init_barriers(sm);
  cluster_sync();  // both CTAs' barriers are initialised
  const WideWork work = work_of(p);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32);
  if (warpgroup == 0) {
    register_dealloc<40>();
    if (work.steps() > 0) {
      if (warp == 0 && elect_one()) copy_keys(p, sm, work);
      if (warp == 1 && elect_one()) copy_values(p, sm, work);
    }
    __syncwarp();
  } else {
    register_alloc<232>();
    WideConsumer consumer(p, sm, work, warpgroup - 1);
    consumer.run();
    __syncwarp();
  }
  cluster_sync();  // a CTA must not exit while the other still writes to its shared memory
}
