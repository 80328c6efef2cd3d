// What general variants do to scores beyond plain ones: softcap, and any sign of softmax_scale. attn/score.h is the
// readable form.
#pragma once

#include "fp8_traits.cuh"
#include "tanh.cuh"

namespace flash::sm90 {

// From Q K^T to what softmax_factor() brings to log2 units. `scale` is softmax_scale and the descales.
template <class Traits>
__device__ __forceinline__ void modify_scores(float (&acc_s)[Traits::kBlockN / 2], const FwdParams& p, float scale) {
  const float factor = p.softcap != 0.f ? scale / p.softcap : scale;
#pragma unroll
  for (int i = 0; i < Traits::kBlockN / 2; i++) acc_s[i] *= factor;
  if (p.softcap == 0.f) return;
#pragma unroll
  for (int i = 0; i < Traits::kBlockN / 2; i += 2) tanh_together<2>(acc_s + i, 2.f * kLog2e);
}

// Of the scores as the softmax gets them, to log2 units; positive. Plain variants scale nowhere else.
template <class Traits>
__device__ __forceinline__ float softmax_factor(const FwdParams& p, float scale) {
  if constexpr (!Traits::kGeneral) return scale * kLog2e;
  return (p.softcap != 0.f ? p.softcap : 1.f) * kLog2e;
}

}  // namespace flash::sm90
