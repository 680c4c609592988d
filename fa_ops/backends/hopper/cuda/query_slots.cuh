// The slots of queries in shared memory: one for each of two work items, or one that both share.
#pragma once
#include "pipeline.cuh"

// The slot of a consumer, and the phase of its barriers.
DEVICE int query_slot(const PipelineState<2>& work, int c) {
  return QUERY_STAGES == 2 ? work.stage * CONSUMERS + c : c;
}
DEVICE u32 query_phase(const PipelineState<2>& work) { return QUERY_STAGES == 2 ? work.phase : work.stage; }
