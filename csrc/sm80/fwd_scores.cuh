// What happens to a warp's scores of a block of keys before the softmax, where they are not taken as they are.
#pragma once

#include "../attn/mask.h"
#include "fwd_traits.cuh"
#include "general.cuh"
#include "lane_columns.h"

namespace flash::sm80 {

// A lane's accumulator element i of row tile m and column tile n: row_of(m, i / 2), col_of(n) + i % 2.
template <class Traits>
struct FwdScores {
  using T = typename Traits::T;
  static constexpr int kRowTiles = Traits::kRowTiles, kColTiles = Traits::kWarpCols / 8;
  using Scores = float[kRowTiles][kColTiles][4];

  const Band band;
  const int row0, col0;  // the warp's first row and key in the sequence

  __device__ __forceinline__ int row_of(int m, int half) const {
    return row0 + 16 * m + int(threadIdx.x % 32 / 4) + 8 * half;
  }
  __device__ __forceinline__ int col_of(int n) const { return col0 + 8 * n + int(threadIdx.x % 4) * 2; }

  __device__ __forceinline__ static void scale(Scores& acc_s, float factor) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kColTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[m][n][i] *= factor;
  }

  __device__ __forceinline__ void mask(Scores& acc_s) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = row_of(m, h);
        const uint32_t seen = lane_columns(band.key_begin(row) - col_of(0), band.key_end(row) - col_of(0), kColTiles);
#pragma unroll
        for (int n = 0; n < kColTiles; n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if ((seen >> (2 * n + i) & 1) == 0) acc_s[m][n][2 * h + i] = -INFINITY;
      }
  }

  // Which of the lane's columns dropout keeps, as in lane_columns. One draw serves 64 columns of both rows.
  __device__ __forceinline__ void draw_kept(uint32_t (&kept)[kRowTiles][2], const General<T>& general) const {
    static_assert(64 % (8 * kColTiles) == 0);
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
      const Philox random = general.draw(row_of(m, 0), col_of(0));
#pragma unroll
      for (int h = 0; h < 2; h++) {
        kept[m][h] = 0;
#pragma unroll
        for (int n = 0; n < kColTiles; n++) kept[m][h] |= general.kept_pair(random, 8 * h, col0 + 8 * n) << (2 * n);
      }
    }
  }

  // q.k becomes the score, in natural units. Each option in a loop of its own, so that those that are off cost nothing.
  __device__ __forceinline__ void modify(Scores& acc_s, const General<T>& general) const {
    const ScoreMod mod = general.mod();
    if (mod.softcap == 0.f) {
      for_each(acc_s, [&](float& s, int, int) { s *= mod.softmax_scale; });
    } else if (mod.softcap <= Softcapped::kLargestFast) {
      for_each(acc_s, [&](float& s, int, int) { s = Softcapped::fast(mod, s).score; });
    } else {
      for_each(acc_s, [&](float& s, int, int) { s = Softcapped::exact(mod, s).score; });
    }
    if (mod.alibi_slope != 0.f)
      for_each(acc_s, [&](float& s, int row, int col) { s -= mod.alibi_slope * float(abs(band.diagonal(row) - col)); });
    if (general.has_bias()) for_each(acc_s, [&](float& s, int row, int col) { s += general.bias(row, col); });
  }

 private:
  // f(element, row, column)
  template <class F>
  __device__ __forceinline__ void for_each(Scores& acc_s, const F& f) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row_of(m, i / 2);
#pragma unroll
        for (int n = 0; n < kColTiles; n++) f(acc_s[m][n][i], row, col_of(n) + i % 2);
      }
  }
};

}  // namespace flash::sm80
