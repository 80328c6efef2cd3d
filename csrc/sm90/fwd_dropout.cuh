// Dropout of P, two neighbouring entries in one register at a time.
#pragma once

#include "../attn/dropout.h"
#include "../ptx/prmt.cuh"
#include "../ptx/set.cuh"

namespace flash::sm90 {

// Halves are compared as 16-bit floats without their signs, whose order is that of their bits; above infinity all is
// NaN.
inline constexpr uint32_t kMaxThreshold = 0x7C00;

// Of a block of 64 x 64, the thread's rows r = 0, 1: columns 8j + {0, 1} of its own lie in p[j / 2][2 * (j % 2) + r].
template <class Mask>
__device__ __forceinline__ void drop_row(uint32_t (&p)[4][4], int r, const Philox& random, Mask mask) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int j = i / 2 + i % 2 * 4;  // what shares a word together
    p[j / 2][2 * (j % 2) + r] &= mask(Dropout::word(random, 8 * j));
  }
}

// Both give what Dropout::keep() says. One instruction for two entries:
struct KeptUpToMax {
  uint32_t thresholds;  // the same in both halves
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return ptx::set_abs_geu_f16x2(word, thresholds);
  }
};
// Any threshold:
struct Kept {
  const Dropout& dropout;
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return ptx::signs_of_halves(dropout.kept_signs(word));
  }
};

// Dropout of a thread's two rows, 8 apart, where it is the only option: what they decide alone is worked out once per
// tile.
class DropoutOfRows {
  PhiloxRow rows[2];
  Philox::RoundKey keys[PhiloxRow::kOwnRounds];

 public:
  // head counts over the batch; row, column: the thread's first.
  __device__ __forceinline__ void open(const Dropout& dropout, uint32_t head, int row, int column) {
#pragma unroll
    for (int r = 0; r < 2; r++) rows[r] = dropout.of_row(head, row + 8 * r).from(Dropout::counter(column));
    // Exchanged, so that the compiler neither knows that they are cheap to work out again in every block nor keeps them
    // in registers of threads.
#pragma unroll
    for (int i = 0; i < PhiloxRow::kOwnRounds; i++) {
      const Philox::RoundKey key = rows[0].own_key(i);
      keys[i] = {__shfl_sync(~0u, key.low, 0), __shfl_sync(~0u, key.high, 0)};
    }
  }
  // Of the block of keys that begins with block_column.
  __device__ __forceinline__ void drop(uint32_t (&p)[4][4], int block_column, uint32_t thresholds) const {
    const uint64_t product = rows[0].first_product(Dropout::counter(block_column));
#pragma unroll
    for (int r = 0; r < 2; r++) drop_row(p, r, rows[r].of_first_product(product, keys), KeptUpToMax{thresholds});
  }
};

}  // namespace flash::sm90
