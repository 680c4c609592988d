// The slots of queries in shared memory: two work items have one each, or share one.
#pragma once
#include "pipeline.cuh"

// A consumer's slot, and the phase of its barriers.
DEVICE int query_slot(const PipelineState<2>& work, int c) {
  return QUERY_STAGES == 2 ? work.stage * CONSUMERS + c : c;
}
DEVICE u32 query_phase(const PipelineState<2>& work) { return QUERY_STAGES == 2 ? work.phase : work.stage; }
