// Two warps with the same rows, where out has too many columns for one: each has the scores of half of a block's keys
// and half of out's columns, so that it reads half of K and half of V. What one needs of the other passes through
// shared memory, with these named barriers (64 threads each):
//
//              arrive                                 wait
//   1 + pair   both, where rows' numbers are written  both, before they read the other's
//   5 + warp   the warp, once its P is written        the other one, before the products with it
//
// P is written again only behind the copies of the next step, which wait until all warps have read it.
#pragma once

#include "../ptx/named_barrier.cuh"
#include "../ptx/shared.cuh"
#include "forget.cuh"
#include "fwd_traits.cuh"

namespace flash::sm80 {

template <class Traits>
struct FwdPair {
  static constexpr int kRowTiles = Traits::kRowTiles;
  static_assert(Traits::kColWarps <= 2 && Traits::kThreads <= 256);
  using RowNumbers = float[kRowTiles][2];  // of the lane's rows, the same in the four lanes that share them
  using Operand = uint32_t[kRowTiles][4];  // P of 16 keys, A fragments

  const uint32_t smem;

  __device__ __forceinline__ static int warp() { return int(thread_again() / 32); }

  __device__ __forceinline__ void to_larger(RowNumbers& x) const {
    combine(x, [](float a, float b) { return fmaxf(a, b); });
  }
  __device__ __forceinline__ void to_sum(RowNumbers& x) const {
    combine(x, [](float a, float b) { return a + b; });
  }

  // P of a step.
  struct Exchange {
    const int warp;
    const uint32_t own, other;  // the lane's 16 bytes of a fragment

    // group: of 16 keys of this warp.
    __device__ __forceinline__ void write(const Operand& p, int group) const {
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) ptx::st_shared(own + (group * kRowTiles + m) * 512, p[m]);
    }
    __device__ __forceinline__ void arrive_written() const { ptx::bar_arrive(5 + warp, 64); }
    __device__ __forceinline__ void wait_written() const { ptx::bar_sync(5 + (warp ^ 1), 64); }
    // group: of 16 keys of the other warp.
    __device__ __forceinline__ void read(Operand& p, int group) const {
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) ptx::ld_shared(p[m], other + (group * kRowTiles + m) * 512);
    }
  };
  __device__ __forceinline__ Exchange exchange() const {
    constexpr int kBytes = Traits::kWarpCols / 16 * kRowTiles * 512;  // of a warp
    const int w = warp();
    const uint32_t p = smem + Traits::kSmem.p + threadIdx.x % 32 * 16;
    return {w, p + w * kBytes, p + (w ^ 1) * kBytes};
  }

 private:
  template <class F>
  __device__ __forceinline__ void combine(RowNumbers& x, const F& f) const {
    if constexpr (Traits::kIsPair) {
      const uint32_t numbers = smem + Traits::kSmem.numbers, own = thread_again() / 4 * (8 * kRowTiles);
      const int barrier = 1 + warp() / 2;
      ptx::bar_sync(barrier, 64);  // the other has read what was there
#pragma unroll
      for (int m = 0; m < kRowTiles; m++)
        if (thread_again() % 4 == 0) ptx::st_shared(numbers + own + 8 * m, x[m][0], x[m][1]);
      ptx::bar_sync(barrier, 64);
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
        float other[2];
        ptx::ld_shared(other[0], other[1], numbers + (own ^ (64 * kRowTiles)) + 8 * m);
        x[m][0] = f(x[m][0], other[0]), x[m][1] = f(x[m][1], other[1]);
      }
    }
  }
};

}  // namespace flash::sm80
