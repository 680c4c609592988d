// Gradients for more than 256 features, in two passes over the scores: `wide_keys` computes dK and dV of 64
// keys, `wide_queries` computes dQ of 64 queries. Each is what the registers of a cluster of two CTAs can
// hold. Each CTA holds one tensor of the cluster's own tokens and streams one tensor of the others in blocks
// of 64 tokens, which both of its products read:
//
//            dK and dV                                dQ
//   CTA 0    P = exp(K.Q^T - LSE)      dK += dS^T.Q   P = exp(Q.K^T - LSE)      dQ += dS.K
//   CTA 1    dS = P (V.dO^T - delta)   dV += P^T.dO   dS = P (dO.V^T - delta)
//
// P is sent from CTA 0 to CTA 1, and dS back, as 16-bit values through distributed shared memory. Warpgroup 0
// copies, warpgroup 1 computes scores, and warpgroups 2 and 3 share the columns of the gradient. Nothing is
// accumulated in memory, so all gradients are bitwise reproducible.
//
// The score warpgroup keeps half the features of the cluster's own tokens in registers, so that shared memory
// has room for two and a half blocks of the streamed tensor instead of two.
//
// Each half of a block's columns is released when both gradient warpgroups have completed their first
// products with it.
//
// What each barrier of a CTA protects:
//
//   resident_full   the cluster's own tokens are there
//   full            half the columns of a block are there; with the first half its LSEs or deltas, and ranges
//   empty           the scores' threads, and the gradient's warps, have read it
//   received_full   weights or gradients of the other CTA are there, whose bytes it counts. Armed for the
//                   next use of a buffer by a thread that has seen its last one
//   sent_empty      the other CTA has read what was sent, so that it may be overwritten here and there
//
// Compile-time: IS_BF16 HEAD_DIM SHARED_BYTES HAS_KV_LENS, and what backward_tiles.cuh has
#include "backward_tiles.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

#if ENTRY_wide_queries
#define OF_QUERIES 1
#else
#define OF_QUERIES 0
#endif

constexpr int TOKENS = 64, COLUMNS = HEAD_DIM / 64, HALF_COLUMNS = COLUMNS / 2;
constexpr u32 COLUMN_BYTES = TOKENS * 128, HALF_BYTES = HALF_COLUMNS * COLUMN_BYTES;
// SLOTS hold half a block each; NUMBER_SLOTS hold the LSE or delta of whole blocks.
constexpr int SLOTS = 5, NUMBER_SLOTS = (SLOTS + 1) / 2;
constexpr u32 NUMBER_BYTES = TOKENS * 4, RANGE_BYTES = TOKENS * 8;
static_assert(BLOCK_M == TOKENS && BLOCK_N == TOKENS && QUERY_BLOCK_N == TOKENS, "copies of 64 tokens");
static_assert(HEAD_DIM == VALUE_DIM && HEAD_FEATURES == HEAD_DIM && COLUMNS % 4 == 0, "halves of halves");
static_assert(!ADDS_DQ, "nothing is added in memory");
static_assert(!(HAS_MASK || HAS_DROPOUT || HAS_SOFTCAP || HAS_ALIBI || BIAS_BITS), "not in this kernel");

// Offsets in shared memory, in order. Data with several slots has as many mbarriers.
struct WideShared {
  u32 resident;  // the cluster's own tokens, K or V, or Q or dO: the half that is not in registers
  u32 stream;    // the streamed tensor: Q or dO, or K or V; first the half that goes to registers
  u32 sent, received;  // weights or their gradients, to and from the other CTA
  u32 numbers;         // the LSE or delta of each query of a block
  u32 ranges;
  u32 nonfinite;  // whether a warp's gradients are not finite
  u32 resident_full;
  u32 full, empty;
  u32 received_full, sent_empty;
  u32 end;

