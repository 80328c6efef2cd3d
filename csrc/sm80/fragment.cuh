// A lane's view of a shared-memory tile: the ldmatrix addresses of the fragments of mma.m16n8k16.
#pragma once

#include "../ptx/matrix.cuh"
#include "../ptx/mma.cuh"
#include "forget.cuh"
#include "smem_tile.h"

namespace flash::sm80 {

// 16x16 pieces of a tile that starts at shared address `tile`, (row0, col0) being the piece's corner.
//   load_a        A fragment, tile stored (M, K)
//   load_b        B fragments of 16 columns, tile stored (N, K): {b0, b1} of columns 0-7, {b0, b1} of columns 8-15
//   load_b_trans  the same, tile stored (K, N)
//   load_a_trans  A fragment, tile stored (K, M)
template <class Tile>
class Fragments {
 public:
  __device__ explicit Fragments(uint32_t tile, int lane = int(threadIdx.x % 32))
      : rows_first_(tile + Tile::offset(lane % 16, lane / 16 * 8)),
        cols_first_(tile + Tile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8)) {}

  // The same, kept in registers through a loop.
  __device__ __forceinline__ Fragments kept() const {
    Fragments f = *this;
    f.rows_first_ = forget(rows_first_), f.cols_first_ = forget(cols_first_);
    return f;
  }
  // The same of a tile `bytes` behind this one.
  __device__ __forceinline__ Fragments behind(int bytes) const {
    Fragments f = *this;
    f.rows_first_ += bytes, f.cols_first_ += bytes;
    return f;
  }

  // The same from row row0, column col0 of the tile on; col0 is a multiple of a panel.
  __device__ __forceinline__ Fragments from(int row0, int col0) const {
    Fragments f = *this;
    f.rows_first_ += Tile::shift(row0, col0);
    f.cols_first_ += Tile::shift(row0, col0);
    return f;
  }

  __device__ __forceinline__ void load_a(uint32_t (&a)[4], int row0, int col0) const {
    ptx::ldmatrix_x4(a, at(rows_first_, row0, col0));
  }
  __device__ __forceinline__ void load_b(uint32_t (&b)[4], int row0, int col0) const {
    ptx::ldmatrix_x4(b, at(cols_first_, row0, col0));
  }
  __device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], int row0, int col0) const {
    ptx::ldmatrix_x4_trans(b, at(rows_first_, row0, col0));
  }
  __device__ __forceinline__ void load_a_trans(uint32_t (&a)[4], int row0, int col0) const {
    ptx::ldmatrix_x4_trans(a, at(cols_first_, row0, col0));
  }
  // The inverse of load_a, from sm_90 on.
  __device__ __forceinline__ void store_a(const uint32_t (&a)[4], int row0, int col0) const {
    ptx::stmatrix_x4(at(rows_first_, row0, col0), a);
  }

 private:
  __device__ __forceinline__ static uint32_t at(uint32_t base, int row0, int col0) {
    return (base ^ Tile::flip(col0)) + Tile::shift(row0, col0);
  }
  uint32_t rows_first_;  // matrices 0, 1 lie below each other
  uint32_t cols_first_;  // matrices 0, 1 lie beside each other
};

}  // namespace flash::sm80
