// Few queries of many heads against a cache of one latent head, whose values are the first VALUE_DIM features of its keys, for sm_90a. A CTA attends 64
// rows: `heads` heads of `tokens` queries. Two warpgroups hold half the columns of the output each. Tiles of 64 keys lie in two buffers; warpgroup 0
// computes the scores of those in the first, warpgroup 1 of those in the second, and each tells the other the weights, which take the place of the
// features that no value has. Rows of scores have one reference, which goes from tile to tile, so that sums on both sides agree. A buffer's halves
// are freed and filled one by one, and read column by column as they come.
// Which tiles a CTA takes: stretches.cuh. What becomes of a unit that several share: merge.cuh.
// Compile-time: IS_BF16 HEAD_DIM VALUE_DIM BLOCK_N IS_PAGED COPY_KEYS HAS_KV_LENS SLACK ROWS

constexpr int WIDTH = HEAD_DIM / 64, HALF = VALUE_DIM / 128;  // columns of 64 features: of a key, of half a value
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_DIM / 4;
constexpr u32 COLUMN_BYTES = 64 * 128, TILE_BYTES = WIDTH * COLUMN_BYTES;
constexpr u32 OWN_BARRIER = 1, SUMS_BARRIER = 3;  // named barriers: for each warpgroup, of its own threads and of those that wait for its sums
static_assert(ROWS == 64 && BLOCK_N == 64 && WIDTH == 2 * HALF + 1, "one column is left for the weights");

struct Params {
  TensorMap q, k;
  Element* out;          // (B, Sq, Hq, VALUE_DIM)
  float* lse;            // (B, Hq, Sq)
  float* partial;        // as merge.cuh has them
  float2* partial_stats;
  const int* kv_lens;    // (B,) or null
  const int* table;      // (B, table_stride) or null
  int B, Hq, Sq, Sk;     // Sk: what the cache holds
  int tokens, heads, head_blocks, width, units;  // blocks of rows: width * units or a few less
  int window_right, page, pages, table_stride;
  float scale_log2;
  const Element *q_rows, *k_rows;  // the tensors of the maps, for rows that are attended exactly
  Strides q_step, k_step;
};

DEVICE Row row_of(const Params& p, int b) {
  const int keys = keys_of(p, b);
  return {keys, 0, keys, 0, max(1, (int)((u32)(keys + BLOCK_N - 1) / BLOCK_N))};
}
DEVICE int units_of(const Params& p) { return p.units; }
DEVICE int width_of(const Params& p) { return p.width; }
DEVICE int rows_of(const Params& p) { return p.tokens * p.heads; }

// A stretch of n tiles takes as long as n of them; of a row of N it makes N / n parts, each of which is written and merged in about 0.05 of a tile's time:
// together that is least at the root of 0.05 N.
DEVICE Cut cut_of(const Params& p, int total, int shortest, int longest) {
  const int least = max(1, (int)sqrtf(0.05f * (float)longest));
  return {max(1, (int)min(gridDim.x / (u32)p.width, (u32)total / (u32)least)), total, 1};
}

constexpr u32 STAGED_BYTES = 16 * 64;  // of a warp's result: 32 columns of its rows

struct Smem {
  u32 q, k, staged, reference, sums, task, valid, q_full, q_empty, full, empty, weights;
  DEVICE Smem(u32 base) {
    q = base, k = q + TILE_BYTES, staged = k + 2 * TILE_BYTES, reference = staged + 8 * STAGED_BYTES;
    sums = reference + 2 * ROWS * 4, task = sums + 4 * ROWS * 4, valid = task + 2 * TASK_BYTES, q_full = valid + 8, q_empty = q_full + 8;
    full = q_empty + 8, empty = full + 2 * WIDTH * 8, weights = empty + 4 * 8;
  }
  DEVICE u32 tile(int stage) const { return k + stage * TILE_BYTES; }
  DEVICE u32 column_full(int stage, int x) const { return full + 8 * (stage * WIDTH + x); }
  DEVICE u32 half_empty(int stage, int half) const { return empty + 8 * (stage * 2 + half); }
  DEVICE u32 weights_full(int stage) const { return weights + 8 * stage; }
  DEVICE u32 weights_at(int stage) const { return tile(stage) + 2 * HALF * COLUMN_BYTES; }
};

