// Slots of shared memory, as 32-bit addresses of the shared window, and the state of a circular pipeline over
// them.
#pragma once
#include "ptx.cuh"

// The address of the `i`-th slot of BYTES bytes, and of the `i`-th mbarrier.
template <u32 BYTES> DEVICE constexpr u32 slot_at(u32 first, int i) { return first + i * BYTES; }
DEVICE constexpr u32 barrier(u32 first, int i) { return first + 8 * i; }

// The current stage of a ring of COUNT slots, and the phase of its barriers.
template <int COUNT> struct PipelineState {
  int stage = 0;
  u32 phase = 0;
  DEVICE void next() {
    if (++stage == COUNT) stage = 0, phase ^= 1;
  }
};
