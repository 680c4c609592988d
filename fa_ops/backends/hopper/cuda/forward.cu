// Attention forward for sm_90a. Warpgroup 0 is the copy producer; the others own 64 query rows each. Each consumer keeps one Q.K^T
// and one P.V in flight; they take turns on the tensor cores so that one's softmax hides under another's products.
// Compile-time: IS_BF16 BLOCK_M BLOCK_N HEAD_DIM VALUE_DIM STAGES QUERY_STAGES SLACK IS_RAGGED HAS_LEFT HAS_KV_LENS HAS_RANGES HAS_SOFTCAP HAS_ALIBI
// HAS_SINKS HAS_MASK HAS_DROPOUT BIAS_BITS IS_PAGED COPY_KEYS

constexpr int CONSUMERS = BLOCK_M / 64;
constexpr int WIDTH = HEAD_DIM / 64, VALUE_WIDTH = VALUE_DIM / 64;  // a tile is columns of 128 bytes, one swizzle atom wide each
constexpr int SCORES = BLOCK_N / 2, OUTPUTS = VALUE_DIM / 2;
constexpr u32 Q_BYTES = 64 * HEAD_DIM * 2, K_BYTES = BLOCK_N * HEAD_DIM * 2, V_BYTES = BLOCK_N * VALUE_DIM * 2;
constexpr u32 OWN_BARRIER = 1, TURN_BARRIER = OWN_BARRIER + CONSUMERS;  // named barriers, one of each per consumer

constexpr u32 MASK_BYTES = HAS_MASK ? 64 * 16 : 0;  // a consumer's rows, a bit for each key of a block
constexpr u32 BIAS_BYTES = 64 * BLOCK_N * BIAS_BITS / 8;  // a consumer's rows
constexpr int READERS = 128 * CONSUMERS + (HAS_MASK || BIAS_BITS ? 32 * CONSUMERS : 0);  // of a task

// A step may take its scores to stay near the reference of those before, and look at the sum of their weights instead, which it needs anyway. Where
// that was wrong, the weights are lowered; a warp that finds infinite ones makes its scores again. Not where those would cost much to make again, or
// what they are made of is given back by then; and wide heads gain nothing, as their softmax hides under their products.
constexpr bool IS_BOLD = HEAD_DIM <= 128 && !(HAS_MASK || BIAS_BITS || HAS_DROPOUT);
constexpr float MOST = 16384.f;  // of a thread's share of a row's sum: more than scores make that were looked at
constexpr float HUGE = 1e30f;    // a share that has an inverse
constexpr float HUGE_SCORE = 1 << 20;  // in log2 units: its difference from another, scaled before it is taken, errs by a sixteenth

// Of a tile's blocks a consumer visits what its own rows attend, but where a warp beside it brings something for each block.
constexpr bool HAS_OWN_BLOCKS = !(HAS_MASK || BIAS_BITS);

static_assert(BLOCK_M % 64 == 0 && BLOCK_N % 16 == 0, "whole products");
static_assert(QUERY_STAGES <= 2, "a place for each task");
static_assert(!HAS_MASK || BLOCK_N <= 128, "eight lanes of 16 keys, and four words a row");
static_assert(!(HAS_MASK || BIAS_BITS) || CONSUMERS <= 3, "a warp for each beside the one that copies");
static_assert(!IS_BOLD || (SCORES / 2 << SLACK) < MOST, "a step corrects or raises a reference, not both");
static_assert(!IS_PAGED || !(HAS_MASK || BIAS_BITS || HAS_RANGES), "what pages hold before a range may be anything");
static_assert(!HAS_DROPOUT || SCORES / 2 <= 32, "a bit for each of a row's weights");

struct Smem {
  u32 pages;  // of each buffer of keys, which of its copies are of a page
  u32 q, k, v, bias, q_full, q_empty, k_full, k_empty, v_full, v_empty, task_full, task_empty, task, mask, mask_full, mask_empty;
  DEVICE Smem(u32 base) {
    q = base, k = q + QUERY_STAGES * CONSUMERS * Q_BYTES, v = k + STAGES * K_BYTES;
    bias = v + STAGES * V_BYTES, q_full = bias + CONSUMERS * BIAS_BYTES;
    q_empty = q_full + 8 * QUERY_STAGES * CONSUMERS, k_full = q_empty + 8 * QUERY_STAGES * CONSUMERS;
    k_empty = k_full + 8 * STAGES, v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
    task_full = v_empty + 8 * STAGES, task_empty = task_full + 16, task = (task_empty + 16 + 15) & ~15;
    mask = task + 2 * TASK_BYTES, mask_full = mask + CONSUMERS * MASK_BYTES, mask_empty = mask_full + 8 * CONSUMERS;
    pages = mask;
  }
};

