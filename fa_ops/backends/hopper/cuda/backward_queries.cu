// dQ as a pass of its own: nothing is added to memory, so its bits do not depend on who comes first. One CTA per 128 queries, 64 a consumer, over the
// keys that they attend; scores and their gradients are computed again, a row a query, and the gradients are the register operand of dQ's product.
// V and K come in turns through one ring of slots, V first: its slot is free after one product, early enough for the next block's K.
// Compile-time: QUERY_BLOCK_N QUERY_STAGES, beside what backward.cuh has

constexpr int ROW_SCORES = QUERY_BLOCK_N / 2, ROWS = 64;
constexpr u32 OWN_Q_BYTES = ROWS * HEAD_DIM * 2, OWN_DO_BYTES = ROWS * VALUE_DIM * 2;
constexpr u32 KEYS_BYTES = QUERY_BLOCK_N * HEAD_DIM * 2;
static_assert(VALUE_DIM <= HEAD_DIM, "a slot holds either");
static_assert(QUERY_BLOCK_N % 64 == 0, "whole words of a mask's bits, and of those that are dropped");

struct QuerySmem {
  u32 q, grad_out, slots, own_full, full, empty;
  DEVICE QuerySmem(u32 base) {
    q = base, grad_out = q + CONSUMERS * OWN_Q_BYTES, slots = grad_out + CONSUMERS * OWN_DO_BYTES, own_full = slots + QUERY_STAGES * KEYS_BYTES;
    full = own_full + 8 * CONSUMERS, empty = full + 8 * QUERY_STAGES;
  }
};

// Keys that some query of a block of 64 attends, and those that all of them do.
struct Span { int lo, hi, all_lo, all_hi; };

// A block of 64 queries: its index among the head's.
struct QueryBlock { int m, h, b, keys; };

DEVICE Span span_of(const Params& p, const QueryBlock& t) {
  Span s = {0, 0, 0, 0};
  if (t.m >= p.m_blocks) return s;
#if HAS_RANGES
  const int4 x = p.bounds[runs_of(p, t.h, t.b) * p.m_blocks + t.m];
  s = {x.x, x.y, x.z, x.w};
#else
  s = {0, t.keys, 0, t.keys};
#if IS_RAGGED
  const int first = t.m * ROWS + t.keys - p.Sq, last = min((t.m + 1) * ROWS, p.Sq) - 1 + t.keys - p.Sq;
  s.lo = max(0, first - p.window_left), s.hi = min(t.keys, last + p.window_right + 1);
  s.all_lo = max(0, last - p.window_left), s.all_hi = min(t.keys, first + p.window_right + 1);
#endif
#endif
#if HAS_MASK
  const int2 kept = kept_run<ROWS>(p.by_query, t.b, t.h, t.m * ROWS, p.Sq);
  s.lo = max(s.lo, kept.x), s.hi = min(s.hi, kept.y);
#endif
  if (s.hi <= s.lo) s.lo = s.hi = 0;
  return s;
}

// The first of the CTA's blocks. Sections of heads whose K and V share the L2; inside one, the longest come first over all its heads.
DEVICE QueryBlock first_block(const Params& p) {
  const int heads = p.B * p.Hq, tiles = (p.m_blocks + CONSUMERS - 1) / CONSUMERS, per = p.query_section * tiles;
  const int sec = blockIdx.x / per, r = blockIdx.x - sec * per;
  const int inside = min(p.query_section, heads - sec * p.query_section);
  const int head = sec * p.query_section + r % inside;
  QueryBlock t;
  t.m = (IS_RAGGED || HAS_MASK ? tiles - 1 - r / inside : r / inside) * CONSUMERS;
  t.b = head / p.Hq;
  t.h = head - t.b * p.Hq;
  t.keys = keys_of(p, t.b);
  return t;
}

// Blocks of keys: [first, end).
struct Keys { int first, end; };

DEVICE Keys keys_of(const Span& s) { return {s.lo / QUERY_BLOCK_N, (s.hi + QUERY_BLOCK_N - 1) / QUERY_BLOCK_N}; }