  DEVICE constexpr explicit WideShared(u32 base)
      : resident(base),
        stream(resident + HALF_BYTES),
        sent(stream + SLOTS * HALF_BYTES),
        received(sent + 2 * COLUMN_BYTES),
        numbers(received + 2 * COLUMN_BYTES),
        ranges(numbers + NUMBER_SLOTS * NUMBER_BYTES),
        nonfinite(ranges + NUMBER_SLOTS * RANGE_BYTES),
        resident_full(nonfinite + 8 * 4),
        full(resident_full + 8),
        empty(full + 8 * SLOTS),
        received_full(empty + 8 * SLOTS),
        sent_empty(received_full + 8 * 2),
        end(sent_empty + 8 * 2) {}
};
constexpr WideShared LAYOUT(0);
static_assert(LAYOUT.end == SHARED_BYTES, "SHARED_BYTES is the layout's size");

// The named barriers. Barrier 0 is that of __syncthreads.
struct Barrier {
  enum : u32 {
    SCORE_WARPGROUP = 1,     // for the 128 threads of the score warpgroup
    GRADIENT_WARPGROUP = 2,  // one per half, for its 128 threads
    GRADIENTS = 4,           // gradients of both halves are in shared memory
    STREAM_READ = 5,         // no consumer reads a block any more
  };
};

// The work of a cluster. In the pass for dK and dV it owns 64 keys and iterates over the queries that attend
// them; in the pass for dQ it owns 64 queries and iterates over their keys.

#if OF_QUERIES
// 64 queries of a head. Within a section the longest blocks of all heads come first.
struct WideWork {
  QueryBlock t;
  QueryBlockKeys span;
  KeyBlocks blocks;

  DEVICE explicit WideWork(const BackwardParams& p) {
    const int heads = p.B * p.Hq, per = p.query_section * p.m_blocks, i = blockIdx.x / 2;
    const int sec = i / per, r = i - sec * per;
    const int inside = min(p.query_section, heads - sec * p.query_section);
    const int head = sec * p.query_section + r % inside;
    t.m = HAS_WINDOW ? p.m_blocks - 1 - r / inside : r / inside;
    t.b = head / p.Hq;
    t.h = head - t.b * p.Hq;
    t.keys = keys_of(p, t.b);
    span = keys_of_block(p, t);
    blocks = keys_of(span);
  }

  DEVICE bool has_blocks() const { return blocks.first < blocks.end; }
  DEVICE int first_token() const { return t.m * TOKENS; }
  DEVICE int head(const BackwardParams&) const { return t.h; }

  // Calls `self.step` for every block of keys, with their head and whether some query does not attend the
  // whole block.
  template <class Self> DEVICE void for_each_block(const BackwardParams& p, Self& self) const {
#pragma unroll 1
    for (int j = blocks.first; j < blocks.end; j++)
      self.step(t.h / p.group, j, j * TOKENS < span.all_lo || (j + 1) * TOKENS > span.all_hi);
  }
};
#else
// 64 keys of a head, or of a part of its group of query heads.
struct WideWork {
  KeyTile t;

  DEVICE explicit WideWork(const BackwardParams& p) : t(tile_at(p, blockIdx.x / 2)) {}

  DEVICE bool has_blocks() const { return t.first < t.last; }
  DEVICE int first_token() const { return t.n0; }
  DEVICE int head(const BackwardParams& p) const { return key_head(p, t); }

  // Calls `self.step` for every block of queries. Executed by whole warps.
  template <class Self> DEVICE void for_each_block(const BackwardParams& p, Self& self) const {
    for (int h = first_head(p, t), end = h + p.part_heads; h < end; h++)
      for (int base = t.first; base < t.last; base += 32) {
        const QueryBlocks found = query_blocks(p, t, h, base);
#pragma unroll 1
        for (u32 left = found.some; left; left &= left - 1) {
          const int bit = __ffs(left) - 1;
          self.step(h, base + bit, found.edge >> bit & 1);
        }
      }
  }
};
#endif