// One block of K or V into the next buffer of its ring.
template <int COLUMNS>
DEVICE void load_block(u32 base, u32 full, u32 empty, const TensorMap& map, Ring<STAGES>& ring, int block, int h, int b) {
  constexpr u32 BYTES = COLUMNS * BLOCK_N * 128;
  const u32 bar = full + 8 * ring.stage, at = base + ring.stage * BYTES;
  mbar_wait(empty + 8 * ring.stage, ring.phase ^ 1);
  mbar_expect(bar, BYTES);
#pragma unroll
  for (int x = 0; x < COLUMNS; x++) tma_load(at + x * BLOCK_N * 128, map, bar, x * 64, block * BLOCK_N, h, b);
  ring.next();
}

// Where a task's queries are for a consumer, and the phase of the barriers there: the two tasks have a place each, or share one.
DEVICE int place_of(const Ring<2>& tasks, int c) { return QUERY_STAGES == 2 ? tasks.stage * CONSUMERS + c : c; }
DEVICE u32 phase_of(const Ring<2>& tasks) { return QUERY_STAGES == 2 ? tasks.phase : tasks.stage; }

DEVICE void load_queries(const Params& p, const Smem& sm, const Tile& tile, const Ring<2>& tasks) {
#pragma unroll
  for (int c = 0; c < CONSUMERS; c++) {
    const int at = place_of(tasks, c);
    mbar_wait(sm.q_empty + 8 * at, phase_of(tasks) ^ 1);
    mbar_expect(sm.q_full + 8 * at, Q_BYTES);
#pragma unroll
    for (int x = 0; x < WIDTH; x++)
      tma_load(sm.q + at * Q_BYTES + x * 64 * 128, p.q, sm.q_full + 8 * at, x * 64, tile.m0 + c * 64, tile.h, tile.b);
  }
}

#if IS_PAGED
constexpr int COPIES = BLOCK_N / COPY_KEYS;

// Of a block, the page of this lane's copy; below 0 there is none.
DEVICE int page_of(const Params& p, const Task& task, int block) {
  const int copy = threadIdx.x & 31, at = block * BLOCK_N + copy * COPY_KEYS;
  if (block < task.n.first || copy >= COPIES || at >= task.n.hi) return -1;
  const int page = p.pages.table[(long long)task.tile.b * p.pages.stride + at / p.pages.size];
  return page < p.pages.count ? page : -1;
}

// By a warp, each lane of which knows a copy's page; `note`: where consumers read which copies have one, or 0. Zeros come instead of the others.
template <int COLUMNS>
DEVICE void load_pages(const Params& p, u32 base, u32 full, u32 empty, u32 note, const TensorMap& map, Ring<STAGES>& ring, int block, int h, int page,
                       bool leader) {
  constexpr u32 BYTES = COLUMNS * BLOCK_N * 128;
  const u32 bar = full + 8 * ring.stage, at = base + ring.stage * BYTES, found = __ballot_sync(~0u, page >= 0);
  mbar_wait(empty + 8 * ring.stage, ring.phase ^ 1);
  if (leader) {
    if (note) store_shared(note + 4 * ring.stage, found);
    mbar_expect(bar, BYTES);
  }
#pragma unroll 1
  for (int j = 0; j < COPIES; j++) {
    const int own = __shfl_sync(~0u, page, j), token = COPY_KEYS < 64 ? 0 : (block * BLOCK_N + j * COPY_KEYS) % p.pages.size;
    if (leader)
#pragma unroll
      for (int x = 0; x < COLUMNS; x++) tma_load(at + (x * BLOCK_N + j * COPY_KEYS) * 128, map, bar, x * 64, token, h, own);
  }
  ring.next();
}

// By a warp. Which pages a block has is asked while the block before it is on its way.
DEVICE void load(const Params& p, const Smem& sm, const Task& task, const Ring<2>& tasks, Ring<STAGES>& k, Ring<STAGES>& v, bool leader) {
  const int h = task.tile.h / p.group;
  int of_values = -1, of_keys, next = page_of(p, task, task.n.last - 1);
#pragma unroll 1
  for (int j = task.n.last - 1;; j--, of_values = of_keys) {
    of_keys = next, next = page_of(p, task, j - 1);
    if (j >= task.n.first) load_pages<WIDTH>(p, sm.k, sm.k_full, sm.k_empty, sm.pages, p.k, k, j, h, of_keys, leader);
    if (j < task.n.last - 1) load_pages<VALUE_WIDTH>(p, sm.v, sm.v_full, sm.v_empty, 0, p.v, v, j + 1, h, of_values, leader);
    else if (leader) load_queries(p, sm, task.tile, tasks);
    if (j < task.n.first) break;
  }
}
#endif

DEVICE void load(const Params& p, const Smem& sm, const Tile& tile, const Blocks& n, const Ring<2>& tasks, Ring<STAGES>& k, Ring<STAGES>& v) {
  const int h = tile.h / p.group;
  auto load_k = [&](int block) { load_block<WIDTH>(sm.k, sm.k_full, sm.k_empty, p.k, k, block, h, tile.b); };
  auto load_v = [&](int block) { load_block<VALUE_WIDTH>(sm.v, sm.v_full, sm.v_empty, p.v, v, block, h, tile.b); };
  // keys come a block ahead of values, and queries after the first ones. One at a time: four are a sixth of the kernel's code, and wait as long
#pragma unroll 1
  for (int j = n.last - 1;; j--) {
    if (j >= n.first) load_k(j);
    if (j == n.last - 1) load_queries(p, sm, tile, tasks); else load_v(j + 1);
    if (j < n.first) break;
  }
}

