// The softmax of one warpgroup's rows where P has to fit e4m3.
//
// P = exp2(s * scale - shift) with a shift that makes the row's maximum so far 256: a power of two is exact in e4m3,
// and the largest entry counts most; 448, beyond which the conversion saturates without a sign, is never near; and
// below are seventeen binary orders for the others. So every block looks for its maximum. That is cheap where the
// largest so far is not negative: then floats may be compared as integers, since negative ones are below it in either
// order, and an integer maximum of three numbers is one instruction. What was accumulated is touched only where the
// maximum of one of the warp's rows rises.
#pragma once

#include "../attn/numeric.cuh"
#include "../ptx/wgmma_fp8.cuh"
#include "row_max.cuh"

namespace flash::sm90 {

template <class Traits>
struct Fp8Softmax {
  static constexpr int kColumns = Traits::kBlockN, kScores = kColumns / 2, kSteps = kColumns / 32;
  static constexpr float kTopLog2 = 8.f;  // of P of the largest score: 256

  float scale;       // of the scores, to log2 units
  float top[2];      // largest score so far; -inf before any key
  float shift[2];    // in log2 units
  float row_sum[2];  // of this thread's columns, in fp32
  bool negative;     // one of the warp's tops is: the same for all lanes

  // First block of a tile.
  __device__ __forceinline__ void first(float (&acc_s)[kScores], uint32_t (&p)[kSteps][4]) {
    thread_max(acc_s, top);
    quad_max(top);
    set_shift();
    row_sum[0] = row_sum[1] = 0.f;
    set_p(acc_s, p);
  }

  // Brings top and shift up to any later block.
  __device__ __forceinline__ Rise raise(const float (&acc_s)[kScores]) {
    float most[2];
    if (negative) {
      thread_max(acc_s, most);
    } else {
      thread_max_from(acc_s, top, most);
    }
    Rise rise{{1.f, 1.f}, __any_sync(~0u, most[0] > top[0] || most[1] > top[1]) != 0};
    if (!rise.rises) return rise;
    quad_max(most);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      most[r] = fmaxf(most[r], top[r]);
      rise.correction[r] = exp2_approx((top[r] - finite(most[r])) * scale);
      row_sum[r] *= rise.correction[r];
      top[r] = most[r];
    }
    set_shift();
    return rise;
  }

  // P of a block's scores under the shift at hand; overwrites them.
  __device__ __forceinline__ void set_p(float (&acc_s)[kScores], uint32_t (&p)[kSteps][4]) {
    exponentials(acc_s);
    pack(acc_s, p);
  }

 private:
  // In place.
  __device__ __forceinline__ void exponentials(float (&acc_s)[kScores]) {
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      acc_s[i] = exp2_approx(fmaf(acc_s[i], scale, -shift[i / 2 % 2]));
      if (i % 2 != 0) sum[i / 2 % 2][i / 4 % 2] += acc_s[i - 1] + acc_s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] += sum[r][0] + sum[r][1];
  }

  __device__ __forceinline__ static void pack(const float (&x)[kScores], uint32_t (&p)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {  // 16 columns: one place of A in either row
#pragma unroll
      for (int r = 0; r < 2; r++)
        p[i / 16][i / 8 % 2 * 2 + r] =
            ptx::pack_e4m3(x[i + 2 * r], x[i + 2 * r + 1], x[i + 2 * r + 4], x[i + 2 * r + 5]);
    }
  }

  __device__ __forceinline__ void set_shift() {
#pragma unroll
    for (int r = 0; r < 2; r++) shift[r] = fmaf(finite(top[r]), scale, -kTopLog2);
    negative = __any_sync(~0u, !(top[0] >= 0.f && top[1] >= 0.f)) != 0;
  }
};

}  // namespace flash::sm90
