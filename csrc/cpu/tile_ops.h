// The arithmetic on fp32 tiles that takes the time, compiled for several vector widths; the processor's own is chosen
// once.
#pragma once

#include <cstdint>

namespace flash::cpu {

inline constexpr int kBlockM = 64;  // queries of a tile
inline constexpr int kBlockN = 64;  // keys of a tile
inline constexpr int kPad = 16;     // floats: tiles are zero-padded in their last dimension to a multiple of it

// A view of an fp32 matrix: element (r, c) at data[r * row + c * col]. Transposing it is swapping the strides.
struct View {
  const float* data;
  int64_t row, col;
  View transposed() const { return {data, col, row}; }
};

struct TileOps {
  // c (m, n) = alpha * a (m, k) . b (k, n), or += where accumulate. n is a multiple of kPad; ldb, ldc: row lengths.
  // Every element is one chain of k additions in order, whatever its place in the tile: backward recomputes the
  // forward's scores bit by bit.
  void (*matmul)(float* c, int64_t ldc, View a, const float* b, int64_t ldb, int m, int n, int k, float alpha,
                 bool accumulate);

  // One step of online softmax. scores (keys, kBlockM): a column belongs to a query. In: scores; out: exp(score -
  // row_max). row_max, row_sum, rescale (kBlockM): the running state, and what the earlier state has to be multiplied
  // with.
  void (*online_softmax)(float* scores, int keys, int queries, float* row_max, float* row_sum, float* rescale);

  // probs (queries, kBlockN) = exp(scores - lse); lse (queries), +inf for a row without keys.
  void (*exp_minus_lse)(float* scores, int queries, int keys, const float* lse);

  // dscores (queries, kBlockN) = probs * (dprobs - delta), in place of dprobs; delta (queries)
  void (*softmax_backward)(float* dprobs, const float* probs, int queries, int keys, const float* delta);
};

const TileOps& tile_ops();

}  // namespace flash::cpu
