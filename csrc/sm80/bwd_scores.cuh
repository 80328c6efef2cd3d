// Scores of a warp's keys and kSubM queries become probabilities, and the gradients of these those of the scores.
#pragma once

#include "../attn/mask.h"
#include "bwd_traits.cuh"
#include "general.cuh"

namespace flash::sm80 {

template <class Traits>
struct BwdScores {
  using T = typename Traits::T;
  static constexpr int kBlockM = Traits::kBlockM, kSubM = Traits::kSubM, kRowTiles = Traits::kRowTiles;

  const BwdParams& params;
  const Band band;
  const int warp_col0;  // the warp's first key in the sequence

  // A lane's accumulator element i of row tile m, column tile n: key key_of(m, i / 2), query query_of(n) + i % 2.
  __device__ __forceinline__ int key_of(int m, int half) const {
    return warp_col0 + 16 * m + int(threadIdx.x % 32 / 4) + 8 * half;
  }
  __device__ __forceinline__ static int query_of(int n) { return 8 * n + int(threadIdx.x % 4) * 2; }

  // lse (or delta) of the lane's two queries of column tile n. Queries past the sequence have 0 there and zeros in q
  // and dout.
  __device__ __forceinline__ static float2 stats_at(uint32_t stats, int n) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(stats + 4 * query_of(n)));
    return x;
  }

  // acc_s: scores become probabilities; acc_dp: their gradients become those of the scores.
  __device__ __forceinline__ void probabilities(float (&acc_s)[kRowTiles][kSubM / 8][4],
                                                float (&acc_dp)[kRowTiles][kSubM / 8][4], uint32_t stats) const {
    const float scale = params.softmax_scale * kLog2e;
#pragma unroll
    for (int n = 0; n < kSubM / 8; n++) {
      const float2 lse = stats_at(stats, n), delta = stats_at(stats + 4 * kBlockM, n);
      const float lse2[2] = {lse.x * kLog2e, lse.y * kLog2e}, deltas[2] = {delta.x, delta.y};
#pragma unroll
      for (int m = 0; m < kRowTiles; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float p = exp2_approx(acc_s[m][n][i] * scale - lse2[i % 2]);
          acc_s[m][n][i] = p;
          acc_dp[m][n][i] = p * (acc_dp[m][n][i] - deltas[i % 2]);
        }
    }
  }

  // Entries that the mask hides become 0, whatever they are: exp2 of an unmasked score may be infinite.
  __device__ __forceinline__ void mask(float (&acc)[kRowTiles][kSubM / 8][4], int row0) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int key = key_of(m, half), begin = band.query_begin(key) - row0, end = band.query_end(key) - row0;
#pragma unroll
        for (int n = 0; n < kSubM / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (query_of(n) + i < begin || query_of(n) + i >= end) acc[m][n][2 * half + i] = 0.f;
      }
  }

  __device__ __forceinline__ void probabilities_general(float (&acc_s)[kRowTiles][kSubM / 8][4],
                                                        float (&acc_dp)[kRowTiles][kSubM / 8][4], uint32_t stats,
                                                        const General<T>& general, int row0) const {
#pragma unroll
    for (int n = 0; n < kSubM / 8; n++) {
      const float2 lse = stats_at(stats, n), delta = stats_at(stats + 4 * kBlockM, n);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = row0 + query_of(n) + i;
        const float row_lse = i == 0 ? lse.x : lse.y, row_delta = i == 0 ? delta.x : delta.y;
        Philox random{};  // one draw serves all the lane's keys: they lie in one group of 64
        if (general.drops()) random = general.draw(row, key_of(0, 0));
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int key = key_of(m, half);
            float &s = acc_s[m][n][2 * half + i], &dp = acc_dp[m][n][2 * half + i];
            const float qk = s;
            // A row without keys has lse -inf; an entry that bias hides must not become exp2(-inf + inf).
            const float score = general.score(qk, row, key);
            const float p = band.visible(row, key) && score > -INFINITY ? exp2_approx((score - row_lse) * kLog2e) : 0.f;
            const float kept = !general.drops() ? 1.f : general.keep(random, key) ? general.keep_scale() : 0.f;
            s = p * kept;
            dp = p == 0.f ? 0.f : p * (dp * kept - row_delta) * general.derivative(qk);
          }
        }
      }
    }
  }
};

}  // namespace flash::sm80
