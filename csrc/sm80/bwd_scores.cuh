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

  // The same where options change the scores. Each option has a loop of its own over a column tile, so that those that
  // are off cost next to nothing.
  __device__ __forceinline__ void probabilities_general(float (&acc_s)[kRowTiles][kSubM / 8][4],
                                                        float (&acc_dp)[kRowTiles][kSubM / 8][4], uint32_t stats,
                                                        const General<T>& general, int row0) const {
    static_assert(kSubM % 16 == 0);
    uint32_t kept = 0;  // of two column tiles
#pragma unroll
    for (int n = 0; n < kSubM / 8; n++) {
      const float2 lse = stats_at(stats, n), delta = stats_at(stats + 4 * kBlockM, n);
      Tile p, slope;  // probabilities; d score / d (q.k * softmax_scale)
      for_each(n, row0, [&](int m, int i, int, int) { p[m][i] = acc_s[m][n][i]; });
      modify(p, slope, n, row0, general);
      for_each(n, row0, [&](int m, int i, int, int) {
        // An entry that bias hides must not become exp2(-inf + inf).
        const float score = p[m][i];
        p[m][i] = score > -INFINITY ? exp2_approx((score - (i % 2 == 0 ? lse.x : lse.y)) * kLog2e) : 0.f;
        acc_s[m][n][i] = p[m][i];
      });
      if (general.drops()) {
        if (n % 2 == 0) kept = draw_kept(n, row0, general);
        drop(acc_s, acc_dp, n, kept, general.keep_scale());
      }
      for_each(n, row0, [&](int m, int i, int, int) {
        acc_dp[m][n][i] = p[m][i] * (acc_dp[m][n][i] - (i % 2 == 0 ? delta.x : delta.y)) * slope[m][i];
      });
    }
  }

 private:
  using Tile = float[kRowTiles][4];  // a lane's elements of a column tile

  // f(row tile, element, query, key)
  template <class F>
  __device__ __forceinline__ void for_each(int n, int row0, const F& f) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(m, i, row0 + query_of(n) + i % 2, key_of(m, i / 2));
  }

  // q.k becomes the score, in natural units.
  __device__ __forceinline__ void modify(Tile& x, Tile& slope, int n, int row0, const General<T>& general) const {
    const ScoreMod& mod = general.mod();
    if (mod.softcap == 0.f) {
      for_each(n, row0, [&](int m, int i, int, int) { x[m][i] *= mod.softmax_scale, slope[m][i] = 1.f; });
    } else if (mod.softcap <= Softcapped::kLargestFast) {
      for_each(n, row0, [&](int m, int i, int, int) {
        const Softcapped capped = Softcapped::fast(mod, x[m][i]);
        x[m][i] = capped.score, slope[m][i] = capped.slope;
      });
    } else {
      for_each(n, row0, [&](int m, int i, int, int) {
        const Softcapped capped = Softcapped::exact(mod, x[m][i]);
        x[m][i] = capped.score, slope[m][i] = capped.slope;
      });
    }
    if (mod.alibi_slope != 0.f)
      for_each(n, row0, [&](int m, int i, int row, int key) {
        x[m][i] -= mod.alibi_slope * float(abs(band.diagonal(row) - key));
      });
    if (general.has_bias())
      for_each(n, row0, [&](int m, int i, int row, int key) { x[m][i] += general.bias(row, key); });
  }

  // Which of the lane's elements of column tiles n and n + 1 dropout keeps, n even. One draw serves all keys of a
  // query, which lie in one group of 64, and the query 8 further on. The bit of element i of row tile m and column tile
  // n is kept_bit(m, n, i): the first one drawn is the highest.
  __device__ __forceinline__ static int kept_bit(int m, int n, int i) {
    return 8 * kRowTiles - 1 - (4 * kRowTiles * (i % 2) + 4 * m + n % 2 * 2 + i / 2);
  }
  __device__ __forceinline__ uint32_t draw_kept(int n, int row0, const General<T>& general) const {
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Philox random = general.draw(row0 + query_of(n) + i, key_of(0, 0));
#pragma unroll
      for (int m = 0; m < kRowTiles; m++)
#pragma unroll
        for (int x = 0; x < 4; x++)  // of the two tiles either half of the keys
          kept = __funnelshift_l(general.kept_sign(random, x / 2 * 8, key_of(m, x % 2)), kept, 1);
    }
    return kept;
  }
  __device__ __forceinline__ static void drop(float (&acc_s)[kRowTiles][kSubM / 8][4],
                                              float (&acc_dp)[kRowTiles][kSubM / 8][4], int n, uint32_t kept,
                                              float scale) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float factor = kept >> kept_bit(m, n, i) & 1 ? scale : 0.f;
        acc_s[m][n][i] *= factor;
        acc_dp[m][n][i] *= factor;
      }
  }
};

}  // namespace flash::sm80
