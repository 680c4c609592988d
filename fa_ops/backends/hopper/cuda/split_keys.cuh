// How the decoding kernels divide the tiles of all batch rows into work ranges, one per group of CTAs, as the
// schedulers of FlashInfer and FlashMLA do, but on the device, where the lengths can be read. The CTAs of a
// group attend the same keys at about the same time, for `group_width` blocks of queries, so that memory is
// read once and the other reads hit the L2.
//
// A work item is a unit that one CTA can process alone: the keys of a batch row for one KV head (or, in
// mla.cu, one block of query heads). A work range may begin and end inside an item; the part of an item in a
// range is a split.
//
// A kernel provides batch_row(p, b); capacity_tiles(p), the largest number of a batch row's tiles;
// items_per_row(p), whose tiles are consecutive; group_width(p); partition_of(p, total, shortest, longest);
// and whole_tiles(p): one CTA attends so many tiles as fast as several CTAs attend parts of them and another
// kernel merges the results.
//
// With several splits an item has partial results, which the combine kernel at the end of this file merges.
#pragma once
#include "exact_row.cuh"
#include "sequences.cuh"
#include "softmax.cuh"

// The keys [begin, end) that a batch row attends, as `count` tiles from tile `first` on. There is at least
// one tile, so that some CTA writes the result.
struct BatchRow {
  int keys, begin, end, first, count;
};

DEVICE int ceil_div(int a, int b) { return (u32)(a + b - 1) / (u32)b; }

struct Partition {
  int groups, steps;          // into `groups` ranges of steps, each a tile or
  bool counts_items = false;  // a whole item
  // If not 0, all items have `item_tiles` tiles, and each is cut into `item_splits` ranges of `grain` tiles,
  // of which the last may be shorter.
  int item_tiles = 0, item_splits = 0, grain = 0;
};

// The tiles of all items, one item behind the other, or all items, cut into ranges as equal as possible, or
// every item in the same way. A range is empty only where there are fewer steps than groups. Divisions are
// unsigned: signed ones take longer, and the first copy waits for them.
struct WorkRanges {
  int base, longer;  // `longer` ranges have base + 1 steps
  int item_tiles, item_splits, grain;

  DEVICE WorkRanges() {}
  DEVICE WorkRanges(Partition partition)
      : base((u32)partition.steps / (u32)partition.groups),
        longer(partition.steps - base * partition.groups),
        item_tiles(partition.item_tiles),
        item_splits(partition.item_splits),
        grain(partition.grain) {}
  DEVICE int start(int cta_group) const {
    if (item_splits) {
      const int item = (u32)cta_group / (u32)item_splits, split = cta_group - item * item_splits;
      return item * item_tiles + split * grain;
    }
    return cta_group * base + min(cta_group, longer);
  }
  // The group whose range holds a tile.
  DEVICE int group_of(int tile) const {
    if (item_splits) {
      const int item = (u32)tile / (u32)item_tiles;
      return item * item_splits + (u32)(tile - item * item_tiles) / (u32)grain;
    }
    const int split = longer * (base + 1);
    return tile < split ? (u32)tile / (u32)(base + 1) : longer + (u32)(tile - split) / (u32)base;
  }
};

// The part of an item in a CTA group's range: `count` tiles from tile `tile` on.
struct Split {
  int b, item, tile, count, keys, flags, first_group, splits;  // splits: the number of splits of the item
};
// Flags: this split uses the second of its CTA's two slots for partial results; the item's first split does.
constexpr int SECOND_SLOT = 1, FIRST_IN_SECOND_SLOT = 2;
constexpr u32 SPLIT_BYTES = 32;