// One warp; one lane issues copies, all find the bounds of a tile.
DEVICE void produce(const Params& p, const Smem& sm) {
  const bool leader = elected();
  Ring<STAGES> k, v;
  Ring<2> tasks;
  for (int t = blockIdx.x;; tasks.next()) {
    Task task;
    if (t < p.tiles) task = task_at(p, t); else task.tile.m0 = NO_TASK;
    if (leader) {
      mbar_wait(sm.task_empty + 8 * tasks.stage, tasks.phase ^ 1);
      publish(sm.task + tasks.stage * TASK_BYTES, task);
      mbar_arrive(sm.task_full + 8 * tasks.stage);
    }
    if (t >= p.tiles) break;
    if (leader) t = next_tile(p, t);
#if IS_PAGED
    load(p, sm, task, tasks, k, v, leader);
#else
    if (leader) load(p, sm, task.tile, task.n, tasks, k, v);
#endif
    t = __reduce_max_sync(~0u, leader ? t : 0);
  }
}

// By a warp that serves a consumer.
DEVICE Task take_task(const Smem& sm, const Ring<2>& tasks) {
  mbar_wait(sm.task_full + 8 * tasks.stage, tasks.phase);
  const Task task = published(sm.task + tasks.stage * TASK_BYTES);
  mbar_arrive(sm.task_empty + 8 * tasks.stage);  // by thread: racecheck does not follow one thread's arrival for its warp
  return task;
}

#if HAS_MASK
// One warp for each consumer: the mask of its rows and every block that it visits, one block ahead. Eight lanes a row, 16 keys each.
DEVICE void fill_mask(const Params& p, const Smem& sm, int c) {
  const int lane = threadIdx.x & 31, chunk = lane & 7, first = lane >> 3;  // of its rows, every fourth
  const u32 to = sm.mask + c * MASK_BYTES + first * 16 + chunk * 2;
  Ring<2> tasks;
  Ring<1> blocks;
  for (;; tasks.next()) {
    const Task task = take_task(sm, tasks);
    if (task.tile.m0 == NO_TASK) break;
    const int row = task.tile.m0 + c * 64 + first;
    const int there = chunk >= BLOCK_N / 16 ? 0 : p.mask_q ? p.Sq - row : 64;
    const unsigned char* from = p.mask + task.tile.b * p.mask_b + task.tile.h * p.mask_h + row * p.mask_q + chunk * 2;
    for (int j = task.n.last - 1; j >= task.n.first; j--, blocks.next()) {
      const unsigned char* at = from + j * (BLOCK_N / 8);
      unsigned short found[16];
#pragma unroll
      for (int i = 0; i < 16; i++, at += 4 * p.mask_q) found[i] = i * 4 < there ? *(const unsigned short*)at : 0;
      mbar_wait(sm.mask_empty + 8 * c, blocks.phase ^ 1);
#pragma unroll
      for (int i = 0; i < 16; i++) store_shared(to + i * 64, found[i]);
      mbar_arrive(sm.mask_full + 8 * c);
    }
  }
}
#endif

#if BIAS_BITS
// One warp for each consumer: the bias of its rows and every block that it visits, one block ahead.
DEVICE void load_bias(const Params& p, const Smem& sm, int c) {
  const bool leader = elected();
  const u32 full = sm.mask_full + 8 * c;
  Ring<2> tasks;
  Ring<1> blocks;
  for (;; tasks.next()) {
    const Task task = take_task(sm, tasks);
    if (task.tile.m0 == NO_TASK) break;
    for (int j = task.n.last - 1; j >= task.n.first; j--, blocks.next()) {
      if (!leader) continue;
      mbar_wait(sm.mask_empty + 8 * c, blocks.phase ^ 1);
      mbar_expect(full, BIAS_BYTES);
      load_bias_tile<BLOCK_N>(sm.bias + c * BIAS_BYTES, p.bias, full, task.tile.m0 + c * 64, j * BLOCK_N, task.tile.h, task.tile.b);
    }
  }
}
#endif

// A row of the output that is attended exactly.
struct ExactRow {
  const Params& p;
  const Tile& tile;
  const int row, keys;
  int first, last;
  float scale_log2;
  const Element* query;

  DEVICE ExactRow(const Params& p, const Tile& tile, int row)
      : p(p), tile(tile), row(row), keys(keys_of(p, tile.b)), scale_log2(p.scale_log2), query(row_at(p.q_rows, p.q_step, tile.b, tile.h, row)) {
    const Run run = row_run(p, tile, row, keys);
    first = uniform(run.lo), last = uniform(run.hi);
  }