// Which queries a block of rows has: row r is query token + r % tokens of head + r / tokens.
struct Block { int token, head; };
DEVICE Block block_of(const Params& p, const Task& t) {
  const u32 m = t.unit * p.width + blockIdx.x % (u32)p.width, heads = p.head_blocks;
  return {(int)(m / heads) * p.tokens, (int)(m % heads) * p.heads};
}

// A row of a unit: its LSE, and which of the output's rows it is; -1: none.
DEVICE int close_row(const Params& p, const Task& t, int row, float m2, float total, bool writes_lse, float& inverse) {
  const Block block = block_of(p, t);
  const int head = block.head + (u32)row / (u32)p.tokens, token = block.token + (u32)row % (u32)p.tokens;
  const float lse = finish_row(m2, total, 1.f, false, 0.f, inverse);
  if (row >= rows_of(p) || token >= p.Sq || head >= p.Hq) return -1;
  if (writes_lse) p.lse[((long long)t.b * p.Hq + head) * p.Sq + token] = lse;
  return (t.b * p.Sq + token) * p.Hq + head;
}

// Two columns of it, normalised.
DEVICE void put(const Params& p, int place, int column, float2 x, float inverse) {
  if (place >= 0) *(u32*)(p.out + (long long)place * VALUE_DIM + column) = pack(x.x * inverse, x.y * inverse);
}

// A row of a unit that is attended exactly.
struct ExactRow {
  const Params& p;
  const int b, first = 0;
  int last;
  float scale_log2;
  const Element* query;

  DEVICE ExactRow(const Params& p, const Task& t, int row) : p(p), b(t.b), scale_log2(p.scale_log2) {
    const Block block = block_of(p, t);
    const int head = block.head + (u32)row / (u32)p.tokens, token = block.token + (u32)row % (u32)p.tokens;
    query = row_at(p.q_rows, p.q_step, b, min(head, p.Hq - 1), min(token, p.Sq - 1));
    last = uniform(min(t.keys, t.keys - p.Sq + token + p.window_right + 1));
  }

  // The row of a key; in a page that does not exist, some other one.
  DEVICE const Element* value(int key) const {
    int from = b;
#if IS_PAGED
    from = min(max(page_of(key), 0), p.pages - 1), key %= p.page;
#endif
    return row_at(p.k_rows, p.k_step, from, 0, key);
  }

#if IS_PAGED
  DEVICE int page_of(int key) const { return p.table[(long long)b * p.table_stride + key / p.page]; }
  DEVICE bool attends(int key) const { return (u32)page_of(key) < (u32)p.pages; }
#else
  DEVICE bool attends(int) const { return true; }
#endif

  DEVICE float score(int key) const { return dot(query, value(key), HEAD_DIM); }
  DEVICE float weight(int, float x) const { return x; }
};

// Executed by one warp: two columns of a row for each lane.
DEVICE void replace_columns(const Params& p, const Task& t, int row, int column) {
  ExactColumns found;
  if (attend_exactly(ExactRow(p, t, row), column, VALUE_DIM, found)) {
    float inverse;
    const int place = close_row(p, t, row, found.top * p.scale_log2, found.sum, column == 0, inverse);
    put(p, place, column, found.x, inverse);
  }
}

constexpr int COPIES = BLOCK_N / COPY_KEYS;  // of one column

