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

// Args: of a launch, with its counter_slot. `workers`: its thread blocks, or pairs of them.

// The tile behind `last` in the order of tiles that this worker gets.
template <class Args>
__device__ __forceinline__ int claim_tile(const Args& args, int last, int workers) {
  if (args.counter_slot < 0) return last + workers;
  return workers + atomicAdd(&tile_counters[args.counter_slot].claimed, 1);
}

// The last of them leaves the counter as it found it.
template <class Args>
__device__ __forceinline__ void finish_claims(const Args& args, int workers) {
  if (args.counter_slot < 0) return;
  Counter& counter = tile_counters[args.counter_slot];
  if (atomicAdd(&counter.finished, 1) == workers - 1) counter = {0, 0};
}

}  // namespace flash::sm90
