// A unit of V -> V^T (fp8_layout.h), from shared to shared memory.
#pragma once

#include "../ptx/matrix.cuh"
#include "fp8_layout.h"

namespace flash::sm90 {

// ldmatrix transposes pairs of columns; of two registers, one byte permutation makes four keys of the even column, in
// the order of value_place, and another those of the odd one. With kHeld = 4 all is read before anything is written, so
// both may be the same memory.
template <int kHeld = 1>  // times 32 columns are in registers at a time
__device__ __forceinline__ void turn_values(uint32_t raw, uint32_t turned, int columns) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // no register holds what follows from unit to unit: there are none left
  const uint32_t from = raw + lane * 128 + (lane % 8 << 4);
  const uint32_t to = turned + value_chunk_offset(lane % 8 * 2 + lane / 8 % 2, lane / 16);
#pragma unroll
  for (int column = 0; column < 128; column += 32 * kHeld) {
    if (column >= columns) break;
    // Keys 8i + 2 (lane % 4) + {0, 1}, columns 2 (lane / 4) + {0, 1} of 16.
    uint32_t pairs[2 * kHeld][4];
#pragma unroll
    for (int j = 0; j < 2 * kHeld; j++) ptx::ldmatrix_x4_trans(pairs[j], from ^ (column + 16 * j));
    if (kHeld == 4) __syncwarp();
#pragma unroll
    for (int j = 0; j < 2 * kHeld; j++) {
      if (column + 16 * j >= columns) break;
      const uint32_t (&pair)[4] = pairs[j];
      constexpr uint32_t kEven = value_selector(0), kOdd = value_selector(1);
      uint32_t x[4] = {__byte_perm(pair[0], pair[1], kEven), __byte_perm(pair[0], pair[1], kOdd),
                       __byte_perm(pair[2], pair[3], kEven), __byte_perm(pair[2], pair[3], kOdd)};
      ptx::stmatrix_x4(to + (column + 16 * j) * kUnitKeys, x);
    }
  }
}

}  // namespace flash::sm90