constexpr int SCORES = TOKENS / 2, GRADIENTS = HEAD_DIM / 8;  // accumulator registers of a thread
constexpr bool VALUES_HAVE_GRADIENT = !OF_QUERIES;            // computed in CTA 1

struct WideRole {
  const BackwardParams& p;
  const WideShared& sm;
  const WideWork& work;
  const int rank, tid, warp, lane;
  PipelineState<SLOTS> ring;            // halves of blocks
  PipelineState<NUMBER_SLOTS> numbers;  // LSE or delta of blocks
  u32 blocks = 0;                       // the number of blocks so far; the exchange has two slots

  DEVICE WideRole(const BackwardParams& p, const WideShared& sm, const WideWork& work)
      : p(p),
        sm(sm),
        work(work),
        rank(cta_rank()),
        tid(threadIdx.x & 127),
        warp(threadIdx.x >> 5 & 3),
        lane(threadIdx.x & 31) {}

  DEVICE u32 slot() const { return blocks & 1; }
  DEVICE u32 phase() const { return blocks >> 1 & 1; }
  DEVICE u32 full() const { return barrier(sm.full, ring.stage); }
  DEVICE u32 empty() const { return barrier(sm.empty, ring.stage); }
  DEVICE u32 stream() const { return slot_at<HALF_BYTES>(sm.stream, ring.stage); }
  DEVICE void next_block() { numbers.next(), blocks++; }

  // Arrives on behalf of a warp: in this CTA, and in the other one.
  DEVICE void release(u32 bar) const {
    __syncwarp();
    if (lane == 0) mbar_arrive(bar);
  }
  DEVICE void release_received() const {
    __syncwarp();
    if (lane == 0) mbar_arrive_at(barrier(sm.sent_empty, slot()), rank ^ 1);
  }

  DEVICE void wait_for_received(bool arms) const {
    const u32 bar = barrier(sm.received_full, slot());
    mbar_wait(bar, phase());
    if (arms && tid == 0) mbar_arrive_expect(bar, COLUMN_BYTES);
  }
};

// Executed by one thread.
DEVICE void init_barriers(const WideShared& sm) {
  constexpr int SCORE_WARPS = 4, GRADIENT_WARPS = 8, ALL = SCORE_WARPS + GRADIENT_WARPS;
  mbar_init(sm.resident_full, 1);
  const bool has_gradient = cta_rank() == 0 || VALUES_HAVE_GRADIENT;
  // every thread that reads LSE or delta arrives: racecheck does not accept one arrival per warp
  const int block_readers = 32 * SCORE_WARPS + (has_gradient ? GRADIENT_WARPS : 0);
  for (int i = 0; i < SLOTS; i++)
    mbar_init(barrier(sm.full, i), 1), mbar_init(barrier(sm.empty, i), block_readers);
  // weights are read by the score warps for dS and the dV warps; dS by the dK or dQ warps
  const int readers = cta_rank() == 1 ? GRADIENT_WARPS : VALUES_HAVE_GRADIENT ? ALL : SCORE_WARPS;
  for (int i = 0; i < 2; i++)
    mbar_init(barrier(sm.received_full, i), 1), mbar_init(barrier(sm.sent_empty, i), readers);
  mbar_init_fence();
  for (int i = 0; i < 2; i++) mbar_arrive_expect(barrier(sm.received_full, i), COLUMN_BYTES);
}

DEVICE void load_half(u32 dst, const TensorMap& map, u32 bar, int half, int row, int h, int b) {
#pragma unroll 1
  for (int i = 0; i < HALF_COLUMNS; i++)
    tma_load(dst + i * COLUMN_BYTES, map, bar, (half * HALF_COLUMNS + i) * 64, row, h, b);
}

// Executed by one warp, whose leader issues the copies.
struct Producer : WideRole {
  const bool leader;

