// Attention backward in one pass, after FlashAttention-3. Persistent CTAs process one block of keys at a
// time. The keys of the next block are copied while the gradients of the current one are written or, with two
// KEY_SLOTS, while its queries are processed. Warpgroup 0 is the producer. Each consumer owns 64 keys and
// keeps their dK and dV in registers while it iterates over the queries of a group of heads. Scores are
// computed transposed, so that the weights and their gradients, as they leave the accumulators, are the
// register operand of the next product.
//
// dQ is a sum over all keys of the block. Both consumers store their dS in shared memory; each multiplies it
// with its half of K's columns and adds the result to global memory in fp32, directly from registers, since
// the shared memory bandwidth is exhausted. A half must not span two columns of 64 features. Where it would,
// the consumers compute whole blocks of dQ alternately (ALTERNATES). The product for dQ is delayed by one
// step, so that the consumers wait for each other only if they are a full step apart. The order of the
// additions is not fixed, except with WHOLE_HEADS. Without ADDS_DQ, backward_queries.cu computes dQ.
//
// One step of a consumer, over time, for block m of the queries. dQ is that of the previous step; the other
// consumer's dS is awaited before it.
//
//   tensor cores    | S(m) | dP(m) |         | dV += P(m).dO(m) | dQ = dS(m - 1)^T.K | dK += dS(m).Q(m)
//   CUDA cores      .......| P(m)            | dS(m) = P (dP - delta) | store dS(m)  | add dQ to memory
//   named barriers  ................................. wait DS_STORED(m - 1) .... signal DS_STORED(m)
//   mbarriers       q_full(m)  do_full(m) ..................................... release Q(m) and dO(m)
//
// With WHOLE_HEADS no other CTA writes gradients of the same head, and at the end the consumers recompute the
// rows that are not finite. With SUMS_ROWS they first compute the row sums of their heads, in place of the
// `preprocess` kernel, so that the backward pass is a single launch.
#include "key_consumer.cuh"
#if WHOLE_HEADS
#include "backward_rows.cuh"
#endif

constexpr int QUERY_GRADS = ALTERNATES ? HEAD_FEATURES / 2 : BLOCK_M * SUM_FEATURES / 256;
constexpr bool SPLITS_ROWS = BLOCK_M == 128;  // a consumer computes dQ of 64 queries
constexpr bool SPLITS_COLUMNS = !(SPLITS_ROWS || ALTERNATES);  // a consumer computes half the columns of dQ
// padding columns at the end of the second half
constexpr int UNUSED_GRADS = SPLITS_COLUMNS ? (SUM_FEATURES - HEAD_FEATURES) / 2 : 0;
constexpr int GRADS = HEAD_FEATURES / 2;
constexpr u32 DS_BYTES = BLOCK_N * BLOCK_M * 2;
static_assert(BLOCK_N == 64 * CONSUMERS && VALUE_FEATURES == HEAD_FEATURES, "halves of the head dim");
static_assert(HEAD_DIM <= 2 * BLOCK_M, "dK leaves by two buffers of gradients of scores");
static_assert(KEY_SLOTS == 1 || (ADDS_DQ && !ALTERNATES), "dK and dV leave through a place of their own");
static_assert(!WHOLE_HEADS || (ADDS_DQ && !SPLITS_GROUP && !ALTERNATES), "a thread reads its own sums of dQ");

DEVICE u32 kv_empty(const BackwardShared& sm, int slot) { return barrier(sm.extra, slot); }

// Publishes a tile, with the phase of `kv_full` for the tile after it.
DEVICE void store_key_tile(const BackwardShared& sm, const KeyTile& t, int slot, u32 phase) {
  const u32 to = slot_at<32>(sm.tile, slot);
  store_shared(to, make_int4(t.n0, t.part, t.b, t.keys));
  store_shared(to + 16, make_int4(t.first, t.last, phase, 0));
}

DEVICE u32 phase_after(const BackwardShared& sm, int slot) {
  return load_shared<u32>(slot_at<32>(sm.tile, slot) + 24);
}

DEVICE KeyTile load_key_tile(const BackwardShared& sm, int slot) {
  const u32 from = slot_at<32>(sm.tile, slot);
  const int4 x = load_shared<int4>(from), y = load_shared<int4>(from + 16);
  return {warp_uniform(x.x), warp_uniform(x.y), warp_uniform(x.z),
          warp_uniform(x.w), warp_uniform(y.x), warp_uniform(y.y)};
}

