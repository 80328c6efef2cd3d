// Copies rows of one head of one sequence into a shared-memory tile; rows past the sequence and columns past the head
// dimension become zeros, so that no NaN behind them can enter a product.
#pragma once

#include "../attn/numeric.cuh"
#include "../attn/seqlen.h"
#include "../ptx/cp_async.cuh"
#include "smem_tile.h"

namespace flash::sm80 {

// Every 16-byte chunk of the tensor's rows starts at a multiple of 16 bytes (T is a 16-bit type).
__device__ __forceinline__ bool chunks_aligned(const Strided& t) {
  return (reinterpret_cast<uintptr_t>(t.ptr) % 16 | ((t.batch | t.row | t.head) % 8)) == 0;
}

// Copies tiles of SmemTile `Tile` with kThreads threads. 
template <class T, class Tile, int kThreads>
class RowLoader {
  static constexpr int kChunksPerPass = Tile::kPanel / 8;
  static constexpr int kRowsPerPass = kThreads / kChunksPerPass;
  static_assert(kRowsPerPass % 8 == 0);

 public:
  // rows: the sequence's length; cols: the head dimension.
  __device__ RowLoader(const Strided& t, int batch_index, int64_t first_row, int head, int rows, int cols)
      : source_(static_cast<const T*>(t.ptr) + offset_of(t, batch_index, first_row, 0, head)),
        stride_(t.row),
        rows_(rows),
        cols_(cols),
        aligned_(chunks_aligned(t)) {}

  // Rows row0 ... row0 + kRows - 1 into the tile at shared address `tile`; belongs to the thread's next commit group.
  __device__ __forceinline__ void load(uint32_t tile, int row0) const {
    const int row = threadIdx.x / kChunksPerPass, col = threadIdx.x % kChunksPerPass * 8;
    const T* source = source_ + (row0 + row) * stride_ + col;
    const uint32_t target = tile + Tile::offset(row, col);
    const int rows = rows_ - row0 - row, cols = cols_ - col;
    if (!aligned_) return copy_elements(target, source, rows, cols);
#pragma unroll
    for (int r = 0; r < Tile::kRows; r += kRowsPerPass) {
      if (Tile::kRows % kRowsPerPass != 0 && r + row >= Tile::kRows) break;
#pragma unroll
      for (int c = 0; c < Tile::kCols; c += Tile::kPanel)
        ptx::cp_async_16(target + Tile::shift(r, c), source + c, r < rows ? max_of(0, min_of(16, 2 * (cols - c))) : 0);
      source += kRowsPerPass * stride_;
    }
  }

 private:
  __device__ __forceinline__ void copy_elements(uint32_t target, const T* source, int rows, int cols) const {
    const int row = threadIdx.x / kChunksPerPass;
#pragma unroll 1
    for (int r = 0; r + row < Tile::kRows; r += kRowsPerPass, source += kRowsPerPass * stride_)
#pragma unroll 1
      for (int c = 0; c < Tile::kCols; c += Tile::kPanel)
#pragma unroll 1
        for (int i = 0; i < 8; i++) {
          const T x = r < rows && c + i < cols ? source[c + i] : from_float<T>(0.f);
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + Tile::shift(r, c) + 2 * i),
                       "h"(*reinterpret_cast<const uint16_t*>(&x))
                       : "memory");
        }
  }

  const T* source_;  // (rows, cols) of the head
  int64_t stride_;
  int rows_, cols_;
  bool aligned_;
};

}  // namespace flash::sm80
