// Additions to the sums of dq.
#pragma once

#include "../ptx/acquire.cuh"
#include "../ptx/red.cuh"

namespace flash::sm80 {

// Warps that add to the same fragments take turns; what one added is there before the next one's turn comes. The
// counter holds the turn that has come and never falls: where wrong cu_seqlens on the device let two sequences share
// it, it may be past a turn when that is waited for, and nobody may wait forever.
__device__ __forceinline__ void wait_for_turn(const uint32_t* counter, uint32_t turn) {
  if (threadIdx.x % 32 == 0)
    while (ptx::ld_acquire(counter) < turn) {
    }
  __syncwarp();
}
__device__ __forceinline__ void end_turn(uint32_t* counter, uint32_t turn) {
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::red_release_max(counter, turn + 1);
}

// The four floats of a lane's fragment, by vector where additions may be vectors too (sm_90), else one line of 32 lanes
// each.
__device__ __forceinline__ void add_fragment(float* fragment, const float (&x)[4]) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  ptx::red_add_v4(fragment + 4 * lane, x[0], x[1], x[2], x[3]);
#else
#pragma unroll
  for (int i = 0; i < 4; i++) ptx::red_add(fragment + 32 * i + lane, x[i]);
#endif
}
__device__ __forceinline__ void load_fragment(float (&x)[4], const float* fragment) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  const float4 all = *reinterpret_cast<const float4*>(fragment + 4 * lane);
  x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
#else
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = fragment[32 * i + lane];
#endif
}

}  // namespace flash::sm80
