// How the tiles of all rows of a batch are cut into stretches, one for each team of CTAs; lengths are read on the device. A team's CTAs attend the same
// keys at about the same time, `width` blocks of queries, so that the memory is read once and the L2 serves the others.
// A kernel says: row_of(p, b); cut_of(p, total, shortest, longest); units_of(p), of a row, which have the same tiles one after the other; width_of(p).

// What a row of the batch attends: keys [lo, hi) of its `keys`, in tiles [first, first + count). At least one, so that someone writes the result.
struct Row { int keys, lo, hi, first, count; };
template <class Params> DEVICE int keys_of(const Params& p, int b) {
#if HAS_KV_LENS
  return max(0, min(p.kv_lens[b], p.Sk));
#else
  return p.Sk;
#endif
}

struct Cut { int teams, steps, grain; };

// All units' tiles in one line, and each team's stretch of it: as equal as can be in steps of `grain` tiles, empty only for teams beyond the number of
// steps. Divisions are unsigned: signed ones take longer, and the first copy waits for them.
struct Line {
  int grain, base, longer;  // `longer` stretches have base + 1 steps

  DEVICE Line() {}
  DEVICE Line(Cut cut) : grain(cut.grain), base((u32)cut.steps / (u32)cut.teams), longer(cut.steps - base * cut.teams) {}
  DEVICE int start(int team) const { return grain * (team * base + min(team, longer)); }
  // Where stretches are cut in tiles.
  DEVICE int team_of(int tile) const {
    const int split = longer * (base + 1);
    return tile < split ? (u32)tile / (u32)(base + 1) : longer + (u32)(tile - split) / (u32)base;
  }
};

// A unit's part in a team's stretch.
struct Task { int b, unit, tile, count, keys, flags, first_team, parts; };
constexpr int SECOND_SLOT = 1, FIRST_IN_SECOND_SLOT = 2;  // this part's place of its CTA's two, and that of the unit's first part
constexpr u32 TASK_BYTES = 32;

DEVICE void store_task(u32 at, const Task& t) {
  store_shared(at, make_int4(t.b, t.unit, t.tile, t.count)), store_shared(at + 16, make_int4(t.keys, t.flags, t.first_team, t.parts));
}
DEVICE Task load_task(u32 at) {
  const int4 x = load_shared<int4>(at), y = load_shared<int4>(at + 16);
  return {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
}

// One warp's place in the line of tiles.
template <class Params> struct Walk {
  const Params& p;
  const int team;
  Line line;
  int at, stop, begin;  // begin: where the current unit does
  int b, unit;
  Row row;

  DEVICE explicit Walk(const Params& p) : p(p), team(blockIdx.x / width_of(p)) {
    const int lane = threadIdx.x & 31, each = (p.B + 31) / 32, mine = lane * each;  // rows of a lane
    int upto = 0, shortest = 1 << 30, longest = 0;
#pragma unroll 4
    for (int i = 0; i < each; i++) {
      if (mine + i >= p.B) continue;
      const int count = row_of(p, mine + i).count;
      upto += count, shortest = min(shortest, count), longest = max(longest, count);
    }
    upto *= units_of(p);
#pragma unroll
    for (int w = 1; w < 32; w <<= 1) {
      const int left = __shfl_up_sync(~0u, upto, w);
      if (lane >= w) upto += left;
    }
    const int total = __shfl_sync(~0u, upto, 31);
    const Cut cut = cut_of(p, total, __reduce_min_sync(~0u, shortest), __reduce_max_sync(~0u, longest));
    line = Line(cut);
    at = line.start(team), stop = team < cut.teams ? line.start(team + 1) : at;
    if (at >= stop) return;
    // the row that holds tile `at`: the first whose tiles end behind it
    const int lead = __ffs(__ballot_sync(~0u, upto > at)) - 1, before = __shfl_sync(~0u, upto, max(lead - 1, 0));
    begin = lead ? before : 0;
    for (b = lead * each;; b++) {
      row = row_of(p, b);
      const int tiles = row.count * units_of(p);
      if (begin + tiles > at) break;
      begin += tiles;
    }
    unit = (u32)(at - begin) / (u32)row.count, begin += unit * row.count;
  }

  // What there is to attend.
  DEVICE Task task() const {
    const int offset = at - begin;
    return {b, unit, row.first + offset, min(row.count - offset, stop - at), row.keys};
  }

  // Who shares it: later, as no copy depends on it.
  DEVICE void share(Task& t) const {
    const int from = line.start(team), last = begin + row.count - 1;
    t.first_team = begin >= from ? team : line.team_of(begin);
    t.parts = (last < stop ? team : line.team_of(last)) - t.first_team + 1;
    t.flags = (at > from ? SECOND_SLOT : 0) | (begin > line.start(t.first_team) ? FIRST_IN_SECOND_SLOT : 0);
  }

  DEVICE void next(int count) {
    at += count;
    if (at < stop && at == begin + row.count) {
      begin = at;
      if (++unit == units_of(p)) unit = 0, b++, row = row_of(p, b);
    }
  }
};

// Zeros for the rows that no copy of queries brings: rows move their references together, so whatever lay there would show in the others' last bits.
DEVICE void clear_queries(u32 at, u32 bytes) {
  for (u32 i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) store_shared(at + i, make_int4(0, 0, 0, 0));
  fence_async_smem();
}