  // The row of a key in `x`; in a page that does not exist, some other one.
  DEVICE const Element* at(const Element* x, const Strides& step, int key) const {
    int b = tile.b;
#if IS_PAGED
    b = min(max(page_of(key), 0), p.pages.count - 1), key %= p.pages.size;
#endif
    return row_at(x, step, b, tile.h / p.group, key);
  }

#if IS_PAGED
  DEVICE int page_of(int key) const { return p.pages.table[(long long)tile.b * p.pages.stride + key / p.pages.size]; }
#endif

  DEVICE bool attends([[maybe_unused]] int key) const {
#if HAS_MASK
    return p.mask[tile.b * p.mask_b + tile.h * p.mask_h + row * p.mask_q + key / 8] >> (key & 7) & 1;
#elif IS_PAGED
    return (u32)page_of(key) < (u32)p.pages.count;
#else
    return true;
#endif
  }

  DEVICE float score(int key) const {
    float s = dot(query, at(p.k_rows, p.k_step, key), p.D);
#if HAS_SOFTCAP
    s = capped(s * p.score_scale);
#endif
#if HAS_ALIBI
    s -= p.alibi[tile.b * p.alibi_b + tile.h] * p.alibi_unit * fabsf((float)(row + keys - p.Sq - key));
#endif
#if BIAS_BITS
    const float2 pair = floats(bias_pair(bias_row(p.bias, tile.b, tile.h, row), p.bias, key & ~1, 0));
    const float bias = key & 1 ? pair.y : pair.x;
    s = bias == -INFINITE ? bias : s * p.bias.unit + bias;  // the key is left out even where its score is NaN
#endif
    return s;
  }

  DEVICE float weight([[maybe_unused]] int key, float x) const {
#if HAS_DROPOUT
    const u32 own = p.dropout.row_keys[(long long)(tile.b * p.Hq + tile.h) * p.dropout.rows + row] + key * COLUMN_KEY;
    if (compared(own, p.dropout.threshold) < p.dropout.threshold) return 0.f;
#endif
    return x;
  }

  DEVICE const Element* value(int key) const { return at(p.v_rows, p.v_step, key); }
};

// A row's LSE, and what its output must be multiplied with.
DEVICE float close_row(const Params& p, const Tile& tile, float row_max, float sum, float& inverse) {
#if HAS_SINKS
  const float lse = finish_row(row_max, sum, p.scale_log2, true, p.sinks[tile.h], inverse);
#else
  const float lse = finish_row(row_max, sum, p.scale_log2, false, 0.f, inverse);
#endif
#if HAS_DROPOUT
  inverse *= p.dropout.scale;
#endif
  return lse;
}

DEVICE Element* output_row(const Params& p, const Tile& tile, int row) { return p.out + (((long long)tile.b * p.Sq + row) * p.Hq + tile.h) * p.Dv; }
DEVICE void write_lse(const Params& p, const Tile& tile, int row, float lse) { p.lse[(long long)(tile.b * p.Hq + tile.h) * p.Sq + row] = lse; }

// Executed by one warp: rows `first + i` of a tile, which have been written, for each bit i of `unusable`; `lost` are those of which nothing is right.
DEVICE void replace_rows(const Params& p, const Tile& tile, int first, u32 unusable, u32 lost) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll 1
  for (; unusable; unusable &= unusable - 1) {
    const int i = __ffs(unusable) - 1, row = first + i;
    const ExactRow exact(p, tile, row);
    u32* const to = (u32*)output_row(p, tile, row);
#pragma unroll 1
    for (int x = 0; x < VALUE_DIM; x += 64) {
      const int column = x + lane * 2;
      const bool exists = column < p.Dv;
      ExactColumns found;
      if (attend_exactly(exact, column, p.Dv, found, lost >> i & 1)) {
        float inverse;
        const float lse = close_row(p, tile, found.top, found.sum, inverse);
        if (exists) to[column / 2] = pack(found.x.x * inverse, found.x.y * inverse);
        if (p.lse && column == 0) write_lse(p, tile, row, lse);
      }
    }
  }
}

// What a consumer warpgroup holds: one tile's running state, in registers.
struct Consumer {
  const Params& p;
  const Smem& sm;
  const int c, tid, lane;
  Ring<2> tasks;
  u32 queries;   // this tile's, as descriptors say it
  Ring<STAGES> k, v;
  Ring<1> mask;  // or bias: never both
  float s[SCORES], o[OUTPUTS];
  u32 weights[SCORES / 2];
  Softmax<SCORES> softmax;
  Run run0, run1;   // what this thread's two rows attend
  u32 found;        // which of a block's copies are of a page
  bool is_blind;    // a row of this warp has no reference yet: a step has to look at its scores
  float slope;
  int diagonal;     // with ALiBi: the key that stands at the first of this thread's rows

  DEVICE Consumer(const Params& p, const Smem& sm, int c)
      : p(p), sm(sm), c(c), tid(threadIdx.x & 127), lane(threadIdx.x & 31) {}

  DEVICE void take_turn() { named_sync(TURN_BARRIER + c, 256); }
  DEVICE void pass_turn() { named_arrive(TURN_BARRIER + (c + 1 == CONSUMERS ? 0 : c + 1), 256); }

