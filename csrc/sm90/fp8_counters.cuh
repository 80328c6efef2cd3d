// What transposers and loaders of all blocks tell each other: how many jobs are claimed, and of each tile how many are
// done. A stream's first launches find their counters in the module's own zero-initialised memory, and the last warp
// leaves them as it found them; where there are too many tiles or streams, they lie in the workspace, and a kernel in
// front sets them to 0.
#pragma once

#include "../ptx/griddep.cuh"
#include "fp8_traits.cuh"

namespace flash::sm90 {

inline constexpr int kCounterSets = 16, kCountedTiles = 8192;

struct alignas(16) ValueCounters {
  uint32_t claimed, finished, unused[2];
  uint32_t ready[kCountedTiles];
};

// One copy per translation unit. Two launches that may run at the same time have different slots (counters.cuh).
static __device__ ValueCounters value_counters[kCounterSets];

inline bool has_counters(int slot, int64_t tiles) { return slot >= 0 && slot < kCounterSets && tiles <= kCountedTiles; }

struct Fp8Counters {
  const Fp8Args& args;

  __device__ __forceinline__ explicit Fp8Counters(const Fp8Args& a) : args(a) {}

  __device__ __forceinline__ bool in_module() const { return args.values_ready == nullptr; }
  __device__ __forceinline__ uint32_t* claimed() const {
    return in_module() ? &value_counters[args.counter_slot].claimed : args.values_claimed;
  }
  __device__ __forceinline__ uint32_t* ready() const {
    return in_module() ? value_counters[args.counter_slot].ready : args.values_ready;
  }

  // By every warp that has used them, at its end.
  template <class Traits>
  __device__ __forceinline__ void finish() const {
    if (!in_module()) return;
    ValueCounters& mine = value_counters[args.counter_slot];
    const int lane = threadIdx.x % 32;
    uint32_t before = 0;
    if (lane == 0) {
      __threadfence();
      before = atomicAdd(&mine.finished, 1);
    }
    if (__shfl_sync(~0u, before, 0) != (Traits::kValueLoaders + Traits::kTransposers) * gridDim.x - 1) return;
    for (uint32_t i = lane; i < args.value_jobs.count / Traits::kJobs; i += 32) mine.ready[i] = 0;
    if (lane == 0) mine.claimed = mine.finished = 0;
  }
};

// What a launch finds at its beginning: no job claimed, none done. `count` words.
static __global__ void __launch_bounds__(1024) fp8_begin_kernel(uint32_t* words, int64_t count) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the launch before may use the same memory
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) words[i] = 0;
}

}  // namespace flash::sm90