DEVICE void store_split(u32 at, const Split& t) {
  store_shared(at, make_int4(t.b, t.item, t.tile, t.count)),
      store_shared(at + 16, make_int4(t.keys, t.flags, t.first_group, t.splits));
}
DEVICE Split load_split(u32 at) {
  const int4 x = load_shared<int4>(at), y = load_shared<int4>(at + 16);
  return {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
}

// Whether all items are whole because the cache has room for few keys. The host uses the same rule.
template <class Params> DEVICE bool has_short_rows(const Params& p) {
  const int tiles = capacity_tiles(p);
  if (tiles > whole_tiles(p)) return false;  // before divisions, which take longer
  const int groups = gridDim.x / (u32)group_width(p), waves = ceil_div(p.B * items_per_row(p), groups);
  return (long long)waves * tiles <= whole_tiles(p);
}

// Each CTA group attends about as many items.
template <class Params> DEVICE Partition whole_items(const Params& p) {
  return {(int)(gridDim.x / (u32)group_width(p)), p.B * items_per_row(p), true};
}

// Iterates over the splits of a CTA's work range. Executed by one warp.
template <class Params> struct WorkIterator {
  const Params& p;
  const int cta_group;
  WorkRanges ranges;
  bool counts_items;
  int at, stop, item_begin;  // steps; item_begin: the item's first
  int b, item;
  BatchRow row;

  DEVICE explicit WorkIterator(const Params& p) : p(p), cta_group(blockIdx.x / group_width(p)) {
    int upto = 0;  // the tiles up to the last batch row of this lane
    const Partition partition = has_short_rows(p) ? whole_items(p) : count_tiles(upto);
    ranges = WorkRanges(partition), counts_items = partition.counts_items;
    at = ranges.start(cta_group), stop = cta_group < partition.groups ? ranges.start(cta_group + 1) : at;
    if (at >= stop) return;
    if (counts_items) {
      b = (u32)at / (u32)items_per_row(p), item = at - b * items_per_row(p);
      item_begin = at, row = batch_row(p, b);
    } else find_tile(upto);
  }

  // Counts the tiles of all batch rows. Lane l has (p.B + 31) / 32 of these.
  DEVICE Partition count_tiles(int& upto) const {
    const int lane = threadIdx.x & 31, each = (p.B + 31) / 32, mine = lane * each;  // batch rows of each lane
    int shortest = 1 << 30, longest = 0;
#pragma unroll 4
    for (int i = 0; i < each; i++) {
      if (mine + i >= p.B) continue;
      const int count = batch_row(p, mine + i).count;
      upto += count, shortest = min(shortest, count), longest = max(longest, count);
    }
    upto *= items_per_row(p);
#pragma unroll
    for (int w = 1; w < 32; w <<= 1) {
      const int left = __shfl_up_sync(~0u, upto, w);
      if (lane >= w) upto += left;
    }
    const int total = __shfl_sync(~0u, upto, 31);
    return partition_of(p, total, __reduce_min_sync(~0u, shortest), __reduce_max_sync(~0u, longest));
  }

  // Finds the item that holds tile `at`; its batch row is the first whose tiles end after it.
  DEVICE void find_tile(int upto) {
    const int lead = __ffs(__ballot_sync(~0u, upto > at)) - 1,
              before = __shfl_sync(~0u, upto, max(lead - 1, 0));
    item_begin = lead ? before : 0;
    for (b = lead * ((p.B + 31) / 32);; b++) {
      row = batch_row(p, b);
      const int tiles = row.count * items_per_row(p);
      if (item_begin + tiles > at) break;
      item_begin += tiles;
    }
    item = (u32)(at - item_begin) / (u32)row.count, item_begin += item * row.count;
  }

  // The current split, without the fields that `find_splits` sets.
  DEVICE Split split() const {
    const int offset = at - item_begin;
    return {b, item, row.first + offset, counts_items ? row.count : min(row.count - offset, stop - at),
            row.keys};
  }

  // Finds the groups that share the item. Called after the first copies, which do not depend on it.
  DEVICE void find_splits(Split& t) const {
    const int from = ranges.start(cta_group), last = item_begin + steps_of_item() - 1;
    t.first_group = item_begin >= from ? cta_group : ranges.group_of(item_begin);
    t.splits = (last < stop ? cta_group : ranges.group_of(last)) - t.first_group + 1;
    t.flags =
        (at > from ? SECOND_SLOT : 0) | (item_begin > ranges.start(t.first_group) ? FIRST_IN_SECOND_SLOT : 0);
  }

  DEVICE int steps_of_item() const { return counts_items ? 1 : row.count; }

  DEVICE void next(int count) {
    at += counts_items ? 1 : count;
    if (at < stop && at == item_begin + steps_of_item()) {
      item_begin = at;
      if (++item == items_per_row(p)) item = 0, b++, row = batch_row(p, b);
    }
  }
};

// Zeroes the rows of queries that no copy fills: the running maxima of a warp's rows move together, so
// arbitrary values there would change the last bits of the other rows.
DEVICE void clear_queries(u32 at, u32 bytes) {
  for (u32 i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) store_shared(at + i, make_int4(0, 0, 0, 0));
  fence_async_shared();
}

// Partial results as float16 numbers, of which each row has a common power of two as a factor. Sums of values
// have any magnitude, but float16 has 11 bits only for those between 2^-14 and 2^16.

DEVICE float power_of_two(int x) { return __int_as_float((x + 127) << 23); }

// The exponent by which a row of an accumulator is scaled down, so that its finite maximum is between 2^14
// and 2^15. Elements of at least 2^-28 of it then have 11 bits. A row whose elements are all below 2^-70 is
// scaled as if it had one of 2^-70, so that sums of weights stay finite. Executed by one warp.
template <int ROW, int OUTPUTS> DEVICE int partial_exponent(const float (&o)[OUTPUTS]) {
  float x = 0.f;
#pragma unroll
  for (int i = 2 * ROW; i < OUTPUTS; i += 4) {
    const float a = fmaf(o[i], 0.f, o[i]), b = fmaf(o[i + 1], 0.f, o[i + 1]);  // NaN if infinite,
    x = fmaxf(x, fmaxf(fabsf(a), fabsf(b)));                                     // which fmaxf skips
  }
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)), x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  return max(__float_as_int(x) >> 23, 127 - 70) - 127 - 14;
}