#if WHOLE_HEADS
// Recomputes rows that are not finite. Executed by all consumers, if a gradient of this CTA's heads is not
// finite.
DEVICE void recompute_own_rows(const BackwardParams& p) {
  if (!SUMS_ROWS) wait_for_prior_grid();
#pragma unroll 1
  for (int part = blockIdx.x; part < p.B * p.Hkv; part += gridDim.x) {
    const int b = part / p.Hkv, h = part - b * p.Hkv;
#pragma unroll 1
    for (int i = 0; i < p.group + 2; i++) {
      const int tensor = i < p.group ? DQ : i == p.group ? DK : DV;
      recompute_rows(p, tensor, 0, tensor == DQ ? p.Sq : p.Sk, tensor == DQ ? h * p.group + i : h, b);
    }
  }
}
#endif

// Writes dQ of 64 queries, from column `first` on; `row` is this thread's first query.
template <int COUNT>
DEVICE void write_query_rows(const BackwardParams& p, const float (&x)[COUNT], int b, int h, int row,
                             int first) {
  Element* const to = (Element*)row_at(p.tensors[DQ], p.strides[DQ], b, h, row);
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 2 * r; i < COUNT; i += 16) {
      u32 y[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int e = i + 4 * j;
        y[j] = e < COUNT ? pack(x[e] * p.scale, x[e + 1] * p.scale) : 0;
      }
      transpose_quad(y);
      const int column = first + (i / 4 + (threadIdx.x & 3)) * 8;
      if (row + 8 * r < p.Sq && column < p.D)
        *(uint4*)(to + 8 * r * p.strides[DQ].s + column) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

struct BackwardConsumer : KeyConsumerBase {
  const int c;
  // The block of queries of the previous step, counted over all heads, or -1 if this consumer does not
  // compute dQ of it. With ALTERNATES it computes the blocks whose dS is in buffer `c`.
  int previous = -1;
  float dq[QUERY_GRADS];
  u32 buffer = 0;
  // The slot of this tile's keys, and the slot of the keys of the previous step.
  int slot = 0, previous_slot = 0;
  float s[SCORES], dp[SCORES], dk[GRADS], dv[GRADS];
  u32 w[SCORES / 2], ds[SCORES / 2];

  DEVICE BackwardConsumer(const BackwardParams& p, const BackwardShared& sm, int c)
      : KeyConsumerBase(p, sm, {}, c * 64), c(c) {}

  // dQ is added to fp32 sums in global memory, in accumulator order, which `postprocess` converts to rows.

  // The address of this thread's first sum of a block of queries.
  DEVICE float* sums_of(long long block) const {
    const int half = ALTERNATES ? 0 : c;
    return p.sums + block * (BLOCK_M * SUM_FEATURES) + opaque(half * 128 * QUERY_GRADS + tid * 4);
  }

#if WHOLE_HEADS
  // The first block of keys stores the sums, so that they need not be zeroed, and the last one writes the
  // final rows. Each thread reads only what it wrote itself. The sums of consecutive heads of a CTA share
  // memory, which stays in the L2 cache. `previous` only marks whether there was a step.
  DEVICE void note_block(int, int) { previous = 0; }

  // The target of the step before the current position of `ring`.
  DEVICE QueryTarget target() const {
    return load_target(slot_at<16>(sm.targets, (ring.phase * STAGES + ring.stage + 3) & 3));
  }

  DEVICE float* own_sums(const QueryTarget& x) const {
    return sums_of((long long)blockIdx.x * p.part_heads * p.m_blocks + x.place);
  }

  DEVICE void write_query_gradients() {
    const QueryTarget x = target();
    if (x.is_complete) {
      if (x.is_stored) add_sums(own_sums(x));
      write_rows(x);
    } else if (x.is_stored) {
      add_fragments<0, QUERY_GRADS>(own_sums(x), dq);
    } else {
      float* const to = own_sums(x);
#pragma unroll
      for (int i = 0; i < QUERY_GRADS; i += 4)
        *(float4*)(to + i * 128) = make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
  }

  DEVICE void add_sums(const float* from) {
    float4 x[QUERY_GRADS / 4];
#pragma unroll
    for (int i = 0; i < QUERY_GRADS; i += 4) x[i / 4] = load_l2(from + i * 128);
#pragma unroll
    for (int i = 0; i < QUERY_GRADS; i += 4)
      dq[i] += x[i / 4].x, dq[i + 1] += x[i / 4].y, dq[i + 2] += x[i / 4].z, dq[i + 3] += x[i / 4].w;
  }

  DEVICE void write_rows(const QueryTarget& target) {
    const int b = target.b, h = target.h, tid = opaque(this->tid), lane = tid & 31;
    const int top = target.m * BLOCK_M + (SPLITS_ROWS ? first : 0) + (tid >> 5) * 16;
    note_rows(sm.nonfinite, __any_sync(~0u, probe(dq) != 0.f));
    write_query_rows(p, dq, b, h, top + (lane >> 2), SPLITS_ROWS ? 0 : c * (SUM_FEATURES / 2));
  }
#else
  DEVICE void note_block(int h, int m) { previous = (t.b * p.Hq + h) * p.m_blocks + m; }

  DEVICE void write_query_gradients() {
    float* const to = sums_of(previous);
    add_fragments<0, QUERY_GRADS - UNUSED_GRADS>(to, dq);
    if (UNUSED_GRADS > 0 && c == 0) add_fragments<QUERY_GRADS - UNUSED_GRADS, QUERY_GRADS>(to, dq);
  }
#endif

  DEVICE u32 keys() const { return slot_at<K_BYTES>(sm.k, slot); }
  DEVICE u32 values() const { return slot_at<V_BYTES>(sm.v, slot); }

  DEVICE void gradient_product(float (&d)[GRADS], u32 (&a)[SCORES / 2], u32 queries) {
    wgmma_fence();
    wgmma_grads(d, a, descriptor_base(queries, BLOCK_M * 128));
    wgmma_commit();
  }

  DEVICE void query_product(u32 ds_at) {
    constexpr int HALF = SUM_FEATURES / 2;
    const u32 keys = slot_at<K_BYTES>(sm.k, previous_slot);
    const u32 columns = SPLITS_COLUMNS ? keys + (c * HALF / 64) * BLOCK_N * 128 + (c * HALF % 64) * 2 : keys;
    if (SPLITS_ROWS) ds_at += c * BLOCK_N * 128;
    wgmma_fence();
    wgmma_queries_start(dq, descriptor_base(ds_at, BLOCK_N * 128), descriptor_base(columns, BLOCK_N * 128));
    wgmma_commit();
  }

  // Computes the gradients of the scores in place of dP.
  DEVICE void score_gradients(u32 delta) {
    const u32 row = opaque(delta + (lane & 3) * 8);
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float2 d = deltas(row + i * 8);
      dp[i] = score_gradient(s[i], dp[i], d.x), dp[i + 1] = score_gradient(s[i + 1], dp[i + 1], d.y);
      dp[i + 2] = score_gradient(s[i + 2], dp[i + 2], d.x),
             dp[i + 3] = score_gradient(s[i + 3], dp[i + 3], d.y);
    }
  }

  // Issues the product for dQ of the previous step, once the other consumer has stored its dS.
  DEVICE void delayed_query_product(u32 from) {
    named_barrier_sync(Barrier::DS_STORED + (c ^ 1) * 2 + from, 128 * CONSUMERS);
    query_product(slot_at<DS_BYTES>(sm.exchange, from));
  }

  // Signals that this consumer's dS is stored. Its products that read the other buffer must have completed.
  // With ALTERNATES, a dS that only this consumer reads is not signalled.
  DEVICE void signal_stored(u32 to) {
    fence_async_shared();
    if (!ALTERNATES || to != c) named_barrier_arrive(Barrier::DS_STORED + c * 2 + to, 128 * CONSUMERS);
  }

  // Called after the wait for dK and dV: their operands must keep their registers until then.
  DEVICE void end_products() {
    fence_operand(dk);
    fence_operand(dv);
    fence_operand(ds);
  }

  // Releases Q and dO. No read is in flight: each was the operand of a product that has been waited for.
  DEVICE void release(u32 stage) {
    mbar_arrive(barrier(sm.q_empty, stage));
    mbar_arrive(barrier(sm.do_empty, stage));
  }

  DEVICE void step(int h, int m, bool edge) {
    const u32 i = ring.stage, queries = slot_at<Q_BYTES>(sm.q, i), grads = slot_at<DO_BYTES>(sm.grad_out, i);
    read_mask(h, m);
#if HAS_PROGRAM
    Program program;
    ProgramFactors<SCORES> factors;
    TermFactors<SCORES> of_term;
    if (PROGRAM_HAS_SCORE) read_terms(program, h, m);  // early, for the same reason
#endif
    mbar_wait(barrier(sm.q_full, i), ring.phase);
    score_product<HEAD_FEATURES>(s, keys(), queries);
    mbar_wait(barrier(sm.do_full, i), ring.phase);
    score_product<VALUE_FEATURES>(dp, values(), grads);
    find_dropped(slot_at<SEED_BYTES>(sm.row_seeds, i), barrier(sm.do_full, i));
    wgmma_wait<1>();
    fence_operand(s);
#if HAS_PROGRAM
    apply_program(program, s, factors, of_term, h, m);
#endif
    float tanh_grad[SCORES];
    apply_softcap(s, tanh_grad);
    scores_to_weights(s, m, edge, slot_at<ROW_BYTES>(sm.lse, i), slot_at<RANGE_BYTES>(sm.ranges, i));
    pack_weights(w, s);
    fence_operand(w);
    mbar_wait(barrier(sm.do_full, i), ring.phase);  // already complete; ends a basic block, in
                                                    // which ptxas would wait for dP too early
    wgmma_wait<0>();
    fence_operand(dp);
    gradient_product(dv, w, grads);
#if HAS_PROGRAM
    const u32 delta = slot_at<ROW_BYTES>(sm.delta, i);
    float diagonals[DIAGONALS];
    if (SUMS_TERMS && (edge || masks()))
      program_gradients<true>(program, s, dp, delta, factors, of_term, diagonals);
    else program_gradients<false>(program, s, dp, delta, factors, of_term, diagonals);
#else
    score_gradients(slot_at<ROW_BYTES>(sm.delta, i));
    multiply_by_softcap_grad(dp, tanh_grad);
#endif
    pack_fragments(ds, dp);
#if ADDS_DQ
    const u32 extra = buffer;
    const u32 ds_at = sm.exchange + buffer * DS_BYTES;
    buffer ^= 1;
    if (previous >= 0) {
      delayed_query_product(buffer);
      store_fragments(ds_at + first * 128, ds, BLOCK_N * 128);
      gradient_product(dk, ds, queries);
#if PROGRAM_DISTANCE_SUMS
      share_diagonals(diagonals, h, m);
#endif
      wgmma_wait<1>();
      fence_operand(dq);
      signal_stored(extra);
      release_previous_keys();
      write_query_gradients();
    } else {  // separately: registers of dQ that only one branch uses would be taken in all of the loop
      previous_slot = slot;
      store_fragments(ds_at + first * 128, ds, BLOCK_N * 128);
      gradient_product(dk, ds, queries);
#if PROGRAM_DISTANCE_SUMS
      share_diagonals(diagonals, h, m);
#endif
      signal_stored(extra);
    }
    note_block(h, m);
    if (ALTERNATES && extra != c) previous = -1;
#else
    gradient_product(dk, ds, queries);
#if PROGRAM_DISTANCE_SUMS
    share_diagonals(diagonals, h, m);
#endif
#endif
    wgmma_wait<0>();
    end_products();
    release(i);
    ring.next();
  }

  // Called after a product for dQ: the first one of a tile still reads the keys of the previous tile.
  DEVICE void release_previous_keys() {
    if (KEY_SLOTS == 1 || previous_slot == slot) return;
    mbar_arrive(kv_empty(sm, previous_slot));
    previous_slot = slot;
  }

  // Computes dQ of the previous step.
  DEVICE void finish_query_product() {
    delayed_query_product(buffer ^ 1);
    wgmma_wait<0>();
    fence_operand(dq);
  }

#if KEY_SLOTS > 1
  // Writes the gradients of a tile through a staging buffer of their own. dQ of its last step is computed
  // later.
  DEVICE u32 finish_tile() {
    t = load_key_tile(sm, slot);
    const u32 phase = phase_after(sm, slot);
    if (previous < 0 || previous_slot != slot) {  // no step has used these keys or released earlier ones
      finish_queries();
      mbar_arrive(kv_empty(sm, slot));
    }
#if SPLITS_GROUP
    float* const sums = key_sums_of(p, t) + opaque(c * 128 * GRADS + tid * 4);
    write_key_sums(sums, dk);
    write_key_sums(sums + BLOCK_N * HEAD_FEATURES, dv);
#else
    if (tid == 0) tma_store_wait_read();
    named_barrier_sync(Barrier::WARPGROUP + c, 128);
    const u32 place = sm.exchange + 2 * DS_BYTES + first * 128;
    store(dv, value_factor(), place, BLOCK_N * 128, DV, p.dv);
    store(dk, p.scale, place + K_BYTES, BLOCK_N * 128, DK, p.dk);
#endif
    slot ^= 1;
    return phase;
  }

  DEVICE void finish_queries() {
    if (previous < 0) return;
    finish_query_product();
    mbar_arrive(kv_empty(sm, previous_slot));
    write_query_gradients();
    previous = -1;
  }
#else
  // Writes the gradients of a tile. dK is staged in this consumer's rows of dS, and dV in the memory behind
  // them, so that the next K and V can be copied at once.
  DEVICE u32 finish_tile() {
    t = load_key_tile(sm, slot);
    const u32 phase = phase_after(sm, slot);
#if ADDS_DQ
    if (previous >= 0) {
      finish_query_product();
      mbar_arrive(kv_empty(sm, slot));
      write_query_gradients();
      previous = -1;
    } else {
      mbar_arrive(kv_empty(sm, slot));
    }
#elif SPLITS_GROUP
    mbar_arrive(kv_empty(sm, slot));
#endif
#if SPLITS_GROUP
    float* const sums = key_sums_of(p, t) + opaque(c * 128 * GRADS + tid * 4);
    write_key_sums(sums, dk);
    write_key_sums(sums + BLOCK_N * HEAD_FEATURES, dv);
#elif ADDS_DQ
    named_barrier_sync(Barrier::CONSUMER_SYNC, 128 * CONSUMERS);  // both consumers have read all of dS
    store(dv, value_factor(), sm.exchange + 2 * DS_BYTES + first * 128, BLOCK_N * 128, DV, p.dv);
    store(dk, p.scale, sm.exchange + first * 128, BLOCK_N * 128, DK, p.dk);
    if (tid == 0) tma_store_wait_read();
    named_barrier_sync(Barrier::WARPGROUP + c, 128);
#else
    store(dv, value_factor(), sm.v + first * 128, BLOCK_N * 128, DV, p.dv);
    store(dk, p.scale, sm.k + first * 128, BLOCK_N * 128, DK, p.dk);
    if (tid == 0) tma_store_wait_read();
    mbar_arrive(kv_empty(sm, slot));
#endif
    return phase;
  }

#endif

  DEVICE void run() {
#if PROGRAM_DISTANCE_SUMS
    clear_diagonals();
#endif
    for (u32 phase = 0;;) {
      mbar_wait(barrier(sm.kv_full, slot), phase);
      t = load_key_tile(sm, slot);
#if KEY_SLOTS > 1
      if (t.n0 < 0) finish_queries();
#endif
      if (t.n0 < 0) break;
#pragma unroll
      for (int i = 0; i < GRADS; i++) dk[i] = dv[i] = 0.f;
#if HAS_KV_LENS
      if (t.keys < t.n0 + BLOCK_N) clear_keys();
#endif
      for_each_query_block(*this);
      phase = finish_tile();
    }
    if (tid == 0) tma_store_wait();
#if WHOLE_HEADS
    named_barrier_sync(Barrier::CONSUMER_SYNC, 128 * CONSUMERS);  // all gradients are written
    const int4 x = load_shared<int4>(sm.nonfinite), y = load_shared<int4>(sm.nonfinite + 16);
    if (x.x | x.y | x.z | x.w | y.x | y.y | y.z | y.w) recompute_own_rows(p);
#endif
  }

  // Zeroes this consumer's rows past the end of the keys; the other consumer zeroes its rows before it stores
  // its dS.
  DEVICE void clear_keys() {
    const int from = max(first, t.keys - t.n0);
    clear_rows<BLOCK_N, HEAD_DIM>(keys(), from, first + 64, Barrier::WARPGROUP + c);
    clear_rows<BLOCK_N, VALUE_DIM>(values(), from, first + 64, Barrier::WARPGROUP + c);
  }

  DEVICE void store(const float (&grads)[GRADS], float factor, u32 at, u32 column_bytes, int tensor,
                    const TensorMap& map) {
#if WHOLE_HEADS
    const Note note = sm.nonfinite;
#else
    const Note note = note_at(p, tensor, t.b * p.Hkv + t.part, p.n_blocks * BLOCK_N, t.n0 + first);
#endif
    store_gradients(grads, factor, at, column_bytes, Barrier::WARPGROUP + c, map, t.n0 + first, t.part, t.b,
                    note);
  }
};

// The tile after tile `i`, claimed by the leader. If it were claimed earlier, it would wait in this CTA while
// other CTAs are idle.
DEVICE int next_tile(const BackwardParams& p, int i) {
#if WHOLE_HEADS
  return (i + 1) % p.n_blocks ? i + 1 : i + 1 + (gridDim.x - 1) * p.n_blocks;
#else
  return gridDim.x + atomicAdd(p.counter, 1);
#endif
}

// Executed by one warp. The published tile is valid as long as its keys are in shared memory.
DEVICE void produce(const BackwardParams& p, const BackwardShared& sm) {
  const bool leader = elect_one();
  const int tiles = p.n_blocks * p.B * p.Hkv * p.parts;
  PipelineState<STAGES> ring;
  PipelineState<1> bias;
  PipelineState<KEY_SLOTS> keys;
  for (int i = WHOLE_HEADS ? blockIdx.x * p.n_blocks : blockIdx.x; i < tiles; keys.next()) {
    const KeyTile t = tile_at(p, i);
    const u32 full = barrier(sm.kv_full, keys.stage);
    mbar_wait(kv_empty(sm, keys.stage), keys.phase ^ 1);
    if (leader) {
      // the phase flips after the last slot
      store_key_tile(sm, t, keys.stage, keys.stage == KEY_SLOTS - 1 ? keys.phase ^ 1 : keys.phase);
      if (t.first < t.last) load_keys(p, sm, t, keys.stage);
      else mbar_arrive(full);
    }
    // the row sums have not been read before
    if (!SUMS_ROWS) wait_for_prior_grid();
    else if (i == blockIdx.x * p.n_blocks) named_barrier_sync(Barrier::ROW_SUMS, 128 * CONSUMERS + 32);
    produce_queries(p, sm, t, leader, ring, bias);
    if (leader) i = next_tile(p, i);
    i = __shfl_sync(~0u, i, __ffs(__ballot_sync(~0u, leader)) - 1);
  }
  mbar_wait(kv_empty(sm, keys.stage), keys.phase ^ 1);
  if (leader) {
    store_key_tile(sm, {-1, 0, 0, 0, 0, 0}, keys.stage, 0);
    mbar_arrive(barrier(sm.kv_full, keys.stage));
  }
}

#if SUMS_ROWS
// Computes the row sums of this CTA's heads with many loads in flight. Executed by all consumers.
DEVICE void write_own_row_sums(const BackwardParams& p) {
  constexpr int ROWS = 2048 / VALUE_DIM;
  const int per_head = p.m_blocks * (BLOCK_M / ROWS);
  for (int i = warp_uniform(threadIdx.x / 32) - 4;; i += 4 * CONSUMERS) {
    const int own = i / per_head, turn = own / p.group;
    const int part = blockIdx.x + turn * gridDim.x, h = part * p.group + (own - turn * p.group);
    if (part >= p.B * p.Hkv) break;
    write_row_sums<ROWS>(p, h / p.Hq, h % p.Hq, (i - own * per_head) * ROWS);
  }
  fence_async_global();  // bulk copies read them
  named_barrier_arrive(Barrier::ROW_SUMS, 128 * CONSUMERS + 32);
}
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardShared sm(smem_address(shared));
  if (!WHOLE_HEADS) launch_dependent_grids();
  if (threadIdx.x == 0) {
    sm.init();
    for (int i = 0; i < KEY_SLOTS; i++) mbar_init(kv_empty(sm, i), 128 * CONSUMERS);
    for (int i = 0; i < 32 * WHOLE_HEADS; i += 16) store_shared(sm.nonfinite + i, make_int4(0, 0, 0, 0));
    mbar_init_fence();
  }
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x < 32) produce(p, sm);
  } else {
    register_alloc<240>();
#if SUMS_ROWS
    write_own_row_sums(p);
#endif
    BackwardConsumer consumer(p, sm, warpgroup - 1);
    consumer.run();
  }
}
