// How the warps of a backward wait for each other. Each barrier completes once per step (a block of queries), full[s]
// once per step that uses stage s, from phase 0 on. Where warps share P and dS:
//
//            arrive                                              wait
//   full[s]  every thread's copies of the step's queries         every warp, before its scores
//   written  every warp, once its part of P and dS is written    every warp, before its part of dq
//   read     every warp, after its part of dq                    every warp, before it writes P and dS of the next step
//                                                                and copies to the stage of this step's queries
//
// Beside them the warps with the same keys, which divide the columns of dk and dv, meet at a named barrier (1 + the
// number of their keys) once P and dS of these keys are written. Where they share only dS, for which there are two
// tiles, dq of a step is added in the middle of the next one:
//
//   full[s]  every thread's copies of the step's queries         every warp, before its scores
//   written  every warp, once its dS is written and it has       every warp, before its part of dq and before it copies
//            read the step's queries for the last time           to the stage of this step's queries
//   read     every warp, after its part of dq                    every warp, before it writes dS two steps later
//
// So nobody waits for all others at once, and a warp's exponentials run beside another's products.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/named_barrier.cuh"
#include "bwd_traits.cuh"

namespace flash::sm80 {

template <class Traits>
struct BwdBarriers {
  static constexpr int kWarps = Traits::kTile.warps();

  const uint32_t base;  // shared address of full[0], full[1], written, read
  const int stages;

  // Then synchronise threads.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(base, Traits::kThreads);
      ptx::mbarrier_init(base + 8, Traits::kThreads);
      ptx::mbarrier_init(written(), kWarps);
      ptx::mbarrier_init(read(), kWarps);
    }
  }

  // `step` counts from 0.
  __device__ __forceinline__ void arrive_full(int step) const { ptx::cp_async_mbarrier_arrive(full(step)); }
  __device__ __forceinline__ void wait_full(int step) const {
    ptx::mbarrier_wait(full(step), stages == 2 ? step / 2 % 2 : step % 2);
  }
  __device__ __forceinline__ void arrive_written() const { arrive_warp(written()); }
  __device__ __forceinline__ void wait_written(int step) const { ptx::mbarrier_wait(written(), step % 2); }
  __device__ __forceinline__ void arrive_read() const { arrive_warp(read()); }
  __device__ __forceinline__ void wait_read(int step) const { ptx::mbarrier_wait(read(), step % 2); }
  // Until the tiles of the step's P and dS are free.
  __device__ __forceinline__ void wait_free(int step) const {
    constexpr int kTiles = Traits::kSharesP ? 1 : 2;
    if (step >= kTiles) wait_read(step - kTiles);
  }

  __device__ __forceinline__ static void sync_warps_of_keys(int key_warp) {
    ptx::bar_sync(1 + key_warp, 32 * Traits::kColWarps);
  }

 private:
  __device__ __forceinline__ uint32_t full(int step) const { return base + (stages == 2 ? step % 2 * 8 : 0); }
  __device__ __forceinline__ uint32_t written() const { return base + 16; }
  __device__ __forceinline__ uint32_t read() const { return base + 24; }
  __device__ __forceinline__ static void arrive_warp(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
};

}  // namespace flash::sm80