// Writes a row of an accumulator, four pairs of columns that are 8 apart at a time; `to` is where this lane's
// first ones are.
template <int ROW, int OUTPUTS> DEVICE void write_halves(const float (&o)[OUTPUTS], float scale, u32* to) {
#pragma unroll
  for (int i = 2 * ROW; i < OUTPUTS; i += 16) {
    u32 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = pack_halves(o[i + 4 * j] * scale, o[i + 4 * j + 1] * scale);
    *(uint4*)(to + i - 2 * ROW) = make_uint4(x[0], x[1], x[2], x[3]);
  }
}

// The combine kernel of Flash-Decoding: merges the splits of work items that several CTAs share. It is
// launched together with the attention kernel and is already resident when that kernel ends; no CTA polls a
// counter. Each CTA whose work range begins inside an item merges a slice of that item's rows and columns.
// Where all items are cut alike, so does the CTA whose range begins with the item. All slices of an item have
// equal size, at most the elements of two splits.
//
// A kernel provides ROWS and VALUE_DIM; packed_rows(p), the number of rows that exist; finish_packed_row(p,
// split, row, max2, total, writes_lse, inverse), which returns the row's index in the output and sets the
// factor that normalises it; write_columns(p, row, column, x, inverse), for two columns; and
// replace_columns(p, split, row, column), which computes two columns of a row exactly in each lane. Its
// parameters hold `partial` (2 * CTAs, ROWS, VALUE_DIM), the weighted sums of values relative to the maxima,
// and `partial_stats` (2 * CTAs, ROWS, stats_per_row(p)), a maximum in log2 units and a sum of weights for
// each of a row's stats_per_row(p) equal parts. Each 64 columns of a row of `partial` are 32 pairs: each a
// float2, or a u32 with two numbers of float16. The kernel's partial_column(p, i) is the first column of pair
// i.

// A CTA has one slot for each end of its work range. Only the first split of an item can be the second split
// of its CTA.
template <class Params> DEVICE int slot_of(const Params& p, const Split& t, int split) {
  return ((t.first_group + split) * group_width(p) + blockIdx.x % group_width(p)) * 2 +
         (split == 0 && t.flags & FIRST_IN_SECOND_SLOT ? 1 : 0);
}
DEVICE int own_slot(const Split& t) { return blockIdx.x * 2 + (t.flags & SECOND_SLOT ? 1 : 0); }

constexpr int SEGMENTS = VALUE_DIM / 64;  // per row, of 64 columns each

DEVICE float2 unpack_partial(float2 x) { return x; }
DEVICE float2 unpack_partial(u32 x) { return unpack_halves(x); }

