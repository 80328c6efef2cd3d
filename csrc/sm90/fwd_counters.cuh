// Counters from which the blocks of a launch claim their tiles. They lie in the module's own zero-initialised memory,
// so nothing is allocated, and the last block of a launch resets them for the next.
#pragma once

#include <cuda_runtime.h>

#include "../attn/launch.cuh"

namespace flash::sm90 {

inline constexpr int kCounterSlots = 4096;

struct Counter {
  int claimed, finished;
};

// One copy per translation unit, and the slots are handed out for all of them together.
static __device__ Counter tile_counters[kCounterSlots];

// -1 when all are taken: the kernel then deals its tiles out statically.
inline int counter_slot(int device, cudaStream_t stream) { return number_of_stream(device, stream, kCounterSlots); }

}  // namespace flash::sm90