  DEVICE Producer(const BackwardParams& p, const WideShared& sm, const WideWork& work)
      : WideRole(p, sm, work), leader(elect_one()) {}

  DEVICE void load_resident() {
    const TensorMap& map = OF_QUERIES ? (rank == 0 ? p.q : p.grad_out) : (rank == 0 ? p.k : p.v);
    for (int half = 0; half < 2; half++) {  // the first half is moved to registers
      const u32 bar = half == 0 ? full() : sm.resident_full;
      mbar_arrive_expect(bar, HALF_BYTES);
      const u32 to = half == 0 ? stream() : sm.resident;
      load_half(to, map, bar, half, work.first_token(), work.head(p), work.t.b);
    }
  }

  // The LSE or delta of a block's queries, copied with the first half.
  DEVICE void load_numbers([[maybe_unused]] int h, [[maybe_unused]] int m) const {
#if !OF_QUERIES
    const long long row = ((long long)(work.t.b * p.Hq + h) * p.m_blocks + m) * TOKENS;
    bulk_load(slot_at<NUMBER_BYTES>(sm.numbers, numbers.stage), (rank == 0 ? p.lse : p.delta) + row,
              NUMBER_BYTES, full());
    if (HAS_RANGES)
      bulk_load(slot_at<RANGE_BYTES>(sm.ranges, numbers.stage),
                p.ranges + (range_row(p, h, work.t.b) * p.m_blocks + m) * TOKENS, RANGE_BYTES, full());
#endif
  }

  DEVICE void step(int h, int block, bool) {
    constexpr u32 MORE = OF_QUERIES ? 0 : NUMBER_BYTES + HAS_RANGES * RANGE_BYTES;
    const TensorMap& map = OF_QUERIES ? (rank == 0 ? p.k : p.v) : (rank == 0 ? p.q : p.grad_out);
    for (int half = 0; half < 2; half++, ring.next())
      if (leader) {
        mbar_wait(empty(), ring.phase ^ 1);
        mbar_arrive_expect(full(), HALF_BYTES + (half == 0 ? MORE : 0));
        load_half(stream(), map, full(), half, block * TOKENS, h, work.t.b);
        if (half == 0) load_numbers(h, block);
      }
    next_block();
  }

  DEVICE void run() {
    if (work.has_blocks()) {
      if (leader) load_resident();
      ring.next();
    }
    wait_for_prior_grid();  // `preprocess` writes nothing read above
    work.for_each_block(p, *this);
  }
};

// Computes weights in CTA 0 and gradients of scores in CTA 1, and sends them to the other CTA.
struct ScoreConsumer : WideRole {
  float s[SCORES];
  u32 x[SCORES / 2];
  u32 own[HEAD_DIM / 8];  // the first half of the features of the cluster's own tokens
  const int row;  // this thread's first row of 64; the second is row + 8
#if OF_QUERIES
  float number[2];  // the LSE or delta of this thread's rows
  int2 range[2];
#endif

  DEVICE ScoreConsumer(const BackwardParams& p, const WideShared& sm, const WideWork& work)
      : WideRole(p, sm, work), row(warp * 16 + (lane >> 2)) {
#if OF_QUERIES
    read_rows();
#endif
  }

#if OF_QUERIES
  DEVICE void read_rows() {
    const QueryBlock& t = work.t;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = t.m * TOKENS + row + 8 * r;
      const long long at = (long long)(t.b * p.Hq + t.h) * p.m_blocks * TOKENS + i;
      number[r] = (rank == 0 ? p.lse : p.delta)[at];
#if HAS_RANGES
      range[r] = p.ranges[range_row(p, t.h, t.b) * p.m_blocks * TOKENS + i];
#elif HAS_WINDOW
      const int diagonal = i + t.keys - p.Sq;
      range[r] = make_int2(diagonal - p.window_left, min(t.keys, diagonal + p.window_right + 1));
#else
      range[r] = make_int2(0, t.keys);
#endif
    }
  }
