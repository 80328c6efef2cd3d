// Where a thread's scores lie, and the mask.
#pragma once

#include <math_constants.h>

#include "fwd_traits.cuh"

namespace flash::sm90 {

// This thread's place in a tile: rows row and row + 8 of the sequence, columns column + 8i + {0, 1} of a block.
struct FragmentPlace {
  int row, column;
};

// Scores of keys that a row does not see become -inf.
template <class Traits>
__device__ __forceinline__ void mask_block(float (&acc_s)[Traits::kBlockN / 2], const Band& band, FragmentPlace at,
                                           int n_block, const BlockRange& blocks) {
  const int col0 = n_block * Traits::kBlockN + at.column;
  const bool none_full = blocks.full_begin >= blocks.full_end;  // then the two say nothing about either edge
  if (n_block >= blocks.full_end || none_full) {
    const int end[2] = {band.key_end(at.row) - col0, band.key_end(at.row + 8) - col0};
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 2; i++)
      if (8 * (i / 4) + i % 2 >= end[(i / 2) % 2]) acc_s[i] = -CUDART_INF_F;
  }
  if (band.window_left >= 0 && (n_block < blocks.full_begin || none_full)) {
    const int begin[2] = {band.key_begin(at.row) - col0, band.key_begin(at.row + 8) - col0};
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 2; i++)
      if (8 * (i / 4) + i % 2 < begin[(i / 2) % 2]) acc_s[i] = -CUDART_INF_F;
  }
}

}  // namespace flash::sm90
