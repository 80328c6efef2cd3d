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

// A chunk of which `elements` numbers exist.
template <class T>
__device__ __forceinline__ void copy_elements(uint32_t target, const T* source, int elements) {
#pragma unroll 1
  for (int i = 0; i < 8; i++) {
    const T x = i < elements ? source[i] : from_float<T>(0.f);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + 2 * i), "h"(*reinterpret_cast<const uint16_t*>(&x))
                 : "memory");
  }
}

// Copies a tile whose rows all exist and fill its columns with aligned chunks; belongs to the thread's next commit
// group. target, source: of the thread's first chunk.
template <class Tile, int kThreads, class T>
__device__ __forceinline__ void load_whole_chunks(uint32_t target, const T* source, int64_t stride) {
  using Lanes = CopyLanes<Tile, kThreads>;
#pragma unroll
  for (int r = 0; r < Tile::kRows; r += Lanes::kRowsPerPass, source += Lanes::kRowsPerPass * stride)
#pragma unroll
    for (int c = 0; c < Tile::kCols; c += Lanes::kCols) ptx::cp_async_16(target + Tile::shift(r, c), source + c);
}

// The same; source: the first row.
template <class Tile, int kThreads, class T>
__device__ __forceinline__ void load_whole_tile(uint32_t tile, const T* source, int64_t stride, unsigned thread) {
  using Lanes = CopyLanes<Tile, kThreads>;
  const int row = Lanes::row(thread), col = Lanes::col(thread);
  load_whole_chunks<Tile, kThreads>(tile + Tile::offset(row, col), source + row * stride + col, stride);
}

// Before an arrival that counts copies: it does not stand for ordinary stores, by which rows that are not aligned are
// copied.
__device__ __forceinline__ void publish_stores() { __threadfence_block(); }

// Copies tiles of SmemTile `Tile` with kThreads threads.
template <class T, class Tile, int kThreads>
class RowLoader {
  using Lanes = CopyLanes<Tile, kThreads>;

 public:
  // rows: the sequence's length; cols: the head dimension.
  __device__ RowLoader(const Strided& t, int batch_index, int64_t first_row, int head, int rows, int cols)
      : source_(static_cast<const T*>(t.ptr) + offset_of(t, batch_index, first_row, 0, head)),
        stride_(t.row),
        rows_(rows),
        cols_(cols),
        aligned_(chunks_aligned(t)) {}

  // Rows row0 ... row0 + kRows - 1 into the tile at shared address `tile`; belongs to the thread's next commit group.
  // Rows that are not aligned are copied by ordinary stores (publish_stores).
  __device__ __forceinline__ void load(uint32_t tile, int row0, unsigned thread = threadIdx.x) const {
    const int row = Lanes::row(thread), col = Lanes::col(thread);
    const T* source = source_ + (row0 + row) * stride_ + col;  // the thread's first chunk
    const uint32_t target = tile + Tile::offset(row, col);
    if (aligned_ && cols_ == Tile::kCols && row0 + Tile::kRows <= rows_) {
      load_whole_chunks<Tile, kThreads>(target, source, stride_);
    } else {
      load_edge(target, source, rows_ - row0 - row, cols_ - col);
    }
  }

 private:
  // The same where rows or columns end inside the tile or rows are not aligned; rows and cols count from the thread's
  // first.
  __device__ __forceinline__ void load_edge(uint32_t target, const T* source, int rows, int cols) const {
#pragma unroll 1
    for (int r = 0; r < Tile::kRows; r += Lanes::kRowsPerPass, source += Lanes::kRowsPerPass * stride_)
#pragma unroll 1
      for (int c = 0; c < Tile::kCols; c += Lanes::kCols) {
        const int elements = r < rows ? max_of(0, min_of(8, cols - c)) : 0;
        if (aligned_) {
          ptx::cp_async_16(target + Tile::shift(r, c), source + c, 2 * elements);
        } else {
          copy_elements(target + Tile::shift(r, c), source + c, elements);
        }
      }
  }

  const T* source_;  // (rows, cols) of the head
  int64_t stride_;
  int rows_, cols_;
  bool aligned_;
};

}  // namespace flash::sm80
