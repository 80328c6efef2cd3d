// Copies the rows of one head of one sequence into shared-memory tiles, one tile after the other; rows past the
// sequence and columns past the head dimension become zeros, so that no NaN behind them can enter a product. It moves
// by itself, for a loop that has no registers to find its place anew.
#pragma once

#include "forget.cuh"
#include "load.cuh"

namespace flash::sm80 {

// Copies tiles of SmemTile `Tile` with kThreads threads.
template <class T, class Tile, int kThreads>
class StreamLoader {
  using Lanes = CopyLanes<Tile, kThreads>;

 public:
  // Begins at row row0 of the sequence; cols: the head dimension.
  __device__ StreamLoader(const Strided& t, int batch_index, int64_t first_row, int row0, int head, int cols)
      : tensor_(&t),
        source_(static_cast<const T*>(t.ptr) +
                offset_of(t, batch_index, first_row, row0 + Lanes::row(threadIdx.x), head) + Lanes::col(threadIdx.x)),
        cols_(cols) {}

  __device__ __forceinline__ void move(int rows) { source_ += rows * forget(tensor_->row); }

  // kRows rows, of which the first `rows` exist, into the tile at shared address `tile`; belongs to the thread's next
  // commit group.
  __device__ __forceinline__ void load(uint32_t tile, int rows) const {
    if (whole() && rows >= Tile::kRows) {
      load_whole(tile + first_chunk());
    } else {
      load_edge(tile, rows);
    }
  }

  // Every row fills the tile's columns with aligned chunks.
  __device__ __forceinline__ bool whole() const { return chunks_aligned(*tensor_) && cols_ == Tile::kCols; }

  // Where in a tile the thread's first chunk goes.
  __device__ __forceinline__ static int first_chunk() {
    const unsigned thread = forget(threadIdx.x);
    return Tile::offset(Lanes::row(thread), Lanes::col(thread));
  }

  // The same where all rows exist and are whole. target: of the thread's first chunk.
  __device__ __forceinline__ void load_whole(uint32_t target) const {
    const int64_t stride = forget(tensor_->row);
    const T* source = source_;
#pragma unroll
    for (int r = 0; r < Tile::kRows; r += Lanes::kRowsPerPass, source += Lanes::kRowsPerPass * stride)
#pragma unroll
      for (int c = 0; c < Tile::kCols; c += Lanes::kCols) ptx::cp_async_16(target + Tile::shift(r, c), source + c);
  }

  // The same where rows or columns end inside the tile or rows are not aligned.
  __device__ __forceinline__ void load_edge(uint32_t tile, int rows) const {
    const unsigned thread = forget(threadIdx.x);
    const int row = Lanes::row(thread), col = Lanes::col(thread);
    const uint32_t target = tile + Tile::offset(row, col);
    const int64_t stride = forget(tensor_->row);
    const T* source = source_;
    const bool aligned = chunks_aligned(*tensor_);
#pragma unroll 1
    for (int r = 0; r < Tile::kRows; r += Lanes::kRowsPerPass, source += Lanes::kRowsPerPass * stride)
#pragma unroll 1
      for (int c = 0; c < Tile::kCols; c += Lanes::kCols) {
        const int elements = row + r < rows ? max_of(0, min_of(8, cols_ - col - c)) : 0;
        if (aligned) {
          ptx::cp_async_16(target + Tile::shift(r, c), source + c, 2 * elements);
        } else {
          copy_elements(target + Tile::shift(r, c), source + c, elements);
        }
      }
  }

 private:
  const Strided* tensor_;
  const T* source_;  // the thread's first chunk of the head's (rows, cols)
  int cols_;
};

}  // namespace flash::sm80
