// Key ranges, and the number of keys of a batch row.
#pragma once
#include "ptx.cuh"

// The half-open range of keys [begin, end).
struct KeyRange {
  int begin, end;
};

// The number of keys of batch row `b`; the kernel's parameters must have `kv_lens` and `Sk`.
template <class Params> DEVICE int keys_of(const Params& p, int b) {
#if PACKED_QUERIES  // tokens outside every sequence, which attend nothing, are before 0 or from B on
  return (u32)b < (u32)p.B ? max(0, min(p.kv_lens[b], p.Sk)) : 0;
#elif HAS_KV_LENS
  return max(0, min(p.kv_lens[b], p.Sk));
#else
  return p.Sk;
#endif
}