#endif

  // The LSE or delta of elements i to i + 3, which belong to two queries: two rows, or two columns.
  DEVICE float4 numbers_of(u32 at, int i) const {
#if OF_QUERIES
    return make_float4(number[0], number[0], number[1], number[1]);
#else
    const float2 x = load_shared<float2>(at + i * 8);
    return make_float4(x.x, x.y, x.x, x.y);
#endif
  }

  DEVICE void mask_scores(int block) {
    [[maybe_unused]] const int first = block * TOKENS + (lane & 3) * 2;  // of the block's tokens
#if OF_QUERIES
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const int j = first + column_offset(i), r = i >> 1 & 1;
      if (j < range[r].x || j >= range[r].y) s[i] = -INFINITE;
    }
#elif HAS_RANGES
    const u32 ranges = slot_at<RANGE_BYTES>(sm.ranges, numbers.stage) + (lane & 3) * 16;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const int j = work.t.n0 + row + row_offset(i);
      const int2 range = load_shared<int2>(ranges + column_offset(i) * 8);
      if (j < range.x || j >= range.y) s[i] = -INFINITE;
    }
#else
    int distance[2];
    u32 count[2];
    attending_queries(p, work.t, first, row, distance, count);
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      if (!is_attended(i, distance, count)) s[i] = -INFINITE;
#endif
  }

  DEVICE void score_product() {
    const u32 more = cluster_descriptor(sm.resident, 16);
    mbar_wait(full(), ring.phase);
    wgmma_fence();
    wgmma_first_scores_start(s, own, cluster_descriptor(stream(), 16));
    wgmma_commit();
    ring.next();
    mbar_wait(full(), ring.phase);
    wgmma_fence();
    wgmma_scores(s, more, cluster_descriptor(stream(), 16));
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(s);
    mbar_arrive(empty());
    ring.next();
  }

  DEVICE void make_weights(int block, bool edge, u32 at) {
    if (edge) mask_scores(block);
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float4 l = numbers_of(at, i);
      s[i] = exp2_fast(exponent(p, s[i], l.x)), s[i + 1] = exp2_fast(exponent(p, s[i + 1], l.y));
      s[i + 2] = exp2_fast(exponent(p, s[i + 2], l.z)), s[i + 3] = exp2_fast(exponent(p, s[i + 3], l.w));
    }
  }

  // The gradient of a weight of 0 is 0 even if the value is NaN: the key may be masked out.
  DEVICE float score_gradient(float weight, float dp, float delta) const {
    return weight == 0.f ? 0.f : weight * (dp - delta);
  }

  DEVICE void make_gradients(u32 at) {
    wait_for_received(true);
    load_fragments(x, slot_at<COLUMN_BYTES>(sm.received, slot()));
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      const float4 d = numbers_of(at, i);
      const float2 a = unpack(x[i / 2]), b = unpack(x[i / 2 + 1]);
      s[i] = score_gradient(a.x, s[i], d.x), s[i + 1] = score_gradient(a.y, s[i + 1], d.y);
      s[i + 2] = score_gradient(b.x, s[i + 2], d.z), s[i + 3] = score_gradient(b.y, s[i + 3], d.w);
    }
  }

  // The reverse of `store_fragments`.
  template <int COUNT> DEVICE void load_fragments(u32 (&to)[COUNT], u32 from) const {
    const int r = warp * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      u32 y[4];
      const u32 column = from + i / 16 * COLUMN_BYTES;
      ldmatrix_x4<false>(y, column + r * 128 + (((i / 2 % 8 + (lane >> 4)) ^ (r & 7)) << 4));
#pragma unroll
      for (int e = 0; e < 4; e++) to[i + e] = y[e];
    }
  }

  DEVICE void read_own_tokens() {
    mbar_wait(full(), ring.phase);
    load_fragments(own, stream());
    fence_async_shared();
    mbar_arrive(empty());
    ring.next();
    mbar_wait(sm.resident_full, 0);
  }

  DEVICE void send() {
    const u32 from = slot_at<COLUMN_BYTES>(sm.sent, slot());
    mbar_wait(barrier(sm.sent_empty, slot()), phase() ^ 1);
    store_fragments(from, x, COLUMN_BYTES);
    fence_async_shared();
    named_barrier_sync(Barrier::SCORE_WARPGROUP, 128);
    if (tid == 0)
      bulk_send(slot_at<COLUMN_BYTES>(sm.received, slot()), from, COLUMN_BYTES,
                barrier(sm.received_full, slot()), rank ^ 1);
  }

  DEVICE void step(int, int block, bool edge) {
    const u32 at = opaque(slot_at<NUMBER_BYTES>(sm.numbers, numbers.stage) + (lane & 3) * 8);
    const u32 first_empty = empty();  // its LSE or delta is read last
    score_product();
    if (rank == 0) make_weights(block, edge, at);
    else make_gradients(at);
    fence_async_shared();  // as in forward.cu
    mbar_arrive(first_empty);
    if (rank == 1) release_received();
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) x[i] = pack(s[2 * i], s[2 * i + 1]);
    send();
    next_block();
  }

  DEVICE void run() {
    if (work.has_blocks()) read_own_tokens();
    work.for_each_block(p, *this);
    if (rank == 0 || VALUES_HAVE_GRADIENT) named_barrier_arrive(Barrier::STREAM_READ, 384);
  }
};