// What lies between the first and the last that some consumer visits; `t` is the CTA's first block of queries.
DEVICE Keys all_keys_of(const Params& p, QueryBlock t) {
  Keys all = {0, 0};
  for (int c = 0; c < CONSUMERS; c++, t.m++) {
    const Keys n = keys_of(span_of(p, t));
    if (n.first == n.end) continue;
    all.first = all.first == all.end ? n.first : min(all.first, n.first), all.end = max(all.end, n.end);
  }
  return all;
}

DEVICE void load_slot(const QuerySmem& sm, Ring<QUERY_STAGES>& ring, const TensorMap& map, int width, int row, int h, int b) {
  const u32 full = sm.full + 8 * ring.stage;
  mbar_wait(sm.empty + 8 * ring.stage, ring.phase ^ 1);
  mbar_expect(full, QUERY_BLOCK_N * width * 2);
  load_tile(sm.slots + ring.stage * KEYS_BYTES, map, full, width, QUERY_BLOCK_N, row, h, b);
  ring.next();
}

// One thread.
DEVICE void produce_keys(const Params& p, const QuerySmem& sm, const QueryBlock& t, const Keys& n) {
  if (n.first == n.end) return;
  for (int c = 0; c < CONSUMERS; c++) {
    const u32 full = sm.own_full + 8 * c;
    mbar_expect(full, OWN_Q_BYTES + OWN_DO_BYTES);
    load_tile(sm.grad_out + c * OWN_DO_BYTES, p.grad_out, full, VALUE_DIM, ROWS, (t.m + c) * ROWS, t.h, t.b);
    load_tile(sm.q + c * OWN_Q_BYTES, p.q, full, HEAD_DIM, ROWS, (t.m + c) * ROWS, t.h, t.b);
  }
  Ring<QUERY_STAGES> ring;
  const int h = t.h / p.group;
  for (int j = n.first; j < n.end; j++) {
    load_slot(sm, ring, p.v, VALUE_DIM, j * QUERY_BLOCK_N, h, t.b);
    load_slot(sm, ring, p.k, HEAD_DIM, j * QUERY_BLOCK_N, h, t.b);
  }
}

struct QueryConsumer {
  const Params& p;
  const QuerySmem& sm;
  const QueryBlock t;
  const Span span;
  const int c, tid, lane;
  Ring<QUERY_STAGES> ring;
  u32 held = 0;  // the barrier that frees what the product in flight reads
  float s[ROW_SCORES], dp[ROW_SCORES], dq[HEAD_DIM / 2];
  u32 ds[ROW_SCORES / 2];
  float lse[2], delta[2], slope;
  int2 run[2];      // of keys, for this thread's two rows
  int diagonal[2];  // the key at the same position
#if HAS_MASK
  u64 kept[2][QUERY_BLOCK_N / 64];  // a bit for each key of a block
#endif
#if HAS_DROPOUT
  u32 row_keys[2], dropped[ROW_SCORES / 32];  // a bit for each of a thread's scores
#endif
#if BIAS_BITS
  static constexpr bool EARLY_BIAS = HEAD_DIM < 256;
  BiasPair bias[ROW_SCORES / 2];
#endif

  DEVICE QueryConsumer(const Params& p, const QuerySmem& sm, const QueryBlock& first, int c)
      : p(p), sm(sm), t({first.m + c, first.h, first.b, first.keys}), span(span_of(p, t)), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31) {}

  // A thread's first query, or the second.
  DEVICE int row(int r) const { return t.m * ROWS + (tid >> 5) * 16 + (lane >> 2) + 8 * r; }

  // What belongs to a thread's rows; those that do not exist have a weight of 0 for every key.
  DEVICE void read_rows() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row(r);
      const long long at = (long long)(t.b * p.Hq + t.h) * p.m_blocks * ROWS + i;
      const bool exists = t.m < p.m_blocks;
      lse[r] = exists ? p.lse[at] : INFINITE;
      delta[r] = exists ? p.delta[at] : 0.f;
#if HAS_DROPOUT
      delta[r] *= p.dropout.kept;
      row_keys[r] = exists ? p.dropout.row_keys[at] : 0;
#endif
      diagonal[r] = i + t.keys - p.Sq;
      run[r] = make_int2(0, t.keys);
#if HAS_RANGES
      if (exists) run[r] = p.runs[runs_of(p, t.h, t.b) * p.m_blocks * ROWS + i];
