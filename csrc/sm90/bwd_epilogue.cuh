// Accumulators to rows of 16-bit numbers in global memory, without shared memory: the four lanes that share a row trade
// pairs of columns until each holds eight neighbouring ones, which is one 16-byte store.
#pragma once

#include "bwd_args.cuh"

namespace flash::sm90 {

// Row r (0: lane / 4, 1: lane / 4 + 8) of four groups of eight columns, acc[16]. Lane 4l + q gets group q.
template <class T>
__device__ __forceinline__ uint4 gather_columns(const float* acc, int r, float scale) {
  const int q = threadIdx.x % 4;
  uint32_t x[4];
#pragma unroll
  for (int j = 0; j < 4; j++) x[j] = pack2<T>(acc[4 * j + 2 * r] * scale, acc[4 * j + 2 * r + 1] * scale);
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {  // transposes the 4 x 4 words of the four lanes
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j & bit) continue;
      const bool upper = q & bit;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? x[j] : x[j + bit], bit);
      if (upper)
        x[j] = got;
      else
        x[j + bit] = got;
    }
  }
  return {x[0], x[1], x[2], x[3]};
}

// acc: 16 rows x kColumns of a warp, to rows row0 + {0 ... 15} of `rows`, columns below `columns` (a multiple of 8).
// dst: the segment's row 0.
template <class T, int kColumns>
__device__ __forceinline__ void store_rows(T* dst, int64_t stride, int row0, int rows, int columns,
                                           const float (&acc)[kColumns / 2], float scale) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + lane / 4 + 8 * r;
#pragma unroll
    for (int g = 0; g < kColumns / 8; g += 4) {
      const uint4 x = gather_columns<T>(acc + 4 * g, r, scale);
      const int column = 8 * (g + lane % 4);
      if (row < rows && column < columns) *reinterpret_cast<uint4*>(dst + row * stride + column) = x;
    }
  }
}

}  // namespace flash::sm90
