// How the warps of a forward block wait for copies and for each other where pairs of them share rows: so that a warp's
// exponentials run beside another's products, nobody waits for all others at once. A step is a block of keys; barriers
// of step s are those of stage s % 2, each used by every second step, from phase 0 on:
//
//            arrive                                            wait
//   full[s]  every thread's copies of the step's keys          every warp, before its scores
//   read[s]  every warp, after its products with these keys    every warp, before it copies those of step s + 2: behind
//                                                              the scores of step s + 1, by when it seldom has to
#pragma once

#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#include "fwd_traits.cuh"

namespace flash::sm80 {

template <class Traits>
struct FwdBarriers {
  const uint32_t smem;

  // Then synchronise threads.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < 2; stage++) {
        ptx::mbarrier_init(full(stage), Traits::kThreads);
        ptx::mbarrier_init(read(stage), Traits::kThreads / 32);
      }
    }
  }
  __device__ __forceinline__ void arrive_full(int step) const { ptx::cp_async_mbarrier_arrive(full(step)); }
  __device__ __forceinline__ void wait_full(int step) const { ptx::mbarrier_wait(full(step), step / 2 & 1); }
  __device__ __forceinline__ void arrive_read(int step) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(read(step));
  }
  // Until the step's stage is free.
  __device__ __forceinline__ void wait_free(int step) const { ptx::mbarrier_wait(read(step), (step / 2 + 1) & 1); }

 private:
  __device__ __forceinline__ uint32_t full(int step) const { return smem + Traits::kSmem.barriers + (step & 1) * 8; }
  __device__ __forceinline__ uint32_t read(int step) const { return full(step) + 16; }
};

}  // namespace flash::sm80