// Merges segments of an item: segment `first` and every `step`-th one after it. Executed by one warp, which
// reads SPLITS splits of 32 / SPLITS segments at a time; each lane reads the statistics of one. An item may
// have more splits only if SPLITS is 32. The order of the additions does not depend on which warp merges.
// Returns whether this lane has found a sum that is not finite.
template <int SPLITS, class Params, class Pair>
DEVICE bool combine_rows(const Params& p, const Pair* partial, const Split& t, int first, int step) {
  constexpr int ITEMS = 32 / SPLITS;
  bool is_unusable = false;
  const int lane = threadIdx.x & 31, segments = packed_rows(p) * SEGMENTS;
#pragma unroll 1
  for (int i = first; i < segments; i += step * ITEMS) {
    const int own_segment = i + lane / SPLITS * step,  // whose statistics this lane reads
        existing = min(own_segment, segments - 1), own = existing / SEGMENTS;
    float max2 = UNINITIALISED_MAX, total = 0.f;
    float2 x[ITEMS] = {};
#pragma unroll 1
    for (int split = 0; split < (SPLITS < 32 ? SPLITS : t.splits); split += SPLITS) {
      float2 stats = make_float2(UNINITIALISED_MAX, 0.f);
      Pair y[ITEMS][SPLITS];
      if (split + lane % SPLITS < t.splits)
        stats = __ldcg(p.partial_stats + slot_of(p, t, split + lane % SPLITS) * (ROWS * stats_per_row(p)) +
                       existing / (SEGMENTS / stats_per_row(p)));
#pragma unroll
      for (int j = 0; j < SPLITS; j++) {
        const Pair* from = partial + slot_of(p, t, split + j) * (ROWS * VALUE_DIM / 2) + lane;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
          y[k][j] = Pair();
          if (split + j < t.splits && i + k * step < segments) y[k][j] = __ldcg(from + (i + k * step) * 32);
        }
      }
      float m = stats.y > 0.f ? stats.x : UNINITIALISED_MAX;
#pragma unroll
      for (int w = 1; w < SPLITS; w <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, w));
      m = fmaxf(m, max2);
      const float factor = stats.y > 0.f ? exp2_fast(stats.x - m) : 0.f, old = exp2_fast(max2 - m);
      float sum = stats.y * factor;
#pragma unroll
      for (int w = 1; w < SPLITS; w <<= 1) sum += __shfl_xor_sync(~0u, sum, w);
      max2 = m, total = total * old + sum;
#pragma unroll
      for (int k = 0; k < ITEMS; k++) {
        const float kept = __shfl_sync(~0u, old, k * SPLITS);
        x[k].x *= kept, x[k].y *= kept;
#pragma unroll
        for (int j = 0; j < SPLITS; j++) {
          const float f = __shfl_sync(~0u, factor, k * SPLITS + j);
          const float2 sums = unpack_partial(y[k][j]);
          x[k].x += sums.x * f, x[k].y += sums.y * f;
        }
      }
    }
    float inverse;
    const bool writes_lse = own_segment < segments && own_segment % SEGMENTS == 0 && lane % SPLITS == 0;
    const int out_row = finish_packed_row(p, t, own, max2, total, writes_lse, inverse);
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
      const int segment = i + k * step, to = __shfl_sync(~0u, out_row, k * SPLITS);
      const float factor = __shfl_sync(~0u, inverse, k * SPLITS);
      if (segment < segments)
        write_columns(p, to, segment % SEGMENTS * 64 + partial_column(p, lane), x[k], factor);
      is_unusable = is_unusable || (segment < segments && !is_finite(x[k]));
    }
  }
  return is_unusable;
}

template <class Params> DEVICE void combine_splits(const Params& p) {
  launch_dependent_grids();
  const WorkIterator<Params> iterator(p);  // the lengths can be read at once, the splits only after the wait
  const bool are_cut_alike = iterator.ranges.item_splits > 1;
  const bool shared = iterator.at < iterator.stop && (are_cut_alike || iterator.at > iterator.item_begin);
  Split t;
  if (shared) t = iterator.split(), iterator.find_splits(t);
  wait_for_prior_grid();  // CTAs without work wait too: the end of this kernel must imply that of
                          // the attention kernel
  if (!shared) return;
  const int first_slice = are_cut_alike ? 0 : 1, slices = t.splits - first_slice, warps = blockDim.x / 32,
            slice = iterator.cta_group - t.first_group - first_slice,
            first = slice + warp_uniform(threadIdx.x / 32) * slices, step = warps * slices;
  bool is_unusable;
  if (t.splits <= 2) is_unusable = combine_rows<2>(p, p.partial, t, first, step);
  else if (t.splits <= 4) is_unusable = combine_rows<4>(p, p.partial, t, first, step);
  else if (t.splits <= 8) is_unusable = combine_rows<8>(p, p.partial, t, first, step);
  else is_unusable = combine_rows<32>(p, p.partial, t, first, step);
  if (__any_sync(~0u, is_unusable)) {
    t = WorkIterator<Params>(p).split();  // computed again here to save registers until now
#pragma unroll 1
    for (int segment = first; segment < packed_rows(p) * SEGMENTS; segment += step)
      replace_columns(p, t, segment / SEGMENTS, segment % SEGMENTS * 64 + (threadIdx.x & 31) * 2);
  }
}
