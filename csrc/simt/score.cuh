// What happens to a warp's tile of q.k products before the softmax: scale, softcap, ALiBi, bias, mask; and dropout
// after it. The options are switched at run time, one uniform branch per option and tile. Tiles have queries as rows
// (forward, dq) or keys as rows (dk and dv).
#pragma once

#include "../attn/dropout.h"
#include "../attn/mask.h"
#include "../attn/numeric.cuh"
#include "../attn/score.h"

namespace flash::simt {

// One head of one sequence, and what its scores need.
struct Head {
  const AttnParams& p;
  Band band;
  ScoreMod mod;
  Dropout dropout;
  int64_t bias_offset;  // elements to (batch_index, head, 0, 0) of the bias
  uint32_t index;       // batch_index * num_heads + head
  bool general;         // some option changes the scores

  __device__ Head(const AttnParams& params, const SeqInfo& seq, int batch_index, int head)
      : p(params),
        band(Band::of(params, seq)),
        mod(ScoreMod::of(params, batch_index, head)),
        bias_offset(batch_index * params.bias.batch + head * params.bias.head),
        index(uint32_t(batch_index) * params.num_heads + head),
        general(mod.softcap != 0.f || mod.alibi_slope != 0.f || params.bias.ptr != nullptr) {
    if (params.dropout_p != 0.f) dropout = Dropout::of(params.dropout_p, params.rng_state);
  }

  __device__ float bias(int i, int j) const {
    if (i >= band.seqlen_q || j >= band.seqlen_k) return 0.f;
    const int64_t at = bias_offset + i * p.bias.row + j * p.bias.col;
    if (p.bias.is_f32) return static_cast<const float*>(p.bias.ptr)[at];
    if (p.dtype == DType::kF16) return to_float(static_cast<const __half*>(p.bias.ptr)[at]);
    return to_float(static_cast<const __nv_bfloat16*>(p.bias.ptr)[at]);
  }
};

// The query i and key j of number [r][c] of a lane, in a tile whose first row and column are row0 and col0.
template <class Math, bool kRowsAreKeys>
struct Place {
  int row0, col0;

  __device__ int row(int r) const { return row0 + Math::row(r); }
  __device__ int col(int c) const { return col0 + Math::score_col(c); }
  __device__ int i(int r, int c) const { return kRowsAreKeys ? col(c) : row(r); }
  __device__ int j(int r, int c) const { return kRowsAreKeys ? row(r) : col(c); }
};

// x = f(x, i, j) for every number of row r.
template <class At, int kC, class F>
__device__ __forceinline__ void for_row(float (&x)[kC], const At& at, int r, F&& f) {
#pragma unroll
  for (int c = 0; c < kC; c++) x[c] = f(x[c], at.i(r, c), at.j(r, c));
}

// q.k products become scores in natural units; masked ones -inf. The branches stand inside the loop over rows so that
// the compiler works on one row at a time: a whole tile at once would need more registers than there are.
template <class Math, bool kRowsAreKeys, int kR, int kC>
__device__ __forceinline__ void to_scores(float (&x)[kR][kC], const Head& head, const Place<Math, kRowsAreKeys>& at,
                                          bool masked) {
  const ScoreMod& mod = head.mod;
#pragma unroll
  for (int r = 0; r < kR; r++) for_row(x[r], at, r, [&](float s, int, int) { return s * mod.softmax_scale; });
  if (head.general) {
#pragma unroll
    for (int r = 0; r < kR; r++) {
      if (mod.softcap != 0.f)
        for_row(x[r], at, r, [&](float s, int, int) { return mod.softcap * tanhf(s / mod.softcap); });
      if (mod.alibi_slope != 0.f)
        for_row(x[r], at, r,
                [&](float s, int i, int j) { return s - mod.alibi_slope * float(abs(head.band.diagonal(i) - j)); });
      if (head.p.bias.ptr != nullptr) for_row(x[r], at, r, [&](float s, int i, int j) { return s + head.bias(i, j); });
    }
  }
  if (masked) {
#pragma unroll
    for (int r = 0; r < kR; r++) {
      const int row = at.row(r);
      const int begin = kRowsAreKeys ? head.band.query_begin(row) : head.band.key_begin(row);
      const int end = kRowsAreKeys ? head.band.query_end(row) : head.band.key_end(row);
#pragma unroll
      for (int c = 0; c < kC; c++)
        if (at.col(c) < begin || at.col(c) >= end) x[r][c] = -INFINITY;
    }
  }
}

// Which numbers of row r of the tile dropout keeps: bit c. The loop stays a loop: unrolled, it would be most of the
// kernel.
template <class Math, bool kRowsAreKeys, int kC>
__device__ __forceinline__ uint32_t kept_bits(const Head& head, const Place<Math, kRowsAreKeys>& at, int r) {
  // The columns that a lane owns of 32 keys share one call of attn/dropout.h.
  constexpr int kShared = kRowsAreKeys ? 1 : min_of(kC, 32 / Math::kLaneCols);
  uint32_t bits = 0;
#pragma unroll 1
  for (int c0 = 0; c0 < kC; c0 += kShared) {
    const Philox random = head.dropout.draw(head.index, at.i(r, c0), at.j(r, c0));
#pragma unroll
    for (int c = c0; c < c0 + kShared; c++) bits |= uint32_t(head.dropout.keep(random, at.i(r, c), at.j(r, c))) << c;
  }
  return bits;
}

// Dropped numbers of a row become 0, the others are multiplied by `factor`.
template <int kC>
__device__ __forceinline__ void drop(float (&x)[kC], uint32_t kept, float factor) {
#pragma unroll
  for (int c = 0; c < kC; c++) x[c] = kept >> c & 1 ? x[c] * factor : 0.f;
}

}  // namespace flash::simt
