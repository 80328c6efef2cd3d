// What happens to a warp's scores of a block of keys before the softmax, where they are not taken as they are.
#pragma once

#include "../attn/mask.h"
#include "fwd_traits.cuh"
#include "general.cuh"

namespace flash::sm80 {

// A lane's accumulator element i of row tile m and column tile n: row_of(m, i / 2), col_of(n) + i % 2.
template <class Traits>
struct FwdScores {
  using T = typename Traits::T;
  static constexpr int kRowTiles = Traits::kRowTiles, kColTiles = Traits::kBlockN / 8;
  using Scores = float[kRowTiles][kColTiles][4];

  const Band band;
  const int row0, col0;  // the warp's first row and the block's first key in the sequence

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
      for (int i = 0; i < 4; i++) {
        const int row = row_of(m, i / 2), begin = band.key_begin(row) - i % 2, end = band.key_end(row) - i % 2;
#pragma unroll
        for (int n = 0; n < kColTiles; n++)
          if (col_of(n) < begin || col_of(n) >= end) acc_s[m][n][i] = -INFINITY;
      }
  }

  __device__ __forceinline__ void modify(Scores& acc_s, const General<T>& general) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kColTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[m][n][i] = general.score(acc_s[m][n][i], row_of(m, i / 2), col_of(n) + i % 2);
  }
};

}  // namespace flash::sm80