#elif IS_RAGGED
      run[r] = make_int2(diagonal[r] - p.window_left, min(t.keys, diagonal[r] + p.window_right + 1));
#endif
    }
#if HAS_ALIBI
    slope = p.alibi[t.b * p.alibi_b + t.h] * p.alibi_unit;
#endif
  }

  // queries x keys, from this consumer's rows of Q or dO and a slot
  template <int FEATURES> DEVICE void score_product(float (&d)[ROW_SCORES], u32 rows, u32 slot) {
    const u32 from_rows = descriptor_base(rows, 16), from_keys = descriptor_base(slot, 16);
    wgmma_fence();
    if (FEATURES == HEAD_DIM) wgmma_row_scores_start(d, from_rows, from_keys); else wgmma_row_value_scores_start(d, from_rows, from_keys);
    wgmma_commit();
  }

  // The mask, early: it comes from the L2 while scores are computed.
  DEVICE void read_mask(int n0) {
#if HAS_MASK
    const unsigned char* from = p.by_query.at + t.b * p.by_query.b + t.h * p.by_query.h + n0 / 8;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int w = 0; w < QUERY_BLOCK_N / 64; w++)
        kept[r][w] = *(const u64*)(from + min(row(r), p.Sq - 1) * p.by_query.row + w * 8);
#endif
  }

  // Under the products of the scores. What it returns is 0, as `rows` is a multiple of 64, but ptxas does not know: it would compute hashes where they
  // are used, after the products, did nothing before depend on them.
  DEVICE u32 find_dropped([[maybe_unused]] int n0) {
    u32 any = 0;
#if HAS_DROPOUT
    const u32 column = (n0 + (lane & 3) * 2) * COLUMN_KEY, first[2] = {row_keys[0] + column, row_keys[1] + column};
#pragma unroll
    for (int w = 0; w < ROW_SCORES / 32; w++) {
      u32 found[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 32; i++)
        note_dropped(found[i & 3], i, first[i >> 1 & 1] + (w * 64 + column_offset(i)) * p.dropout.column_key, p.dropout.threshold);
      dropped[w] = found[0] | found[1] | found[2] | found[3];
      any |= dropped[w];
    }
    any &= p.dropout.rows & 1;
#endif
    return any;
  }

  // The bias, early where registers hold it beside the products, for the same reason.
  DEVICE void read_bias(int n0) {
#if BIAS_BITS
    const char* from = p.bias.at + t.b * p.bias.b + t.h * p.bias.h;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const char* at = from + min(row(r), p.Sq - 1) * p.bias.row;
#pragma unroll
      for (int i = r; i < ROW_SCORES / 2; i += 2) bias[i] = bias_pair(at, p.bias, n0, (i >> 1) * 8 + (lane & 3) * 2);
    }