  DEVICE void score_product() {
#if IS_PAGED
    found = load_shared<u32>(sm.pages + 4 * k.stage);
#endif
    const u32 keys = descriptor_base(sm.k + k.stage * K_BYTES, 16);
    wgmma_fence();
    wgmma_scores_start(s, queries, keys);
    wgmma_commit();
  }

  DEVICE void value_product() {
    const u32 values = descriptor_base(sm.v + v.stage * V_BYTES, BLOCK_N * 128);
    wgmma_fence();
    wgmma_output(o, weights, values);
    wgmma_commit();
  }

  DEVICE void release(u32 empty, Ring<STAGES>& ring) {
    if (tid == 0) mbar_arrive(empty + 8 * ring.stage);
    ring.next();
  }

  // Of the block in that slot. Nothing of a tile reads its queries after the last one: the next tile's may come.
  DEVICE void release_keys(int slot, bool is_last) {
    if (lane == 0) mbar_arrive(sm.k_empty + 8 * slot);
    if (is_last) release_queries();
  }

  DEVICE void release_queries() {
    if (lane == 0) mbar_arrive(sm.q_empty + 8 * place_of(tasks, c));
  }

  DEVICE int column(int block, int i) const { return block * BLOCK_N + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1); }

#if HAS_MASK
  // A bit of a row's 128 for each key; this thread's are two of every eight.
  DEVICE void apply_mask() {
    const u32 at = sm.mask + c * MASK_BYTES + ((tid >> 5) * 16 + (lane >> 2)) * 16;
    mbar_wait(sm.mask_full + 8 * c, mask.phase);
    int4 x[2] = {load_shared<int4>(at), load_shared<int4>(at + 8 * 16)};
    mbar_arrive(sm.mask_empty + 8 * c);
    mask.next();
    const u32 words[2][4] = {{(u32)x[0].x, (u32)x[0].y, (u32)x[0].z, (u32)x[0].w}, {(u32)x[1].x, (u32)x[1].y, (u32)x[1].z, (u32)x[1].w}};
    constexpr int WORDS = (BLOCK_N + 31) / 32;
    bool all = true;
#pragma unroll
    for (int w = 0; w < WORDS; w++) all = all && (words[0][w] & words[1][w]) == (w * 32 + 32 <= BLOCK_N ? ~0u : (1u << BLOCK_N % 32) - 1);
    if (__all_sync(~0u, all)) return;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const u32 mine = words[i >> 1 & 1][i >> 4] >> (lane & 3) * 2;
      if (!(mine & 1u << ((i >> 2 & 3) * 8 + (i & 1)))) s[i] = -INFINITE;
    }
  }
#endif

#if BIAS_BITS
  // From accumulator units to those of the bias, which is added.
  DEVICE void add_bias() {
    mbar_wait(sm.mask_full + 8 * c, mask.phase);
    add_bias_tile<false>(s, sm.bias + c * BIAS_BYTES, 0, p.bias.unit);
    fence_async_smem();  // reads may still be in flight: where products take all of shared memory's time, the next copy would overtake them
    mbar_arrive(sm.mask_empty + 8 * c);
    mask.next();
  }
#endif

  DEVICE void modify_scores(int block, const Blocks& n) {
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = capped(s[i] * p.score_scale);
#endif
#if HAS_ALIBI
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] -= slope * fabsf((float)(diagonal + row_offset(i) - column(block, i)));
#endif
#if HAS_MASK
    apply_mask();
#endif
#if BIAS_BITS
    add_bias();
#endif
#if IS_PAGED
    if (found != (1u << COPIES) - 1)
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!(found & 1u << (i >> 2) * 8 / COPY_KEYS)) s[i] = -INFINITE;
#endif
    if (block >= n.full_last || block < n.full_first) {
      const int from = column(block, 0);  // element i is this many columns further: a constant
#pragma unroll
      for (int i = 0; i < SCORES; i++) {
        const int j = column_offset(i);
        const Run r = i & 2 ? run1 : run0;
        bool keep = j < r.hi - from;
        if (HAS_LEFT) keep = keep && j >= r.lo - from;
        if (!keep) s[i] = -INFINITE;
      }
    }
  }

#if HAS_DROPOUT
  static constexpr int EARLY_ROWS = 1;  // of a thread's two: those that `find_dropped` finds
  u32 row_keys[2], dropped[2];          // a bit for each of a row's weights

  DEVICE void read_row_keys(const Tile& tile, int row) {
    const u32* keys = p.dropout.row_keys + (long long)(tile.b * p.Hq + tile.h) * p.dropout.rows;
#pragma unroll
    for (int r = 0; r < 2; r++) row_keys[r] = keys[min(row + 8 * r, p.Sq - 1)];
  }

  // Of the `i`-th weight of a row.
  DEVICE u32 key_of(int row, int block, int i) const {
    return row_keys[row] + column(block, 0) * COLUMN_KEY + ((i >> 1) * 8 + (i & 1)) * p.dropout.column_key;
  }
