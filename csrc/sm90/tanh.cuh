// tanh from an exponential. (With its derivative, for the backward: bwd_general.cuh.)
#pragma once

#include "../attn/numeric.cuh"

namespace flash::sm90 {

// x -> tanh(x * factor / (2 log2(e))). tanh(x) = 1 - 2 / (1 + exp(2 x)), whose absolute error of 1e-7 is what counts
// here. Two or four numbers share one reciprocal; the bound keeps their product finite, and beyond it tanh is 1.
template <int kTogether>
__device__ __forceinline__ void tanh_together(float* x, float factor) {
  static_assert(kTogether == 2 || kTogether == 4);
  float d[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; j++) d[j] = 1.f + exp2_approx(fminf(x[j] * factor, 120.f / kTogether));
  if constexpr (kTogether == 2) {
    const float minus_two = __fdividef(-2.f, d[0] * d[1]);
    x[0] = fmaf(minus_two, d[1], 1.f);
    x[1] = fmaf(minus_two, d[0], 1.f);
  } else {
    const float front = d[0] * d[1], back = d[2] * d[3];
    const float minus_two = __fdividef(-2.f, front * back);
    const float of_front = minus_two * back, of_back = minus_two * front;
    x[0] = fmaf(of_front, d[1], 1.f);
    x[1] = fmaf(of_front, d[0], 1.f);
    x[2] = fmaf(of_back, d[3], 1.f);
    x[3] = fmaf(of_back, d[2], 1.f);
  }
}

}  // namespace flash::sm90
