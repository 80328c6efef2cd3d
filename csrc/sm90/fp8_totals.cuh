// O over all blocks of a tile. A product that is added to a tensor core's accumulator is cut to 14 bits behind the
// accumulator's leading one: V = 1 over 16k keys would come out as 0.72. So over long contexts the accumulator starts
// anew with every block, and other registers add up the blocks in fp32.
#pragma once

#include "fp8_traits.cuh"

namespace flash::sm90 {

template <class Traits>
struct Fp8Totals {
  static constexpr int kOut = Traits::kHeadDimV / 2;
  static constexpr bool kTwoLevels = Traits::kTwoLevels;

  float acc_o[kOut];               // (64, head_dim_v), of the tensor cores
  float o[kTwoLevels ? kOut : 1];  // (64, head_dim_v), of the blocks before

  __device__ __forceinline__ void clear() {
    if constexpr (kTwoLevels) {
#pragma unroll
      for (int i = 0; i < kOut; i++) o[i] = 0.f;
    }
  }

  // A product is complete.
  __device__ __forceinline__ void add_block() {
    if constexpr (kTwoLevels) {
#pragma unroll
      for (int i = 0; i < kOut; i++) o[i] += acc_o[i];
    }
  }

  __device__ __forceinline__ float (&result()) [kOut] {
    if constexpr (kTwoLevels) {
      return o;
    } else {
      return acc_o;
    }
  }

  __device__ __forceinline__ void scale(const float (&factor)[2]) {
    float (&x)[kOut] = result();
#pragma unroll
    for (int i = 0; i < kOut; i++) x[i] *= factor[(i / 2) % 2];
  }
};

}  // namespace flash::sm90
