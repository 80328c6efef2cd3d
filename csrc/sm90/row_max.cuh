// Maxima of an accumulator's rows: a thread holds two rows, three more threads hold the other columns of the same rows.
#pragma once

#include <math_constants.h>

#include "../attn/quad.cuh"

namespace flash::sm90 {

// What to subtract: a row without keys has scores of -inf and must give exp2(-inf), not NaN.
__device__ __forceinline__ float finite(float x) { return x == -CUDART_INF_F ? 0.f : x; }

// What a block whose scores go above the reference does to all that was accumulated before it.
struct Rise {
  float correction[2];
  bool rises;  // the same for all lanes of a warp
};

// Of this thread's columns. Two chains a row, so that fewer instructions wait for each other.
template <int kScores>
__device__ __forceinline__ void thread_max(const float (&acc_s)[kScores], float (&top)[2]) {
  float m[2][2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    m[r][0] = fmaxf(acc_s[2 * r], acc_s[2 * r + 1]);
    m[r][1] = fmaxf(acc_s[4 + 2 * r], acc_s[5 + 2 * r]);
  }
#pragma unroll
  for (int i = 8; i < kScores; i++) m[(i / 2) % 2][(i / 4) % 2] = fmaxf(m[(i / 2) % 2][(i / 4) % 2], acc_s[i]);
#pragma unroll
  for (int r = 0; r < 2; r++) top[r] = fmaxf(m[r][0], m[r][1]);
}

// Of this thread's columns and `least`, which is not negative: as integers, three at a time. Where a NaN is among them,
// the result is any number.
template <int kScores>
__device__ __forceinline__ void thread_max_from(const float (&acc_s)[kScores], const float (&least)[2],
                                                float (&top)[2]) {
  static_assert(kScores % 16 == 0);
  int m[2][2];
#pragma unroll
  for (int r = 0; r < 2; r++) m[r][0] = m[r][1] = __float_as_int(least[r]);
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    int& x = m[(i / 2) % 2][(i / 4) % 2];
    x = __vimax3_s32(x, __float_as_int(acc_s[i]), __float_as_int(acc_s[i + 1]));
  }
#pragma unroll
  for (int r = 0; r < 2; r++) top[r] = __int_as_float(max(m[r][0], m[r][1]));
}

// Over the four threads that share rows.
__device__ __forceinline__ void quad_max(float (&top)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) top[r] = flash::quad_max(top[r]);
}

}  // namespace flash::sm90
