// Softcap of any size in place; fwd_softcap.h has what serves smaller scores.
#pragma once

#include "../attn/numeric.cuh"

namespace flash::sm90 {

// tanh(x) = 1 - 2 / (1 + exp(2 x)). Four elements share one reciprocal; the bound keeps their product finite, and
// beyond it tanh is 1.
template <int kScores>
__device__ __forceinline__ void tanh_of_any(float (&acc_s)[kScores], float x_per_qk) {
  const float factor = 2.f * kLog2e * x_per_qk;
#pragma unroll
  for (int i = 0; i < kScores; i += 4) {
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = 1.f + exp2_approx(fminf(acc_s[i + j] * factor, 30.f));
    const float front = x[0] * x[1], back = x[2] * x[3];
    const float minus_twice = __fdividef(-2.f, front * back);
    const float of_front = minus_twice * back, of_back = minus_twice * front;
    acc_s[i] = fmaf(of_front, x[1], 1.f);
    acc_s[i + 1] = fmaf(of_front, x[0], 1.f);
    acc_s[i + 2] = fmaf(of_back, x[3], 1.f);
    acc_s[i + 3] = fmaf(of_back, x[2], 1.f);
  }
}

}  // namespace flash::sm90
