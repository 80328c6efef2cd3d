// O and row sums over all blocks of a tile. A product that is added to a tensor core's accumulator is cut to 14 bits
// behind the accumulator's leading one: V = 1 over 16k keys would come out as 0.72. So accumulators start anew after
// some blocks, and registers add them up in fp32.
#pragma once

#include "fp8_traits.cuh"

namespace flash::sm90 {

template <class Traits>
struct Fp8Totals {
  static constexpr int kOut = Traits::kHeadDimV / 2;
  static constexpr bool kTwoLevels = Traits::kTwoLevels;

  float acc_o[kOut];               // (64, head_dim_v), of the tensor cores
  float acc_sum[4];                // (64, 8), all columns the same: P 1
  float o[kTwoLevels ? kOut : 1];  // (64, head_dim_v), of blocks that are not in acc_o
  float sum[2];                    // of this thread's two rows, of blocks that are not in acc_sum
  int blocks;                      // in acc_o

  __device__ __forceinline__ bool o_is_new() const { return blocks == 0; }
  __device__ __forceinline__ bool sum_is_new() const { return !kTwoLevels || blocks == 0; }

  __device__ __forceinline__ void clear() {
    blocks = 0;
    sum[0] = sum[1] = 0.f;
    if constexpr (kTwoLevels) {
#pragma unroll
      for (int i = 0; i < kOut; i++) o[i] = 0.f;
    }
  }

  // A product is complete.
  __device__ __forceinline__ void add_block() {
    blocks++;
    if (!kTwoLevels || blocks == Traits::kTile.total_period) add();
  }

  // The last one is.
  __device__ __forceinline__ void finish() {
    if (kTwoLevels && blocks != 0) add();
  }

  __device__ __forceinline__ const float (&result() const)[kOut] {
    if constexpr (kTwoLevels) {
      return o;
    } else {
      return acc_o;
    }
  }

  __device__ __forceinline__ void scale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOut; i++) {
      acc_o[i] *= factor[(i / 2) % 2];
      if constexpr (kTwoLevels) o[i] *= factor[(i / 2) % 2];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) acc_sum[i] *= factor[i / 2];
    sum[0] *= factor[0];
    sum[1] *= factor[1];
  }

 private:
  __device__ __forceinline__ void add() {
    sum[0] += acc_sum[0];
    sum[1] += acc_sum[2];
    if constexpr (kTwoLevels) {
      blocks = 0;
#pragma unroll
      for (int i = 0; i < kOut; i++) o[i] += acc_o[i];
    }
  }
};

}  // namespace flash::sm90
