// The elementwise half of the backward pass: from the products q.k and dout.v of a warp's tile to P and dS.
#pragma once

#include "score.cuh"

namespace flash::simt {

// lse and delta of the queries of a tile, in the registers of the lanes that own them: one per row where queries are
// rows, one per column where they are columns.
template <int kCount>
struct QueryStats {
  float lse[kCount], delta[kCount];

  // -inf - -inf would be NaN: the rows that saw no key get P = exp(s - inf) = 0.
  __device__ void set(int i, float lse_of, float delta_of) {
    lse[i] = lse_of == -INFINITY ? INFINITY : lse_of;
    delta[i] = delta_of;
  }
};

// - s: q.k becomes P, with dropout as the forward applied it (what dv needs)
// - dp: dout.v becomes dS; before the softcap if kThroughSoftcap (dq and dk need that, times softmax_scale), after it
//   otherwise (the gradient of the bias)
template <bool kThroughSoftcap, class Math, bool kRowsAreKeys, int kR, int kC>
__device__ __forceinline__ void to_gradients(float (&s)[kR][kC], float (&dp)[kR][kC], const Head& head,
                                             const Place<Math, kRowsAreKeys>& at, bool masked,
                                             const QueryStats<kRowsAreKeys ? kC : kR>& stats) {
  const bool dropout = head.p.dropout_p != 0.f;
  uint32_t kept[kR];
#pragma unroll
  for (int r = 0; r < kR; r++) {
    if (dropout) {
      kept[r] = kept_bits<Math, kRowsAreKeys, kC>(head, at, r);
      drop(dp[r], kept[r], head.dropout.scale);
    }
#pragma unroll
    for (int c = 0; c < kC; c++) dp[r][c] -= stats.delta[kRowsAreKeys ? c : r];
    if (kThroughSoftcap && head.mod.softcap != 0.f) {
#pragma unroll
      for (int c = 0; c < kC; c++) dp[r][c] *= head.mod.derivative(s[r][c]);
    }
  }
  to_scores(s, head, at, masked);
#pragma unroll
  for (int r = 0; r < kR; r++) {
#pragma unroll
    for (int c = 0; c < kC; c++) {
      s[r][c] = exp2_approx((s[r][c] - stats.lse[kRowsAreKeys ? c : r]) * kLog2e);
      dp[r][c] *= s[r][c];
    }
    if (dropout) drop(s[r], kept[r], head.dropout.scale);
  }
}

}  // namespace flash::simt
