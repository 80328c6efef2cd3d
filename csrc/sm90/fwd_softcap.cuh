// Softcap of any size in place; fwd_softcap.h has what serves smaller scores.
#pragma once

#include "tanh.cuh"

namespace flash::sm90 {

template <int kScores>
__device__ __forceinline__ void tanh_of_any(float (&acc_s)[kScores], float x_per_qk) {
  const float factor = 2.f * kLog2e * x_per_qk;
#pragma unroll
  for (int i = 0; i < kScores; i += 4) tanh_together<4>(acc_s + i, factor);
}

}  // namespace flash::sm90
