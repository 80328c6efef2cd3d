// Bias that the copy engine cannot read, from where it lies.
#pragma once

#include "fwd_scores.cuh"

namespace flash::sm90 {

// acc * factor + bias. Bias of two neighbouring columns in one load where rows are contiguous and aligned and the block
// has all its columns. row0 and col0: of this thread's first score.
template <class Traits, class Bias, class Pair>
__device__ __forceinline__ void add_bias(float (&acc_s)[Traits::kBlockN / 2], float factor, const FwdParams& params,
                                         const Tile& tile, int row0, int col0) {
  constexpr int kScores = Traits::kBlockN / 2;
  const auto& b = params.bias;
  const Bias* base = static_cast<const Bias*>(b.ptr) + tile.batch * b.batch + tile.head * b.head;
  const Bias* row[2];
  uintptr_t places = 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row[r] = base + min(row0 + 8 * r, tile.seqlen_q - 1) * b.row + col0 * b.col;
    places |= reinterpret_cast<uintptr_t>(row[r]);
  }
  if (b.col == 1 && places % sizeof(Pair) == 0 &&
      col0 / Traits::kBlockN * Traits::kBlockN + Traits::kBlockN <= tile.seqlen_k) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const Pair pair = __ldg(reinterpret_cast<const Pair*>(row[(i / 2) % 2] + 8 * (i / 4)));
      float2 x;
      if constexpr (sizeof(Pair) == 8) {
        x = pair;
      } else {
        x = unpack2<Bias>(pair);
      }
      acc_s[i] = fmaf(acc_s[i], factor, x.x);
      acc_s[i + 1] = fmaf(acc_s[i + 1], factor, x.y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      const int col = 8 * (i / 4) + i % 2;
      acc_s[i] = fmaf(acc_s[i], factor, col0 + col < tile.seqlen_k ? to_float(row[(i / 2) % 2][col * b.col]) : 0.f);
    }
  }
}

}  // namespace flash::sm90
