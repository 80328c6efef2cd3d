// Softmax of a warp's rows over a stream of key blocks.
//
// The plain kernels need no running maximum. exp2 only needs a reference that keeps it in range, and floats lose
// nothing if probabilities exceed 1: the maximum over the first blocks that a row visits (those that need a mask, or
// the last one) is the reference, and the other blocks neither look for a maximum nor rescale out. Two sums make that
// exact:
//   row_sum      of the fp32 probabilities gives the lse;
//   rounded_sum  of the 16-bit probabilities, by a product with ones, normalises out. A key that outweighs all
//                others then gives exactly its v, whatever its probability was rounded to.
// Should a sum leave the range (scores more than 64 log2 units above the reference; 24 in fp16, whose largest number is
// 2^16), the block starts again with the running maximum in every key block.
#pragma once

#include "../attn/numeric.cuh"
#include "../attn/score.h"

namespace flash::sm80 {

__device__ __forceinline__ float quad_max(float x) {  // over the four lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <int kN>
struct alignas(4 * kN) Float {
  float at[kN];
};

template <class T, int kRowTiles>
struct Softmax {
  // fp16: the maximum becomes 2^-8, which leaves room for 2^24 above it.
  static constexpr float kHeadroom = __is_same(T, __half) ? 8.f : 0.f;
  static constexpr float kLargestSum = 0x1p64f;
  static constexpr uint32_t kOnes = __is_same(T, __half) ? 0x3C003C00u : 0x3F803F80u;

  // Of rows lane / 4 and lane / 4 + 8.
  float reference[kRowTiles][2];    // of this block of keys; +inf: no key yet, exp2(-inf - inf) = 0
  float row_sum[kRowTiles][2];      // of the lane's columns
  float rounded_sum[kRowTiles][2];  // of all columns

  // Between blocks of keys the references lie in shared memory (rows): the product of Q and K has no registers for
  // them. `references` is where the lane's begin, the same for the four lanes that share the rows.
  __device__ __forceinline__ void load_references(const float* references) {
    using Vector = Float<2 * kRowTiles>;
    const Vector x = *reinterpret_cast<const Vector*>(references);
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) reference[m][h] = x.at[2 * m + h];
  }
  __device__ __forceinline__ void store_references(float* references) const {
    __syncwarp();  // all four have read what was there
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) references[2 * m + h] = reference[m][h];
  }

  __device__ __forceinline__ void reset(float* references) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        reference[m][h] = INFINITY;
        row_sum[m][h] = 0.f;
        rounded_sum[m][h] = 0.f;
      }
    store_references(references);
  }

  // Raises the references to the maximum of acc_s (+ headroom) and rescales what was summed with the old ones.
  // exp2_scale: log2(e) where scores are in natural units, 1 in log2 units.
  template <int kN, int kD>
  __device__ __forceinline__ void raise(const float (&acc_s)[kRowTiles][kN][4], float (&acc_o)[kRowTiles][kD][4],
                                        float headroom, float exp2_scale) {
    float before[kRowTiles][2], after[kRowTiles][2];
    bool raised = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float row_max = -INFINITY;
#pragma unroll
        for (int n = 0; n < kN; n++) row_max = fmaxf(row_max, fmaxf(acc_s[m][n][2 * h], acc_s[m][n][2 * h + 1]));
        before[m][h] = reference[m][h] == INFINITY ? -INFINITY : reference[m][h];
        after[m][h] = fmaxf(before[m][h], quad_max(row_max) + headroom);
        raised |= after[m][h] > before[m][h];
      }
    if (!__any_sync(~0u, raised)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (after[m][h] == -INFINITY) continue;
        const float scale = exp2_approx((before[m][h] - after[m][h]) * exp2_scale);
        reference[m][h] = after[m][h];
        row_sum[m][h] *= scale;
        rounded_sum[m][h] *= scale;
#pragma unroll
        for (int d = 0; d < kD; d++) {
          acc_o[m][d][2 * h] *= scale;
          acc_o[m][d][2 * h + 1] *= scale;
        }
      }
  }

  __device__ __forceinline__ bool out_of_range() const {
    bool out = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) out |= !(rounded_sum[m][h] < kLargestSum);
    return out;
  }
};

}  // namespace flash::sm80