// A tile into its buffer, half by half: first the one whose values the warpgroup has that computes the scores, then the other, with the weights' column
// after it, which that one frees as it reads the weights last.
DEVICE void copy_tile(const Params& p, const Smem& sm, const Task& t, bool leader, int i, u32& phases) {
  const int lane = threadIdx.x & 31, stage = i & 1;
  int at = (t.tile + i) * BLOCK_N + lane * COPY_KEYS, found = -1;  // nothing lies there: zeros
  if (lane < COPIES && at < t.keys) {
#if IS_PAGED
    found = p.table[(long long)t.b * p.table_stride + at / p.page], at %= p.page;
    if (found >= p.pages) found = -1;
#else
    found = t.b;
#endif
  }
  const u32 valid = __ballot_sync(~0u, found >= 0);
  int token[COPIES], page[COPIES];
#pragma unroll
  for (int j = 0; j < COPIES; j++)  // smaller pages are one copy each
    page[j] = __shfl_sync(~0u, found, j), token[j] = COPY_KEYS < 64 ? 0 : __shfl_sync(~0u, at, j);
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {
    const int side = stage ^ turn;
    mbar_wait(sm.half_empty(stage, side), phases >> stage & 1 ^ 1);
    if (!leader) continue;
    if (turn == 0) store_shared(sm.valid + 4 * stage, valid);
#pragma unroll 1
    for (int i = 0; i < HALF + turn; i++) {
      const int x = i == HALF ? 2 * HALF : side * HALF + i;
      const u32 full = sm.column_full(stage, x), to = sm.tile(stage) + x * COLUMN_BYTES;
      mbar_expect(full, COLUMN_BYTES);
#pragma unroll
      for (int j = 0; j < COPIES; j++)
        tma_load_once(to + j * COPY_KEYS * 128, p.k, full, x * 64, token[j], 0, page[j], p.width == 1 ? FIRST_TO_LEAVE : AS_ANY);
    }
  }
  phases ^= 1 << stage;
}

// One warp; one lane issues copies.
DEVICE void copy(const Params& p, const Smem& sm) {
  const bool leader = elected();
  u32 phases = 0;  // a bit for each buffer: a unit begins in the first
  Ring<2> units;
  u32 q_phase = 0;
  for (Walk<Params> walk(p);; units.next(), q_phase ^= 1) {
    Task t = {};
    if (walk.at < walk.stop) t = walk.task(), walk.share(t);
    mbar_wait(sm.q_empty, q_phase ^ 1);
    if (leader) {
      store_task(sm.task + units.stage * TASK_BYTES, t);
      if (t.count == 0) mbar_arrive(sm.q_full);
      else {
        const Block block = block_of(p, t);
        mbar_expect(sm.q_full, rows_of(p) * HEAD_DIM * 2);
#pragma unroll 1
        for (int x = 0; x < WIDTH; x++) tma_load(sm.q + x * COLUMN_BYTES, p.q, sm.q_full, x * 64, block.token, block.head, t.b);
      }
    }
    if (t.count == 0) break;
#pragma unroll 1
    for (int i = 0; i < t.count; i++) copy_tile(p, sm, t, leader, i, phases);
    walk.next(t.count);
  }
}

// Warpgroup w: scores of the tiles in buffer w, columns w * VALUE_DIM / 2 and on of the output. One code for both: it takes half the time to compile.
struct Consumer {
  const Params& p;
  const Smem& sm;
  const int w, tid, warp, lane, row;  // row: of the block, this thread's first; the second is 8 below
  u32 phase = 0, other_phase = 0;     // of buffer w and of the other
  float s[SCORES], o[OUTPUTS];
  u32 weights[SCORES / 2];
  Softmax<SCORES> softmax;
  int diagonal;                    // the end of the keys that the block's first query attends, beyond the row's last or not

  DEVICE Consumer(const Params& p, const Smem& sm, int w)
      : p(p), sm(sm), w(w), tid(threadIdx.x & 127), warp(tid >> 5), lane(threadIdx.x & 31), row(warp * 16 + (lane >> 2)) {}

