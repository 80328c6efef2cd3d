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
// 2^16), the block starts again with the running maximum in every key block. So it does if a reference is so large that
// its rounding shows beside products that are not rounded.
#pragma once

#include "../attn/numeric.cuh"
#include "../attn/quad.cuh"
#include "../attn/score.h"
#include "../ptx/shared.cuh"

namespace flash::sm80 {

template <class T, int kRowTiles>
struct Softmax {
  // fp16: the maximum becomes 2^-8, which leaves room for 2^24 above it.
  static constexpr float kHeadroom = __is_same(T, __half) ? 8.f : 0.f;
  static constexpr float kLargestSum = 0x1p64f, kLargestReference = 0x1p14f;
  static constexpr uint32_t kOnes = __is_same(T, __half) ? 0x3C003C00u : 0x3F803F80u;

  // Of rows lane / 4 and lane / 4 + 8.
  float reference[kRowTiles][2];    // of this block of keys; +inf: no key yet, exp2(-inf - inf) = 0
  float row_sum[kRowTiles][2];      // of the lane's columns
  float rounded_sum[kRowTiles][4];  // of all columns, in the accumulator of a product: the row's twice

  // Between blocks of keys the references lie in shared memory (rows): the product of Q and K has no registers for
  // them. `references` is where the lane's begin, the same for the four lanes that share the rows.
  __device__ __forceinline__ void load_references(uint32_t references) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) ptx::ld_shared(reference[m][0], reference[m][1], references + 8 * m);
  }
  __device__ __forceinline__ void store_references(uint32_t references) const {
    __syncwarp();  // all four have read what was there
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) ptx::st_shared(references + 8 * m, reference[m][0], reference[m][1]);
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        reference[m][h] = INFINITY;
        row_sum[m][h] = 0.f;
        rounded_sum[m][2 * h] = rounded_sum[m][2 * h + 1] = 0.f;
      }
  }

  // What a reference is to the scores: their maximum times `scale` plus `headroom`; times `log2_units` in log2 units.
  struct Units {
    float scale, headroom, log2_units;
  };

  // Raises the references to the maximum of acc_s and rescales what was summed with the old ones. of_all(x): the
  // maxima of other warps' columns of the rows join x.
  template <int kN, int kD, class F>
  __device__ __forceinline__ void raise(const float (&acc_s)[kRowTiles][kN][4], float (&acc_o)[kRowTiles][kD][4],
                                        const Units& units, const F& of_all) {
    float before[kRowTiles][2], after[kRowTiles][2], row_max[kRowTiles][2];
    bool raised = false, summed = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < kN; n++) x = fmaxf(x, fmaxf(acc_s[m][n][2 * h], acc_s[m][n][2 * h + 1]));
        row_max[m][h] = quad_max(x);
      }
    of_all(row_max);
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        before[m][h] = reference[m][h] == INFINITY ? -INFINITY : reference[m][h];
        after[m][h] = fmaxf(before[m][h], row_max[m][h] * units.scale + units.headroom);
        raised |= after[m][h] > before[m][h];
        summed |= before[m][h] > -INFINITY;
      }
    if (!__any_sync(~0u, raised)) return;
    if (!__any_sync(~0u, summed)) {  // the first block
#pragma unroll
      for (int m = 0; m < kRowTiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (after[m][h] > -INFINITY) reference[m][h] = after[m][h];
      return;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (after[m][h] == -INFINITY) continue;
        const float scale = exp2_approx((before[m][h] - after[m][h]) * units.log2_units);
        reference[m][h] = after[m][h];
        row_sum[m][h] *= scale;
        rounded_sum[m][2 * h] *= scale;
        rounded_sum[m][2 * h + 1] *= scale;
#pragma unroll
        for (int d = 0; d < kD; d++) {
          acc_o[m][d][2 * h] *= scale;
          acc_o[m][d][2 * h + 1] *= scale;
        }
      }
  }

  // Takes a sum out of its range where a reference is out of its own: one check is for both.
  __device__ __forceinline__ void check_references() {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (fabsf(reference[m][h]) > kLargestReference && reference[m][h] < INFINITY) rounded_sum[m][2 * h] = INFINITY;
  }

  __device__ __forceinline__ bool out_of_range() const {
    bool out = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) out |= !(rounded_sum[m][2 * h] < kLargestSum);
    return out;
  }
};

}  // namespace flash::sm80
