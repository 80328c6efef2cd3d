// Bias of a consumer warpgroup: from shared memory where the copy engine brings it, else from where it lies.
#pragma once

#include "../ptx/matrix.cuh"
#include "fwd_scores.cuh"

namespace flash::sm90 {

// The 64 x 64 numbers of a block in the 128-byte swizzle (wgmma.cuh), in the order of the accumulator.
template <class Traits>
class CopiedBias {
  using Element = typename Traits::Element;
  uint32_t first;  // address of this lane's row in the matrices of ldmatrix
  uint32_t pair[4];

 public:
  // row_step: 0 where all queries share the first row.
  __device__ __forceinline__ CopiedBias(uint32_t tile, int row_step) {
    // Matrices of 8 columns and 8 rows: the rows 8 further down, then the next columns.
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = row_step * (threadIdx.x % 128 / 32 * 16 + matrix % 2 * 8 + lane % 8);
    first = tile + row * 128 + ((matrix / 2) ^ (row % 8)) * 16;
  }

  // Of score i; to be asked for in order.
  __device__ __forceinline__ float operator()(int i) {
    if (i % 8 == 0) ptx::ldmatrix_x4(pair, first ^ (i * 4));
    const float2 x = unpack2<Element>(pair[i % 8 / 2]);
    return i % 2 ? x.y : x.x;
  }
};

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
