// From accumulators to global memory: through a shared-memory tile, then in 16-byte pieces.
#pragma once

#include "../attn/numeric.cuh"
#include "smem_tile.h"

namespace flash::sm80 {

// The warp's accumulator, times a factor per row, as 16-bit elements into rows tile_row0 ..., columns tile_col0 ... of
// a shared-memory tile.
template <class T, class Tile, int kRowTiles, int kColTiles>
__device__ __forceinline__ void stage_rows(char* tile, int tile_row0, int tile_col0,
                                           const float (&acc)[kRowTiles][kColTiles][4],
                                           const float (&factor)[kRowTiles][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = tile_row0 + 16 * m + lane / 4 + 8 * h;
#pragma unroll
      for (int d = 0; d < kColTiles; d++)
        *reinterpret_cast<uint32_t*>(tile + Tile::offset(row, tile_col0 + 8 * d) + lane % 4 * 4) =
            pack2<T>(acc[m][d][2 * h] * factor[m][h], acc[m][d][2 * h + 1] * factor[m][h]);
    }
}

template <class T, class Tile, int kRowTiles, int kColTiles>
__device__ __forceinline__ void stage_rows(char* tile, int tile_row0, int tile_col0,
                                           const float (&acc)[kRowTiles][kColTiles][4], float factor) {
  float factors[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; m++) factors[m][0] = factors[m][1] = factor;
  stage_rows<T, Tile>(tile, tile_row0, tile_col0, acc, factors);
}

// A group of kThreads threads, `thread` being this one's number, copies rows tile_row0 ... + kRows - 1 of a
// shared-memory tile to a tensor, skipping what lies outside (rows, cols). `out` is the element of row tile_row0,
// column 0.
template <class T, class Tile, int kRows, int kThreads>
__device__ __forceinline__ void store_rows(const char* tile, int tile_row0, T* out, int64_t row_stride, int rows,
                                           int cols, bool aligned, int thread) {
  using Lanes = CopyLanes<Tile, kThreads>;
#pragma unroll
  for (int r = Lanes::row(thread); r < kRows; r += Lanes::kRowsPerPass) {
    if (r >= rows) break;
#pragma unroll
    for (int c = Lanes::col(thread); c < Tile::kCols; c += Lanes::kCols) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(tile + Tile::offset(tile_row0 + r, c));
      T* target = out + r * row_stride + c;
      if (aligned && c + 8 <= cols) {
        *reinterpret_cast<uint4*>(target) = chunk;
      } else {
        const T* elements = reinterpret_cast<const T*>(&chunk);
#pragma unroll
        for (int i = 0; i < 8; i++)
          if (c + i < cols) target[i] = elements[i];
      }
    }
  }
}

}  // namespace flash::sm80
