// Dropout of P, two neighbouring entries in one register at a time.
#pragma once

#include "kept_masks.cuh"

namespace flash::sm90 {

// Of a block of 64 x 64, the thread's rows r = 0, 1, 8 apart: columns 8j + {0, 1} of its own lie in
// p[j / 2][2 * (j % 2) + r].
template <class Mask>
__device__ __forceinline__ void drop_rows(uint32_t (&p)[4][4], const Philox& random, Mask mask) {
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int r = 0; r < 2; r++) p[j / 2][2 * (j % 2) + r] &= mask(Dropout::word(random, 8 * r, 8 * j));
}

// Dropout of a thread's two rows, 8 apart, where it is the only option: what they decide alone is worked out once per
// tile.
class DropoutOfRows {
  PhiloxRow rows;
  Philox::RoundKey keys[PhiloxRow::kOwnRounds];

 public:
  // head counts over the batch; row, column: the thread's first.
  __device__ __forceinline__ void open(const Dropout& dropout, uint32_t head, int row, int column) {
    rows = dropout.of_row(head, row).from(Dropout::counter(column));
    // Exchanged, so that the compiler neither knows that they are cheap to work out again in every block nor keeps them
    // in registers of threads.
#pragma unroll
    for (int i = 0; i < PhiloxRow::kOwnRounds; i++) {
      const Philox::RoundKey key = rows.own_key(i);
      keys[i] = {__shfl_sync(~0u, key.low, 0), __shfl_sync(~0u, key.high, 0)};
    }
  }
  // Of the block of keys that begins with block_column.
  __device__ __forceinline__ void drop(uint32_t (&p)[4][4], int block_column, uint32_t thresholds) const {
    drop_rows(p, rows.at(Dropout::counter(block_column), keys), KeptUpToMax{thresholds});
  }
};

}  // namespace flash::sm90