#endif

  // Hashes under the product of the scores: as many as take its time, since to keep what they say costs more than to use it at once. `arrived` is a
  // barrier whose phase is over: ptxas leaves what is between two waits where it is, if the second depends on it. `rows` is a multiple of 64.
  DEVICE void find_dropped([[maybe_unused]] int block, [[maybe_unused]] u32 arrived, [[maybe_unused]] u32 phase) {
#if HAS_DROPOUT
    mbar_wait(arrived, phase);
    asm volatile("" : "+r"(row_keys[0]), "+r"(row_keys[1])::"memory");
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < EARLY_ROWS; r++) {
      u32 found[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < SCORES / 2; i++) note_dropped(found[i & 1], i, key_of(r, block, i), p.dropout.threshold);
      dropped[r] = found[0] | found[1];
      any |= dropped[r];
    }
    mbar_wait(arrived + (any & p.dropout.rows & 1), phase);
#endif
  }

  // Of a row's weights, after they have been summed. What multiplies is less busy than what selects.
  template <int ROW> DEVICE void drop([[maybe_unused]] int block) {
#if HAS_DROPOUT
    const u32 threshold = p.dropout.threshold;
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
      float& weight = s[(i >> 1) * 4 + ROW * 2 + (i & 1)];
      if (ROW < EARLY_ROWS)
        asm("{ .reg .pred q; .reg .b32 bit; and.b32 bit, %1, %2; setp.ne.u32 q, bit, 0; @q mul.f32 %0, %0, 0f00000000; }"
            : "+f"(weight) : "r"(dropped[ROW]), "r"(1u << i));
      else
        asm("{ .reg .pred q; setp.lo.u32 q, %1, %2; @q mul.f32 %0, %0, 0f00000000; }"
            : "+f"(weight) : "r"(compared(key_of(ROW, block, i), threshold)), "r"(threshold));
    }
