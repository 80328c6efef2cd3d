// Dropout of P, two neighbouring entries in one register at a time.
#pragma once

#include "../attn/dropout.h"
#include "../ptx/prmt.cuh"
#include "../ptx/set.cuh"

namespace flash::sm90 {

// Halves are compared as 16-bit floats without their signs, whose order is that of their bits; above infinity all is
// NaN.
inline constexpr uint32_t kMaxThreshold = 0x7C00;

// Of a block of 64 x 64, the thread's rows r = 0, 1: columns 8j + {0, 1} of its own lie in p[j / 2][2 * (j % 2) + r].
template <class Mask>
__device__ __forceinline__ void drop_row(uint32_t (&p)[4][4], int r, const Philox& random, Mask mask) {
#pragma unroll
  for (int j = 0; j < 8; j++) p[j / 2][2 * (j % 2) + r] &= mask(Dropout::word(random, 8 * j));
}

// Both give what Dropout::keep() says. One instruction for two entries:
struct KeptUpToMax {
  uint32_t threshold_twice;
  __device__ __forceinline__ explicit KeptUpToMax(uint32_t threshold) : threshold_twice(threshold * 0x10001u) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return ptx::set_abs_geu_f16x2(word, threshold_twice);
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