  DEVICE void begin(const Task& t) {
    const Block block = block_of(p, t);
    diagonal = t.keys - p.Sq + block.token + p.window_right + 1;
    softmax.reset();
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) o[i] = 0.f;
  }

  // The own half first: it is the first to come.
  DEVICE void score_product() {
    const u32 queries = descriptor_base(sm.q, 16), keys = descriptor_base(sm.tile(w), 16);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const int x = i == 2 * HALF ? i : i % HALF + (i < HALF ? w : 1 - w) * HALF, at = x * (COLUMN_BYTES / 16);
      mbar_wait(sm.column_full(w, x), phase);
      wgmma_fence();
      if (i == 0) wgmma_scores_start(s, queries + at, keys + at); else wgmma_scores(s, queries + at, keys + at);
    }
    wgmma_commit();
  }

  DEVICE void own_product() {
    const u32 values = descriptor_base(sm.tile(w) + w * HALF * COLUMN_BYTES, COLUMN_BYTES);
    wgmma_fence();
    wgmma_output(o, weights, values);
    wgmma_commit();
  }

  DEVICE void other_product() {
    const u32 values = descriptor_base(sm.tile(1 - w) + w * HALF * COLUMN_BYTES, COLUMN_BYTES), from = descriptor_base(sm.weights_at(1 - w), 16);
    wgmma_fence();
    wgmma_other(o, from, values);
    wgmma_commit();
  }

  DEVICE void rescale_output() {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      o[i] *= softmax.rescale0, o[i + 1] *= softmax.rescale0;
      o[i + 2] *= softmax.rescale1, o[i + 3] *= softmax.rescale1;
    }
  }

  // Scores to weights, relative to the reference that they may raise: whether they do.
  DEVICE bool weigh(const Task& t, int tile) {
    const int first = tile * BLOCK_N;
    u32 valid = ~0u;
#if IS_PAGED
    valid = load_shared<u32>(sm.valid + 4 * w);
#endif
    if (first + BLOCK_N > min(t.keys, diagonal) || (IS_PAGED && valid != (1u << BLOCK_N / COPY_KEYS) - 1)) {
      const int from = first + (lane & 3) * 2;
      const int ends[2] = {diagonal + (int)((u32)row % (u32)p.tokens), diagonal + (int)((u32)(row + 8) % (u32)p.tokens)};
      const int keys0 = min(t.keys, ends[0]) - from, keys1 = min(t.keys, ends[1]) - from;
#pragma unroll
      for (int i = 0; i < SCORES; i++) {
        const int j = column_offset(i);
        if (!(j < (i & 2 ? keys1 : keys0) && (valid >> (i >> 2) * 8 / COPY_KEYS & 1))) s[i] = -INFINITE;
      }
    }
    bool raised = softmax.raise<0>(s, p.scale_log2);
    raised |= softmax.raise<1>(s, p.scale_log2);
    const float share0 = softmax.weigh<0>(s, p.scale_log2), share1 = softmax.weigh<1>(s, p.scale_log2);
    if (raised) softmax.rescale_sums();
    softmax.add(share0, share1);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) weights[i] = pack(s[2 * i], s[2 * i + 1]);
    return raised;
  }

  // The weights and their reference, for the other warpgroup. Only this one has read the column that they overwrite.
  DEVICE void tell() {
    const int r = warp * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i += 4)
      store_matrix_x4(sm.weights_at(w) + r * 128 + (((i / 2 + (lane >> 4)) ^ (r & 7)) << 4), weights[i], weights[i + 1], weights[i + 2],
                      weights[i + 3]);
    if ((lane & 3) == 0) {
      const u32 at = sm.reference + (w * ROWS + row) * 4;
      store_shared(at, softmax.max0), store_shared(at + 32, softmax.max1);
    }
    fence_async_smem();
    mbar_arrive(sm.weights_full(w));
  }

  // Until the other's weights are there: its reference becomes this one's.
  DEVICE void hear() {
    mbar_wait(sm.weights_full(1 - w), other_phase);
#pragma unroll
    for (int x = 0; x < HALF; x++) mbar_wait(sm.column_full(1 - w, w * HALF + x), other_phase);
    const u32 at = sm.reference + ((1 - w) * ROWS + row) * 4;
    const float top0 = load_shared<float>(at), top1 = load_shared<float>(at + 32);
    if (!__any_sync(~0u, top0 != softmax.max0 || top1 != softmax.max1)) return;
    softmax.rescale0 = exp2_fast((softmax.max0 - top0) * p.scale_log2), softmax.rescale1 = exp2_fast((softmax.max1 - top1) * p.scale_log2);
    softmax.max0 = top0, softmax.max1 = top1, softmax.sum0 *= softmax.rescale0, softmax.sum1 *= softmax.rescale1;
    rescale_output();
  }

  // Values past the row's last key may hold anything, and 0 * NaN is NaN: they become zeros, in this warpgroup's half of the buffer.
  DEVICE void clear_values(const Task& t, int stage, int tile) {
    const int from = t.keys - tile * BLOCK_N;
    if (from >= BLOCK_N) return;
#pragma unroll 1
    for (int i = from * 8 + tid; i < BLOCK_N * 8; i += 128)
#pragma unroll
      for (int x = 0; x < HALF; x++) store_shared(sm.tile(stage) + (w * HALF + x) * COLUMN_BYTES + i * 16, make_int4(0, 0, 0, 0));
    fence_async_smem();
    named_sync(OWN_BARRIER + w, 128);
  }

  // A tile whose scores are the other's.
  DEVICE void follow(const Task& t, int tile) {
    hear();
    clear_values(t, 1 - w, tile);
    other_product();
    wgmma_wait<0>();
    pin(o);
    mbar_arrive(sm.half_empty(1 - w, w));
    other_phase ^= 1;
  }

  // The rest of a tile whose scores are this warpgroup's.
  DEVICE void conclude(const Task& t, int tile, bool raised) {
    if (raised) rescale_output();
    clear_values(t, w, tile);
    own_product();
    wgmma_wait<0>();
    pin(o);
    mbar_arrive(sm.half_empty(w, w));
    phase ^= 1;
  }

  // The first computes scores, then the other's product; the second has that under way while its own scores become weights, as its tile comes later.
  // A unit may end with a tile of the first's.
  DEVICE void attend(const Task& t, int i) {
    const int tile = t.tile + i + w;
    const bool scores = i + w < t.count;
    if (scores) {
      score_product();
      if (w) hear(), other_product(), wgmma_wait<1>(); else wgmma_wait<0>();
      pin(s);
      if (i + 2 >= t.count) mbar_arrive(sm.q_empty);
      const bool raised = weigh(t, tile);
      tell();
      softmax.pin();
      wgmma_wait<0>();
      pin(o);
      if (w) mbar_arrive(sm.half_empty(0, 1)), other_phase ^= 1;
      conclude(t, tile, raised);
    } else mbar_arrive(sm.q_empty);
    if (w ? !scores : i + 1 < t.count) follow(t, t.tile + i + 1 - w);
  }

  // Normalised, with LSE, to where it belongs; maxima in log2 units. A warp's 32 columns at a time go through shared memory, for stores of 16 bytes:
  // shuffles would need half as many instructions again.
  DEVICE void write(const Task& t, const float (&maxima)[2], const float (&sums)[2]) {
    float inverse[2];
    unsigned short* to[2];
    bool exists[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int place = close_row(p, t, row + 8 * r, maxima[r], sums[r], w == 0 && (lane & 3) == 0, inverse[r]);
      exists[r] = place >= 0, to[r] = p.out + (long long)place * VALUE_DIM + w * (VALUE_DIM / 2) + (lane & 3) * 8;
    }
    const u32 at = sm.staged + (threadIdx.x / 32 - 4) * STAGED_BYTES;
    const u32 put = at + (lane & 7) * 64 + ((lane >> 3 ^ lane >> 1) & 3) * 16, got = at + (lane >> 2) * 64 + ((lane ^ lane >> 3) & 3) * 16;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 16) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = pack(o[i + 4 * j + 2 * r] * inverse[r], o[i + 4 * j + 2 * r + 1] * inverse[r]);
        store_matrix_x4(put + r * 512, x[0], x[1], x[2], x[3]);
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

  // Rows of this warp, a bit for each, with a finite sum and values that are not.
  DEVICE u32 unusable_rows(const float (&sums)[2]) const {
    float probe0 = 0.f, probe1 = 0.f;  // NaN where a value is not finite
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      probe0 += 0.f * o[i] + 0.f * o[i + 1];
      probe1 += 0.f * o[i + 2] + 0.f * o[i + 3];
    }
    return rows_of_lanes(probe0 != 0.f && is_finite(sums[0]), probe1 != 0.f && is_finite(sums[1]));
  }

  // Executed by one warp, after these rows have been written: its half of their columns.
  DEVICE void replace_rows(const Task& t, u32 unusable) const {
#pragma unroll 1
    for (; unusable; unusable &= unusable - 1)
#pragma unroll 1
      for (int x = 0; x < VALUE_DIM / 2; x += 64)
        replace_columns(p, t, warp * 16 + __ffs(unusable) - 1, w * (VALUE_DIM / 2) + x + lane * 2);
  }

  DEVICE void finish(const Task& t, int parity) {
    softmax.reduce();
    const u32 of_rows = sm.sums + (parity * 2 * ROWS + row) * 4, own = of_rows + w * ROWS * 4, other = of_rows + (1 - w) * ROWS * 4;
    if ((lane & 3) == 0) store_shared(own, softmax.sum0), store_shared(own + 32, softmax.sum1);
    named_arrive(SUMS_BARRIER + w, 256);
    named_sync(SUMS_BARRIER + 1 - w, 256);
    const float maxima[2] = {softmax.max0 * p.scale_log2, softmax.max1 * p.scale_log2};
    const float sums[2] = {softmax.sum0 + load_shared<float>(other), softmax.sum1 + load_shared<float>(other + 32)};
    if (t.parts == 1) {
      const u32 unusable = unusable_rows(sums);
      write(t, maxima, sums);
      if (unusable) replace_rows(t, unusable);
      return;
    }
    if (warp * 16 >= rows_of(p)) return;  // nobody's rows
    const int at = own_slot(t) * ROWS + row;
    float* to = p.partial + at * VALUE_DIM + w * (VALUE_DIM / 2) + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      *(float2*)(to + i * 2) = make_float2(o[i], o[i + 1]);
      *(float2*)(to + i * 2 + 8 * VALUE_DIM) = make_float2(o[i + 2], o[i + 3]);
    }
    if (w == 0 && (lane & 3) == 0) p.partial_stats[at] = make_float2(maxima[0], sums[0]), p.partial_stats[at + 8] = make_float2(maxima[1], sums[1]);
  }

  DEVICE void work() {
    for (Ring<2> units;; units.next()) {
      mbar_wait(sm.q_full, units.stage);
      const u32 at = sm.task + units.stage * TASK_BYTES;
      const Task t = load_task(at);
      if (t.count == 0) break;
      begin(t);
#pragma unroll 1
      for (int i = 0; i < t.count; i += 2)
        attend(t, i);
      const Task done = load_task(sm.task + units.stage * TASK_BYTES);  // again: most of it takes no registers until here
      finish(done, units.stage);
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1) mla(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Smem sm(smem_address(shared));
  if (threadIdx.x == 0) {
    // by thread: racecheck does not follow one thread's arrival for its warp
    mbar_init(sm.q_full, 1), mbar_init(sm.q_empty, 256);
#pragma unroll 1
    for (int i = 0; i < 2 * WIDTH; i++) mbar_init(sm.full + 8 * i, 1);
    for (int i = 0; i < 4; i++) mbar_init(sm.empty + 8 * i, 128);
    for (int i = 0; i < 2; i++) mbar_init(sm.weights_full(i), 128);
    mbar_init_fence();
    prefetch_map(p.q), prefetch_map(p.k);
  }
  clear_queries(sm.q, TILE_BYTES);
  __syncthreads();
  wait_for_last_grid(), next_grid_may_start();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_release<40>();
    if (threadIdx.x < 32) copy(p, sm);
  } else {
    register_claim<232>();
    Consumer consumer(p, sm, warpgroup - 1);
    consumer.work();
  }
}

extern "C" __global__ void __launch_bounds__(512) merge_parts(const __grid_constant__ Params p) { merge(p); }