#endif
  }

  // The gradients of the scores, or with OF_PRODUCTS those of what a softcap took, in dp; under dropout but for its scale.
  template <bool EDGE, bool OF_PRODUCTS = true> DEVICE void score_gradients(int n0) {
#if BIAS_BITS
    if (!EARLY_BIAS) read_bias(n0);
#endif
#if HAS_MASK
    u64 rows[2][QUERY_BLOCK_N / 64];
#pragma unroll
    for (int w = 0; w < QUERY_BLOCK_N / 64; w++) rows[0][w] = kept[0][w] >> first_bit(), rows[1][w] = kept[1][w] >> first_bit();
#endif
#pragma unroll
    for (int i = 0; i < ROW_SCORES; i++) {
      const int r = i >> 1 & 1, j = n0 + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
      float x = s[i];
#if HAS_SOFTCAP
      x = capped(x * p.score_scale);
      const float slack = 1.f - x * x;
#endif
#if HAS_ALIBI
      x -= slope * fabsf((float)(diagonal[r] - j));
#endif
#if BIAS_BITS
      const float2 y = floats(bias[i / 2]);
      x = fmaf(x, p.bias.unit, i & 1 ? y.y : y.x);
#endif
#if HAS_MASK
      if (!bit_of(rows[r][i / 32], i)) x = -INFINITE;
#endif
      if (EDGE && (j < run[r].x || j >= run[r].y)) x = -INFINITE;
#if HAS_DROPOUT
      if (dropped[i / 32] >> i % 32 & 1) dp[i] = 0.f;
#endif
      dp[i] = exp2_fast(exponent(p, x, lse[r])) * (dp[i] - delta[r]);
#if HAS_SOFTCAP
      if (OF_PRODUCTS) dp[i] *= slack;
#endif
      if (EDGE && x == -INFINITE) dp[i] = 0.f;  // values that are not attended may be NaN
    }
  }

  DEVICE u32 arrived() const {
    mbar_wait(sm.full + 8 * ring.stage, ring.phase);
    return sm.slots + ring.stage * KEYS_BYTES;
  }

  DEVICE void step(int n0) {
    read_mask(n0);
#if BIAS_BITS
    if (EARLY_BIAS) read_bias(n0);
#endif
    const u32 values = arrived(), values_empty = sm.empty + 8 * ring.stage;
    score_product<VALUE_DIM>(dp, sm.grad_out + c * OWN_DO_BYTES, values);
    wgmma_wait<1>();
    if (held) mbar_arrive(held);
    ring.next();
    const u32 keys = arrived();
    score_product<HEAD_DIM>(s, sm.q + c * OWN_Q_BYTES, keys);
    const u32 nothing = find_dropped(n0);
    wgmma_wait<1>();
    mbar_arrive(values_empty + nothing);
    wgmma_wait<0>();
    pin(dp);
    pin(s);
    if (n0 < span.all_lo || n0 + QUERY_BLOCK_N > span.all_hi) score_gradients<true>(n0); else score_gradients<false>(n0);
#pragma unroll
    for (int i = 0; i < ROW_SCORES / 2; i++) ds[i] = pack(dp[2 * i], dp[2 * i + 1]);
#if HAS_KV_LENS
    if (n0 + QUERY_BLOCK_N > t.keys) clear_rows<QUERY_BLOCK_N, HEAD_DIM>(keys, t.keys - n0, QUERY_BLOCK_N, OWN_BARRIER + c);
#endif
    wgmma_fence();
    wgmma_query_grads(dq, ds, descriptor_base(keys, QUERY_BLOCK_N * 128));
    wgmma_commit();
    held = sm.empty + 8 * ring.stage;
    ring.next();
  }

  // Blocks of keys that only the other consumer visits.
  DEVICE void pass(int blocks) {
    for (int i = 0; i < 2 * blocks; i++, ring.next()) arrived(), mbar_arrive(sm.empty + 8 * ring.stage);
  }

  DEVICE void work(const Keys& all) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dq[i] = 0.f;
    read_rows();
    Keys n = keys_of(span);
    if (n.first == n.end) n = {all.end, all.end};
    if (all.first < all.end) mbar_wait(sm.own_full + 8 * c, 0);
    pass(n.first - all.first);
#pragma unroll 1
    for (int j = n.first; j < n.end; j++) step(j * QUERY_BLOCK_N);
    wgmma_wait<0>();
    pin(dq);
    if (held) mbar_arrive(held);
    pass(all.end - n.end);
    if (t.m >= p.m_blocks) return;
    named_sync(OWN_BARRIER + c, 128);  // every warp has read its rows of Q
    u32* const note = note_at(p, DQ, t.b * p.Hq + t.h, p.m_blocks * ROWS, t.m * ROWS);
    store_gradients(dq, p.scale, sm.q + c * OWN_Q_BYTES, ROWS * 128, OWN_BARRIER + c, p.dq, t.m * ROWS, t.h, t.b, note);
    if (tid == 0) tma_store_wait();
  }
};

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1) backward_queries(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const QuerySmem sm(smem_address(shared));
  next_grid_may_start();
  if (threadIdx.x == 0) {
    for (int c = 0; c < CONSUMERS; c++) mbar_init(sm.own_full + 8 * c, 1);
    for (int i = 0; i < QUERY_STAGES; i++) mbar_init(sm.full + 8 * i, 1), mbar_init(sm.empty + 8 * i, 128 * CONSUMERS);
    mbar_init_fence();
  }
  __syncthreads();
  const QueryBlock first = first_block(p);
  const Keys all = all_keys_of(p, first);
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_release<24>();
    if (threadIdx.x < 32 && elected()) produce_keys(p, sm, first, all);
  } else {
    register_claim<240>();
    QueryConsumer consumer(p, sm, first, warpgroup - 1);
    consumer.work(all);
  }
}
