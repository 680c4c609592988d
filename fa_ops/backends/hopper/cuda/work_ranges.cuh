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
#pragma once
#include "seqlen_info.cuh"

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
