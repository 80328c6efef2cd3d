// What happens to a tile of q.k before the softmax: softcap, ALiBi and bias, the mask, and dropout after it.
#pragma once

#include "../attn/dropout.h"
#include "../attn/mask.h"
#include "../attn/score.h"
#include "tile_ops.h"

namespace flash::cpu {

// Scores of queries row0 ... row0 + rows - 1 and keys col0 ... col0 + cols - 1 of one head; (i, j) is at
// data[i * query_stride + j * key_stride].
struct ScoreTile {
  float* data;
  int query_stride, key_stride;
  int row0, col0, rows, cols;
  float& at(int i, int j) const { return data[i * query_stride + j * key_stride]; }
};

// Entry (row, col) of the bias of one head.
template <class T>
float bias_at(const Bias& bias, int batch_index, int head, int row, int col) {
  const int64_t at = batch_index * bias.batch + head * bias.head + row * bias.row + col * bias.col;
  return bias.is_f32 ? static_cast<const float*>(bias.ptr)[at] : to_float(static_cast<const T*>(bias.ptr)[at]);
}

// Whether q.k times softmax_scale is not yet the score.
inline bool modifies_scores(const AttnParams& p) {
  return p.softcap != 0.f || p.alibi_slopes != nullptr || p.bias.ptr != nullptr;
}

// q.k -> score. derivative, of the tile's layout: d score / d (softmax_scale * q.k); nullptr if not wanted.
template <class T>
void modify_scores(const AttnParams& p, const Band& band, int batch_index, int head, const ScoreTile& s,
                   float* derivative) {
  const ScoreMod mod = ScoreMod::of(p, batch_index, head);
  for (int i = 0; i < s.rows; i++) {
    const int row = s.row0 + i, diagonal = band.diagonal(row);
    for (int j = 0; j < s.cols; j++) {
      const int col = s.col0 + j;
      const float bias = p.bias.ptr ? bias_at<T>(p.bias, batch_index, head, row, col) : 0.f;
      float& score = s.at(i, j);
      if (derivative) derivative[&score - s.data] = mod.derivative(score);
      score = mod(score, diagonal > col ? diagonal - col : col - diagonal, bias);
    }
  }
}

// Scores of keys that a query does not see become -inf. `width` columns are covered: those past `cols` hold no key.
inline void mask_scores(const Band& band, const ScoreTile& s, int width) {
  for (int i = 0; i < s.rows; i++) {
    const int begin = min_of(max_of(band.key_begin(s.row0 + i) - s.col0, 0), width);
    const int end = max_of(min_of(band.key_end(s.row0 + i) - s.col0, width), begin);
    for (int j = 0; j < begin; j++) s.at(i, j) = -kInf;
    for (int j = end; j < width; j++) s.at(i, j) = -kInf;
  }
}

// Dropped entries become 0, kept ones are scaled up. col0 is a multiple of 64.
inline void apply_dropout(const AttnParams& p, int batch_index, int head, const ScoreTile& s) {
  const Dropout dropout = Dropout::of(p.dropout_p, p.rng_state);
  const uint32_t matrix = uint32_t(batch_index) * p.num_heads + head;
  for (int i = 0; i < s.rows; i++) {
    Philox random[4];  // of 64 columns: call q serves the columns with col / 2 % 4 == q
    for (int j = 0; j < s.cols; j++) {
      const uint32_t col = s.col0 + j;
      if (j % 64 == 0)
        for (uint32_t q = 0; q < 4; q++) random[q] = dropout.draw(matrix, s.row0 + i, col + 2 * q);
      s.at(i, j) *= dropout.keep(random[col / 2 % 4], s.row0 + i, col) ? dropout.scale : 0.f;
    }
  }
}

}  // namespace flash::cpu
