// Dropout's decisions about two neighbouring entries at a time: all ones in the half of one that is kept.
#pragma once

#include "../attn/dropout.h"
#include "../ptx/prmt.cuh"
#include "../ptx/set.cuh"

namespace flash::sm90 {

// Halves are compared as 16-bit floats without their signs, whose order is that of their bits; above infinity all is
// NaN.
inline constexpr uint32_t kMaxThreshold = 0x7C00;

// Both give what Dropout::keep() says. One instruction for two entries:
struct KeptUpToMax {
  uint32_t thresholds;  // the same in both halves
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return ptx::set_abs_geu_f16x2(word, thresholds);
  }
};
// Any threshold:
struct Kept {
  const Dropout& dropout;
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return ptx::signs_of_halves(dropout.kept_signs(word));
  }
};

}  // namespace flash::sm90
