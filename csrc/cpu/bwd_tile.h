// The tile step that the backward pass and the gradient of the bias share: from q, k, v, dout, lse and delta to the
// probabilities and the gradient of the scores.
#pragma once

#include <algorithm>

#include "scores.h"
#include "tile.h"

namespace flash::cpu {

// Which tile of which head.
struct BwdPlace {
  int batch_index, head;
  int m_block, n_block;
};

// The tiles of one worker.
struct BwdTiles {
  Buffer k, k_t;          // (kBlockN, head_dim), (head_dim, kBlockN)
  Buffer v_t;             // (head_dim_v, kBlockN)
  Buffer q, dout;         // (kBlockM, head_dim), (kBlockM, head_dim_v)
  Buffer probs, dscores;  // (kBlockM, kBlockN)
  Buffer kept;            // (kBlockM, kBlockN): probabilities after dropout, times 1 / (1 - p)
  Buffer derivative;      // (kBlockM, kBlockN): d score / d (softmax_scale * q.k), with softcap only
  Buffer lse;             // (kBlockM)
  Buffer dk, dv;          // (kBlockN, head_dim), (kBlockN, head_dim_v)

  explicit BwdTiles(const BwdParams& p)
      : k(kBlockN * padded(p.head_dim)),
        k_t(p.head_dim * kBlockN),
        v_t(p.head_dim_v * kBlockN),
        q(kBlockM * padded(p.head_dim)),
        dout(kBlockM * padded(p.head_dim_v)),
        probs(kBlockM * kBlockN),
        dscores(kBlockM * kBlockN),
        kept(kBlockM * kBlockN),
        derivative(kBlockM * kBlockN),
        lse(kBlockM),
        dk(kBlockN * padded(p.head_dim)),
        dv(kBlockN * padded(p.head_dim_v)) {}
};

template <class T>
void load_keys(const BwdParams& p, const SeqInfo& seq, int batch_index, int head_kv, int n_block, const BwdTiles& t) {
  const int col0 = n_block * kBlockN, cols = min_of(kBlockN, seq.seqlen_k - col0);
  const T* const k = row_of<const T>(p.k, batch_index, seq.k0, col0, head_kv);
  const T* const v = row_of<const T>(p.v, batch_index, seq.k0, col0, head_kv);
  load_rows(t.k, k, p.k.row, cols, p.head_dim);
  load_transposed<kBlockN>(t.k_t, k, p.k.row, cols, p.head_dim);
  load_transposed<kBlockN>(t.v_t, v, p.v.row, cols, p.head_dim_v);
}

template <class T>
void load_queries(const BwdParams& p, const SeqInfo& seq, int batch_index, int head, int m_block, const BwdTiles& t) {
  const int row0 = m_block * kBlockM, rows = min_of(kBlockM, seq.seqlen_q - row0);
  const T* const q = row_of<const T>(p.q, batch_index, seq.q0, row0, head);
  const T* const dout = row_of<const T>(p.dout, batch_index, seq.q0, row0, head);
  load_rows(t.q, q, p.q.row, rows, p.head_dim);
  load_rows(t.dout, dout, p.dout.row, rows, p.head_dim_v);
}

// From the loaded tiles: probs (and kept), and dscores, the gradient of the scores.
template <class T>
void compute_dscores(const BwdParams& p, const SeqInfo& seq, const BwdPlace& at, bool needs_mask, const BwdTiles& t) {
  const TileOps& ops = tile_ops();
  const Band band = Band::of(p, seq);
  const int row0 = at.m_block * kBlockM, rows = min_of(kBlockM, seq.seqlen_q - row0);
  const int col0 = at.n_block * kBlockN, cols = min_of(kBlockN, seq.seqlen_k - col0), lanes = padded(cols);
  const auto tile = [&](float* data) { return ScoreTile{data, kBlockN, 1, row0, col0, rows, cols}; };
  const bool modified = modifies_scores(p);

  // scores = q k^T
  ops.matmul({t.probs, kBlockN}, Tile{t.q, padded(p.head_dim)}, {t.k_t, kBlockN}, {rows, lanes, p.head_dim},
             {modified ? 1.f : p.softmax_scale, false});
  if (modified)
    modify_scores<T>(p, band, at.batch_index, at.head, tile(t.probs), p.softcap != 0.f ? +t.derivative : nullptr);
  if (needs_mask) mask_scores(band, tile(t.probs), lanes);

  // exp(score - inf) is the 0 that a row without keys needs; -inf - -inf would be NaN.
  const float* const lse = row_of(p.lse, at.batch_index, seq.q0, row0, at.head);
  for (int i = 0; i < rows; i++) t.lse[i] = lse[i] == -kInf ? kInf : lse[i];
  ops.exp_minus_lse(t.probs, rows, lanes, t.lse);

  // dprobs = dout v^T, then dscores = probs (dprobs - delta) in its place
  ops.matmul({t.dscores, kBlockN}, Tile{t.dout, padded(p.head_dim_v)}, {t.v_t, kBlockN}, {rows, lanes, p.head_dim_v},
             {1.f, false});
  if (p.dropout_p != 0.f) {
    std::copy_n(+t.probs, rows * kBlockN, +t.kept);
    apply_dropout(p, at.batch_index, at.head, tile(t.kept));
    apply_dropout(p, at.batch_index, at.head, tile(t.dscores));
  }
  ops.softmax_backward(t.dscores, t.probs, rows, lanes, row_of(p.delta, at.batch_index, seq.q0, row0, at.head));
}

}  // namespace flash::cpu