#endif
  }

  DEVICE void pack_weights() {
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) weights[i] = pack(s[2 * i], s[2 * i + 1]);
  }

  DEVICE void rescale_output() {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
      o[i] *= softmax.rescale0, o[i + 1] *= softmax.rescale0;
      o[i + 2] *= softmax.rescale1, o[i + 3] *= softmax.rescale1;
    }
  }

  // Values past the last attended key may hold anything, and 0 * NaN is NaN: they become zeros. Every consumer writes all of
  // them, the same zeros, since waiting for another consumer here would stop the turns.
  DEVICE void clear_values(int from) {
    const u32 values_at = sm.v + v.stage * V_BYTES;
#pragma unroll 1  // once in a tile
    for (int i = from * 8 + tid; i < BLOCK_N * 8; i += 128)
#pragma unroll
      for (int x = 0; x < VALUE_WIDTH; x++) store_shared(values_at + x * BLOCK_N * 128 + i * 16, make_int4(0, 0, 0, 0));
    fence_async_smem();
    named_sync(OWN_BARRIER + c, 128);
  }

  DEVICE void wait_values(int block, const Blocks& n) {
    mbar_wait(sm.v_full + 8 * v.stage, v.phase);
#if HAS_KV_LENS || HAS_RANGES
    if (n.hi < min((block + 1) * BLOCK_N, p.Sk)) clear_values(n.hi - block * BLOCK_N);
#endif
  }

  // The scores of this warp's rows, by itself, while keys and queries are still there: 16 keys at a time, as there are no registers for more.
  DEVICE void score_again(int slot) {
    const u32 queries = sm.q + place_of(tasks, c) * Q_BYTES + (tid >> 5) * 16 * 128, keys = sm.k + slot * K_BYTES;
#pragma unroll 1
    for (int key = 0; key < BLOCK_N; key += 16) {
#pragma unroll
      for (int i = 0; i < SCORES; i++) s[i] = i + 8 < SCORES ? s[(i + 8) % SCORES] : 0.f;
#pragma unroll 1
      for (int unit = 0; unit < HEAD_DIM / 8; unit += 2) {
        u32 a[4], b[4];
        load_matrix_x4<false>(a, swizzled(queries, 64, lane & 15, unit + (lane >> 4)));
        load_matrix_x4<false>(b, swizzled(keys, BLOCK_N, key + (lane & 7) + (lane >> 4) * 8, unit + (lane >> 3 & 1)));
        mma(*(float(*)[4])(s + SCORES - 8), a, b[0], b[1]), mma(*(float(*)[4])(s + SCORES - 4), a, b[2], b[3]);
      }
    }
  }

  // What a bold step took for granted, of the keys in that slot: whether it was wrong, and there are other weights now.
  DEVICE bool correct(int slot, int block, const Blocks& n, float& share0, float& share1) {
    const float most = fmaxf(share0, share1);
    if (!__any_sync(~0u, most > MOST)) return false;
    if (__any_sync(~0u, most > HUGE)) {
      score_again(slot);
      modify_scores(block, n);
      softmax.raise<0>(s, p.scale_log2), softmax.raise<1>(s, p.scale_log2);
      share0 = softmax.weigh<0>(s, p.scale_log2), share1 = softmax.weigh<1>(s, p.scale_log2);
    } else {
      softmax.lower<0>(s, p.scale_log2, share0), softmax.lower<1>(s, p.scale_log2, share1);
    }
    return true;
  }

  // Scores of `block` while the weights of the block after it meet their values. Half of the exponentials run under that product, half beside the
  // rescaling of its output: the special-function unit is the slowest part of either. The wait for the next keys stands before that for
  // the output because it ends a basic block: without one, ptxas moves the latter above the softmax.
  DEVICE void step(int block, const Blocks& n) {
    take_turn();
    score_product();
    wait_values(block + 1, n);
    value_product();
    pass_turn();
    find_dropped(block, sm.v_full + 8 * v.stage, v.phase);
    wgmma_wait<1>();
    pin(s);
    const int slot = k.stage;
    k.next();
    if (!IS_BOLD) release_keys(slot, block == n.first);
    modify_scores(block, n);
    const bool looks = !IS_BOLD || is_blind;
    bool raised = looks && softmax.raise<0>(s, p.scale_log2);
    float share0 = softmax.weigh<0>(s, p.scale_log2);
    drop<0>(block);
    if (looks) raised |= softmax.raise<1>(s, p.scale_log2);
    softmax.pin();
    pin(s);
    if (block > n.first) mbar_wait(sm.k_full + 8 * k.stage, k.phase);
    wgmma_wait<0>();
    pin(o);
    release(sm.v_empty, v);
    float share1 = softmax.weigh<1>(s, p.scale_log2);
    drop<1>(block);
    if (IS_BOLD) {
      raised |= correct(slot, block, n, share0, share1);
      release_keys(slot, block == n.first);
      if (is_blind) is_blind = softmax.is_blind();
    }
    pack_weights();
    if (raised) rescale_output(), softmax.rescale_sums();
    softmax.add(share0, share1);
  }

  // Blocks of the tile that none of this consumer's rows attends, from the last to the first. It takes its turns, as others count on them.
  DEVICE void pass_over(int last, int first) {
#pragma unroll 1
    for (int j = last - 1; j >= first; j--) {
      mbar_wait(sm.k_full + 8 * k.stage, k.phase);
      take_turn(), pass_turn();
      release_keys(k.stage, false), k.next();
      mbar_wait(sm.v_full + 8 * v.stage, v.phase);
      release(sm.v_empty, v);
    }
  }

  DEVICE Blocks own_blocks(const Task& task) const {
    Blocks n = task.n;
    if (HAS_OWN_BLOCKS) {
      Tile rows = task.tile;
      rows.m0 += c * 64;
      n = blocks_of(p, rows, task.keys, 64);
      if (rows.m0 >= p.Sq || n.last <= n.first) n.first = n.last = task.n.first;
      n.hi = task.n.hi;
    }
    return n;
  }

  DEVICE void attend(const Blocks& n) {
    mbar_wait(sm.k_full + 8 * k.stage, k.phase);
    take_turn();
    score_product();
    pass_turn();
    find_dropped(n.last - 1, sm.k_full + 8 * k.stage, k.phase);
    wgmma_wait<0>();
    pin(s);
    release_keys(k.stage, n.last - 1 == n.first);
    k.next();
    modify_scores(n.last - 1, n);
    softmax.raise<0>(s, p.scale_log2), softmax.raise<1>(s, p.scale_log2);
    if (IS_BOLD) is_blind = softmax.is_blind();
    softmax.add(softmax.weigh<0>(s, p.scale_log2), softmax.weigh<1>(s, p.scale_log2));
    drop<0>(n.last - 1), drop<1>(n.last - 1);
    pack_weights();
    if (n.last - 2 >= n.first) mbar_wait(sm.k_full + 8 * k.stage, k.phase);
#pragma unroll 1
    for (int j = n.last - 2; j >= n.first; j--) step(j, n);
    wait_values(n.first, n);
    value_product();
    wgmma_wait<0>();
    pin(o);
    release(sm.v_empty, v);
  }

  // Whether the row's scores are so large that their scaled differences may have rounded to too much: weights overflow, or vanish beside smaller ones.
  DEVICE bool is_lost(float row_max, float sum) const {
    const bool is_huge = !BIAS_BITS && fabsf(row_max) * p.scale_log2 > HUGE_SCORE;
    return row_max != NEVER && is_finite(row_max) && (is_huge || sum == 0.f || sum == INFINITE);
  }

  // By a warp, whose first row is `top`: rows that are lost, and those with values that are not finite, computed exactly. A probe is not 0 where a value
  // of this thread's row is not finite.
  DEVICE void replace_unusable(const Tile& tile, int top, const u32 (&probes)[2]) const {
    const bool lost0 = is_lost(softmax.max0, softmax.sum0), lost1 = is_lost(softmax.max1, softmax.sum1);
    const u32 unusable = rows_of_lanes(lost0 || probes[0], lost1 || probes[1]);
    const u32 existing = (1u << uniform(max(0, min(16, p.Sq - top)))) - 1;
    if (unusable & existing) replace_rows(p, tile, top, unusable & existing, rows_of_lanes(lost0, lost1));
  }

  // Normalised, with LSE, to where it belongs.
  DEVICE void finish() {
    const Tile tile = published_tile(sm.task + tasks.stage * TASK_BYTES);  // again: it takes no registers until here
    mbar_arrive(sm.task_empty + 8 * tasks.stage);
    softmax.reduce();
    const int first = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
    u32 probes[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first + 8 * r;
      float inverse;
      const float lse = close_row(p, tile, r ? softmax.max1 : softmax.max0, r ? softmax.sum1 : softmax.sum0, inverse);
      if ((lane & 3) == 0 && p.lse && row < p.Sq) write_lse(p, tile, row, lse);
      Element* to = output_row(p, tile, row);
#pragma unroll
      for (int i = 2 * r; i < OUTPUTS; i += 16) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          x[j] = pack(o[i + 4 * j] * inverse, o[i + 4 * j + 1] * inverse);
          add_times_zero(probes[r], x[j]);
        }
        gather(x);
        const int column = (i / 4 + (lane & 3)) * 8;
        if (row < p.Sq && column < p.Dv) *(uint4*)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
    bool is_usual = fminf(softmax.sum0, softmax.sum1) > 0.f && fmaxf(softmax.sum0, softmax.sum1) < INFINITE;
    if (!BIAS_BITS) is_usual = is_usual && fmaxf(fabsf(softmax.max0), fabsf(softmax.max1)) * p.scale_log2 <= HUGE_SCORE;
    if (__any_sync(~0u, (probes[0] | probes[1]) != 0 || !is_usual)) replace_unusable(tile, first - (lane >> 2), probes);
  }

  DEVICE void work() {
    if (c == CONSUMERS - 1) pass_turn();
    for (;; tasks.next()) {
      mbar_wait(sm.task_full + 8 * tasks.stage, tasks.phase);
      const Task now = published(sm.task + tasks.stage * TASK_BYTES);
      const Tile& tile = now.tile;
      if (tile.m0 == NO_TASK) break;
      const int row = tile.m0 + c * 64 + (tid >> 5) * 16 + (lane >> 2);
      run0 = row_run(p, tile, row, now.keys), run1 = row_run(p, tile, row + 8, now.keys);
#if HAS_ALIBI
      slope = p.alibi[tile.b * p.alibi_b + tile.h] * p.alibi_unit;
      diagonal = row + now.keys - p.Sq;
#endif
#if HAS_DROPOUT
      read_row_keys(tile, row);
#endif
      softmax.reset();
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) o[i] = 0.f;
      queries = descriptor_base(sm.q + place_of(tasks, c) * Q_BYTES, 16);
      asm volatile("" : "+r"(queries));  // or each step makes it anew
      mbar_wait(sm.q_full + 8 * place_of(tasks, c), phase_of(tasks));
      const Blocks n = own_blocks(now);
      pass_over(now.n.last, n.last);
      if (n.last > n.first) attend(n); else release_queries();
      pass_over(n.first, now.n.first);
      finish();
    }
    if (c == 0) take_turn();
  }
};

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Smem sm(smem_address(shared));
  if (threadIdx.x == 0) {
    for (int i = 0; i < QUERY_STAGES * CONSUMERS; i++) mbar_init(sm.q_full + 8 * i, 1), mbar_init(sm.q_empty + 8 * i, 4);
    for (int i = 0; i < 2; i++) mbar_init(sm.task_full + 8 * i, 1), mbar_init(sm.task_empty + 8 * i, READERS);
    for (int i = 0; i < STAGES; i++) {
      mbar_init(sm.k_full + 8 * i, 1), mbar_init(sm.v_full + 8 * i, 1);
      mbar_init(sm.k_empty + 8 * i, 4 * CONSUMERS), mbar_init(sm.v_empty + 8 * i, CONSUMERS);
    }
    if (HAS_MASK)
      for (int c = 0; c < CONSUMERS; c++) mbar_init(sm.mask_full + 8 * c, 32), mbar_init(sm.mask_empty + 8 * c, 128);
    if (BIAS_BITS)
      for (int c = 0; c < CONSUMERS; c++) mbar_init(sm.mask_full + 8 * c, 1), mbar_init(sm.mask_empty + 8 * c, 128);
    mbar_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    register_release<(CONSUMERS == 2 ? 40 : 32)>();
#if BIAS_BITS
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) produce(p, sm); else if (warp <= CONSUMERS) load_bias(p, sm, warp - 1);
#else
    if (threadIdx.x < 32) produce(p, sm);
#if HAS_MASK
    else if (threadIdx.x < 32 + 32 * CONSUMERS) fill_mask(p, sm, uniform(threadIdx.x / 32) - 1);
#endif
#endif
  } else {
    register_claim<(CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112)>();
    Consumer consumer(p, sm, warpgroup - 1);
    consumer.work();
  }
}
