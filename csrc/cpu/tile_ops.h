// The arithmetic on fp32 tiles that takes the time, compiled for several vector widths; the processor's own is chosen
// once.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "element.h"

namespace flash::cpu {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline constexpr int kBlockM = 64;  // queries of a tile
inline constexpr int kBlockN = 64;  // keys of a tile
inline constexpr int kPad = 16;     // floats: tiles are zero-padded in their last dimension to a multiple of it

// An fp32 matrix in memory: element (r, c) at data[r * row + c].
struct Tile {
  float* data;
  int64_t row;
  Tile from(int r, int c) const { return {data + r * row + c, row}; }
};

// The same to be read with any strides: element (r, c) at data[r * row + c * col].
struct View {
  const float* data;
  int64_t row, col;
  View(Tile t) : data(t.data), row(t.row), col(1) {}
  View(const float* d, int64_t r, int64_t c) : data(d), row(r), col(c) {}
  View from_row(int r) const { return {data + r * row, row, col}; }
};
inline View transposed(Tile t) { return {t.data, 1, t.row}; }

// What becomes of a product: c = alpha * product, or c += alpha * product. Passed by reference so that alpha does not
// take a vector register from the inner loop.
struct Finish {
  float alpha;
  bool accumulate;
};
struct Shape {
  int m, n, k;
};

struct TileOps {
  void (*half_to_floats)(float* floats, const Half* elements, int count);
  void (*bfloat16_to_floats)(float* floats, const BFloat16* elements, int count);

  // c (m, n) from a (m, k) . b (k, n); n is a multiple of kPad.
  // Every element is one chain of k additions in order, whatever its place in the tile: backward recomputes the
  // forward's scores bit by bit.
  void (*matmul)(Tile c, View a, Tile b, Shape shape, const Finish& finish);

  // One step of online softmax. scores (keys, kBlockM): a column belongs to a query. In: scores; out: exp(score -
  // row_max). row_max, row_sum, rescale (kBlockM): the running state, and what the earlier state has to be multiplied
  // with.
  void (*online_softmax)(float* scores, int keys, int queries, float* row_max, float* row_sum, float* rescale);

  // tile (rows, dim) *= factor (rows); dim: a multiple of kPad
  void (*scale_rows)(float* tile, int rows, int dim, const float* factor);

  // probs (queries, kBlockN) = exp(scores - lse); lse (queries), +inf for a row without keys.
  void (*exp_minus_lse)(float* scores, int queries, int keys, const float* lse);

  // dscores (queries, kBlockN) = probs * (dprobs - delta), in place of dprobs; delta (queries)
  void (*softmax_backward)(float* dprobs, const float* probs, int queries, int keys, const float* delta);
};

// For every instruction set that this processor has, the best first.
std::vector<const TileOps*> usable_tile_ops();

const TileOps& tile_ops();  // the best

}  // namespace flash::cpu