// Accumulates dK or dQ in CTA 0, dV in CTA 1: the w-th half of each half of the columns.
struct GradientConsumer : WideRole {
  const int w;
  float low[GRADIENTS], high[GRADIENTS];  // two products: ptxas rejects one with more registers than
                                          // the initial number per thread of a CTA of 512

  DEVICE GradientConsumer(const BackwardParams& p, const WideShared& sm, const WideWork& work, int w)
      : WideRole(p, sm, work), w(w) {}

  DEVICE void step(int, [[maybe_unused]] int block, bool) {
    wait_for_received(rank == 0 && w == 0);
    const u32 rows = cluster_descriptor(slot_at<COLUMN_BYTES>(sm.received, slot()), 16);
    wait_for_columns(block);
    wgmma_fence();
    wgmma_grads(low, rows, cluster_descriptor(columns(ring.stage), COLUMN_BYTES));
    wgmma_commit();
    const u32 first_empty = empty();
    ring.next();
    wait_for_columns(block);
    wgmma_fence();
    wgmma_grads(high, rows, cluster_descriptor(columns(ring.stage), COLUMN_BYTES));
    wgmma_commit();
    wgmma_wait<1>();
    release(first_empty);
    wgmma_wait<0>();
    fence_operand(low);
    fence_operand(high);
    release_received();
    release(empty());
    ring.next();
    next_block();
  }

  // This warpgroup's columns of a slot.
  DEVICE u32 columns(int slot) const {
    return slot_at<HALF_BYTES / 2>(slot_at<HALF_BYTES>(sm.stream, slot), w);
  }

