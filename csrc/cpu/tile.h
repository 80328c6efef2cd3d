// fp32 tiles: rows of a tensor copied (converted, zero-padded) into a worker's own memory, and back.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "../attn/seqlen.h"
#include "element.h"
#include "tile_ops.h"

namespace flash::cpu {

// An array of floats that begins on a cache line.
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<float*>(::operator new(size * sizeof(float), kLine))) {}
  operator float*() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<float, Free> data_;
};

// Length of a tile's rows for a tensor with `dim` columns.
constexpr int padded(int dim) { return round_up(dim, kPad); }

inline void to_floats(float* floats, const float* x, int count) { std::memcpy(floats, x, count * sizeof(float)); }
inline void to_floats(float* floats, const Half* x, int count) { tile_ops().half_to_floats(floats, x, count); }
inline void to_floats(float* floats, const BFloat16* x, int count) { tile_ops().bfloat16_to_floats(floats, x, count); }

// Row `row` of a sequence that begins at `first_row`, in head `head`.
template <class T>
T* row_of(const Strided& t, int batch_index, int64_t first_row, int row, int head) {
  return static_cast<T*>(t.ptr) + offset_of(t, batch_index, first_row, row, head);
}
inline float* row_of(const RowStats& t, int batch_index, int64_t first_row, int row, int head) {
  return t.ptr + offset_of(t, batch_index, first_row, row, head);
}

// tile (rows, padded(dim)) = rows of the tensor
template <class T>
void load_rows(float* tile, const T* source, int64_t stride, int rows, int dim) {
  const int ld = padded(dim);
  for (int r = 0; r < rows; r++, tile += ld, source += stride) {
    to_floats(tile, source, dim);
    for (int d = dim; d < ld; d++) tile[d] = 0.f;
  }
}

// tile (dim, kColumns) = rows of the tensor, transposed; columns up to padded(rows) are zero
template <int kColumns, class T>
void load_transposed(float* tile, const T* source, int64_t stride, int rows, int dim) {
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < dim; d++) tile[d * kColumns + r] = to_float(source[r * stride + d]);
  for (int d = 0; d < dim; d++)
    for (int r = rows; r < padded(rows); r++) tile[d * kColumns + r] = 0.f;
}

// rows of the tensor = factor * tile (rows, padded(dim)); factor (rows), or nullptr for 1
template <class T>
void store_rows(T* target, int64_t stride, const float* tile, const float* factor, int rows, int dim) {
  for (int r = 0; r < rows; r++, target += stride, tile += padded(dim)) {
    const float f = factor ? factor[r] : 1.f;
    for (int d = 0; d < dim; d++) target[d] = from_float<T>(tile[d] * f);
  }
}

}  // namespace flash::cpu
