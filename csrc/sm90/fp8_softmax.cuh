// The softmax of one warpgroup's rows where P has to fit e4m3: fwd_softmax.cuh's idea with other limits.
//
// P = exp2(s * scale - shift) needs no running maximum, only a shift that keeps P between e4m3's smallest numbers and
// 448, beyond which the conversion saturates without a sign. The shift is chosen from sums, not from maxima: a thread's
// entries of a block shall add up to about kTarget. So flat rows stay far from 448 as well, and one test of the partial
// sums, needed in any case, shows every entry that could saturate; then, and only then, the block is computed again
// with its maximum, and what was accumulated so far is brought to the new shift.
#pragma once

#include <math_constants.h>

#include "../attn/numeric.cuh"
#include "../ptx/wgmma_fp8.cuh"
#include "row_max.cuh"

namespace flash::sm90 {

template <class Traits>
struct Fp8Softmax {
  static constexpr int kColumns = Traits::kBlockN, kScores = kColumns / 2, kSteps = kColumns / 32;
  static constexpr float kLimit = 448.f;  // the largest e4m3
  // Of the block that sets the shift: what a thread's entries add up to besides the row's largest, and the largest. A
  // row that one key rules needs all of e4m3's range for the others; a flat one needs room for later sums.
  static constexpr float kTargetRest = 96.f, kTargetTop = 256.f;
  // A first block with few keys says little about the next: room for 15 more keys like the best one.
  static constexpr float kMaskedRest = 15.f;
  static constexpr float kMaxFmaShift = 16384.f;  // s * scale - shift by one fma is off by the rounding of shift
  static constexpr int kMaxSurprises = 8;

  float scale;       // of the scores, to log2 units
  float shift[2];    // -inf before any key
  float row_sum[2];  // of this thread's columns, in fp32: for the LSE
  int surprises;     // how often an optimistic block failed in this tile

  // Whether the next block may do without its maximum; the same for all lanes of a warp.
  __device__ __forceinline__ bool optimistic() const { return surprises < kMaxSurprises; }

  // Steps kFrom ... kTo - 1 of 32 columns: P into p, its sums added to block_sum.
  template <int kFrom, int kTo, int kSize>
  __device__ __forceinline__ void exponentials(const float (&acc_s)[kScores], uint32_t (&p)[kSize][4],
                                               float (&block_sum)[2]) const {
#pragma unroll
    for (int i = kFrom * 16; i < kTo * 16; i += 8) {  // 16 columns: one place of A in either row
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = exp2_approx(fmaf(acc_s[i + 4 * (j / 2) + 2 * r + j % 2], scale, -shift[r]));
        block_sum[r] += (x[0] + x[1]) + (x[2] + x[3]);
        p[i / 16][i / 8 % 2 * 2 + r] = ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
  }

  // Also true for inf and NaN, which a shift of -inf gives. The same for all lanes.
  __device__ __forceinline__ static bool too_large(const float (&block_sum)[2]) {
    return __any_sync(~0u, !(block_sum[0] < kLimit && block_sum[1] < kLimit));
  }

  __device__ __forceinline__ void add(const float (&block_sum)[2]) {
    row_sum[0] += block_sum[0];
    row_sum[1] += block_sum[1];
  }

  // First block of a tile.
  __device__ __forceinline__ void first(float (&acc_s)[kScores], uint32_t (&p)[kSteps][4], bool masked) {
    float correction[2];
    shift[0] = shift[1] = -CUDART_INF_F;
    row_sum[0] = row_sum[1] = 0.f;
    surprises = 0;
    fit(acc_s, p, masked ? kMaskedRest : 0.f, correction);
    check_range();
  }

  // Any later block, with its maximum. Returns whether the shift rose, the same for all lanes: then everything that was
  // accumulated has to be multiplied by `correction`, one for either row.
  __device__ __forceinline__ bool exact(float (&acc_s)[kScores], uint32_t (&p)[kSteps][4], float (&correction)[2]) {
    const bool rises = fit(acc_s, p, 0.f, correction);
    if (rises) check_range();
    return rises;
  }

 private:
  // P of a block under the shift that its sums ask for, if it is larger than the one at hand. Overwrites acc_s.
  __device__ __forceinline__ bool fit(float (&acc_s)[kScores], uint32_t (&p)[kSteps][4], float least_rest,
                                      float (&correction)[2]) {
    float top[2], sum[2] = {}, factor[2];
    thread_max(acc_s, top);
    quad_max(top);
    // Subtracts before it scales, so that the maximum gives exactly 1 however large the scores are.
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      const int r = (i / 2) % 2;
      acc_s[i] = exp2_approx((acc_s[i] - finite(top[r])) * scale);
      sum[r] += acc_s[i];
    }
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = fmaxf(sum[r], __shfl_xor_sync(~0u, sum[r], 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float rest = fmaxf(most - 1.f, least_rest);
      // A power of two: the block's maximum is then exact in e4m3.
      const uint32_t bits = __float_as_uint(fminf(__fdividef(kTargetRest, rest), kTargetTop)) & 0xFF800000u;
      factor[r] = __uint_as_float(bits);
      const float before = shift[r], top_log2 = top[r] * scale;
      const float wanted = top_log2 - float(int(bits >> 23) - 127);
      if (wanted > before) {
        shift[r] = wanted;
        rises = true;
      } else {
        factor[r] = exp2_approx(top_log2 - finite(before));
      }
      correction[r] = exp2_approx(before - finite(shift[r]));
      row_sum[r] = fmaf(row_sum[r], correction[r], sum[r] * factor[r]);
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float f = factor[r];
        const int j = i + 2 * r;
        p[i / 16][i / 8 % 2 * 2 + r] =
            ptx::pack_e4m3(acc_s[j] * f, acc_s[j + 1] * f, acc_s[j + 4] * f, acc_s[j + 5] * f);
      }
    }
    return __any_sync(~0u, rises);
  }

  // A shift far from 0 would cost accuracy in the fused form: then the maximum is used throughout.
  __device__ __forceinline__ void check_range() {
    const float far = fmaxf(fabsf(finite(shift[0])), fabsf(finite(shift[1])));
    if (__any_sync(~0u, far > kMaxFmaShift)) surprises = kMaxSurprises;
  }
};

}  // namespace flash::sm90