  DEVICE void wait_for_columns([[maybe_unused]] int block) {
    mbar_wait(full(), ring.phase);
#if OF_QUERIES && HAS_KV_LENS  // memory past the length of a batch row is arbitrary
    const int keys = work.t.keys - block * TOKENS;
    if (keys < TOKENS)
      clear_rows<TOKENS, HEAD_DIM / 4>(columns(ring.stage), keys, TOKENS, Barrier::GRADIENT_WARPGROUP + w);
#endif
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < GRADIENTS; i++) low[i] = high[i] = 0.f;
    if (work.has_blocks()) release(empty()), ring.next();
    work.for_each_block(p, *this);
#if SPLITS_GROUP && !OF_QUERIES
    float* const to = key_sums_of(p, work.t) + rank * TOKENS * HEAD_DIM + w * TOKENS * HEAD_DIM / 4 + tid * 4;
    write_key_sums(to, low);
    write_key_sums(to + TOKENS * HEAD_DIM / 2, high);
    named_barrier_arrive(Barrier::STREAM_READ, 384);
#else
    store();
#endif
  }

  // Writes the gradients. The two warpgroups exchange whether their columns of each warp's rows are finite.
  DEVICE void store() {
    const bool is_nonfinite = __any_sync(~0u, probe(low) + probe(high) != 0.f);
    if (lane == 0) store_shared(sm.nonfinite + (w * 4 + warp) * 4, (u32)is_nonfinite);
    const bool is_of_values = !OF_QUERIES && rank == 1;
    const float factor = is_of_values ? 1.f : p.scale;
    u32 x[2][GRADIENTS / 2];
#pragma unroll
    for (int i = 0; i < GRADIENTS / 2; i++) {
      x[0][i] = pack(low[2 * i] * factor, low[2 * i + 1] * factor);
      x[1][i] = pack(high[2 * i] * factor, high[2 * i + 1] * factor);
    }
    named_barrier_sync(Barrier::STREAM_READ, 384);
#pragma unroll
    for (int half = 0; half < 2; half++) store_fragments(columns(half), x[half], COLUMN_BYTES);
    fence_async_shared();
    named_barrier_sync(Barrier::GRADIENTS, 256);
#if OF_QUERIES
    const int h = work.t.h, b = work.t.b;
    u32* const note = note_at(p, DQ, b * p.Hq + h, p.m_blocks * TOKENS, work.first_token());
    const TensorMap& map = p.dq;
#else
    const int h = work.t.part, b = work.t.b;
    const int rows = p.n_blocks * TOKENS;
    u32* const note = note_at(p, is_of_values ? DV : DK, b * p.Hkv + h, rows, work.first_token());
    const TensorMap& map = is_of_values ? p.dv : p.dk;
#endif
    const int features = is_of_values ? p.Dv : p.D;
    if (w == 0 && tid < 4) {
      u32 found[2];
      load_shared(found[0], sm.nonfinite + tid * 4), load_shared(found[1], sm.nonfinite + 16 + tid * 4);
      note[tid] = found[0] | found[1];
    }
    if (tid == 0) {
      for (int i = 0; i < HALF_COLUMNS; i++) {
        const int half = i & 1, column = i / 2 + w * (HALF_COLUMNS / 2);  // within the half
        const int feature = (half * HALF_COLUMNS + column) * 64;
        if (feature < features)
          tma_store(map, slot_at<HALF_BYTES>(sm.stream, half) + column * COLUMN_BYTES, feature,
                    work.first_token(), h, b);
      }
      tma_store_commit();
      tma_store_wait();
    }
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1)
#if OF_QUERIES
    wide_queries(const __grid_constant__ BackwardParams p) {
#else
    wide_keys(const __grid_constant__ BackwardParams p) {
#endif
  extern __shared__ __align__(1024) unsigned char shared[];
  const WideShared sm(smem_address(shared));
  launch_dependent_grids();
  if (threadIdx.x == 0) init_barriers(sm);
  cluster_sync();  // both CTAs' barriers are initialised
  const WideWork work(p);
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_dealloc<24>();
    if (threadIdx.x < 32) {
      Producer producer(p, sm, work);
      producer.run();
    }
  } else if (warpgroup == 1) {
    register_alloc<168>();
    ScoreConsumer consumer(p, sm, work);
    consumer.run();
  } else {
    register_alloc<160>();
    if (cta_rank() == 0 || VALUES_HAVE_GRADIENT) {
      GradientConsumer consumer(p, sm, work, warpgroup - 2);
      consumer.run();
    }
  }
  __syncwarp();
  cluster_sync();  // a CTA must not exit while the other still writes to its shared memory
}
