// The online softmax over a warp's rows.
#pragma once

#include "../attn/numeric.cuh"

namespace flash::simt {

// Over the lanes that share a row.
template <class Math, class F>
__device__ __forceinline__ float reduce_row(float x, F&& f) {
#pragma unroll
  for (int bit = Math::kFirstColBit; bit <= Math::kLastColBit; bit *= 2) x = f(x, __shfl_xor_sync(0xFFFFFFFFu, x, bit));
  return x;
}

template <class Math, int kR>
struct OnlineSoftmax {
  float row_max[kR];  // natural units
  float row_sum[kR];  // of this lane's columns until finish()

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < kR; r++) row_max[r] = -INFINITY, row_sum[r] = 0.f;
  }

  // Scores become exp(score - row_max); acc_o follows the new maximum.
  template <int kC, int kO>
  __device__ void step(float (&acc_s)[kR][kC], float (&acc_o)[kR][kO]) {
#pragma unroll
    for (int r = 0; r < kR; r++) {
      float maximum = acc_s[r][0];
#pragma unroll
      for (int c = 1; c < kC; c++) maximum = fmaxf(maximum, acc_s[r][c]);
      const float scale = raise_max(r, reduce_row<Math>(maximum, fmaxf));
      const float base = finite_max(r);
      float sum = 0.f;
#pragma unroll
      for (int c = 0; c < kC; c++) sum += acc_s[r][c] = exp2_approx((acc_s[r][c] - base) * kLog2e);
      row_sum[r] += sum;
#pragma unroll
      for (int c = 0; c < kO; c++) acc_o[r][c] *= scale;
    }
  }

  // Adds exp(sink) to the denominator, as if it were one more key with a value of 0. Returns what acc_o is multiplied
  // by so that it becomes the result; row_max and row_sum give the LSE afterwards.
  __device__ float finish(int r, const float* sink) {
    row_sum[r] = reduce_row<Math>(row_sum[r], [](float a, float b) { return a + b; });
    float scale = 1.f;
    if (sink != nullptr) {
      scale = raise_max(r, *sink);
      row_sum[r] += exp2_approx((*sink - finite_max(r)) * kLog2e);
    }
    return row_sum[r] == 0.f ? 0.f : scale / row_sum[r];  // a row that saw no key is 0
  }

  __device__ float lse(int r) const { return row_sum[r] == 0.f ? -INFINITY : row_max[r] + logf(row_sum[r]); }

 private:
  // What sums taken under the old maximum are worth under the new one.
  __device__ float raise_max(int r, float maximum) {
    const float before = row_max[r];
    row_max[r] = fmaxf(before, maximum);
    const float scale = exp2_approx((before - finite_max(r)) * kLog2e);
    row_sum[r] *= scale;
    return scale;
  }

  // While a row has seen no key its maximum is -inf, and -inf - -inf would be NaN.
  __device__ float finite_max(int r) const { return row_max[r] == -INFINITY ? 0.f : row_max[r]; }
};

}  // namespace flash::simt
