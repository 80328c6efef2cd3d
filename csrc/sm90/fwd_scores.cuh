// From the product Q K^T to scores: the mask, and in general variants scale, softcap, ALiBi and bias; dropout of P.
#pragma once

#include <math_constants.h>

#include "../attn/dropout.h"
#include "../attn/score.h"
#include "fwd_traits.cuh"

namespace flash::sm90 {

// This thread's place in a tile: rows row and row + 8 of the sequence, columns column + 8i + {0, 1} of a block.
struct FragmentPlace {
  int row, column;
};

// Scores of keys that a row does not see become -inf.
template <class Traits>
__device__ __forceinline__ void mask_block(float (&acc_s)[Traits::kBlockN / 2], const Band& band, FragmentPlace at,
                                           int n_block, const BlockRange& blocks) {
  const int col0 = n_block * Traits::kBlockN + at.column;
  const bool none_full = blocks.full_begin >= blocks.full_end;  // then the two say nothing about either edge
  if (n_block >= blocks.full_end || none_full) {
    const int end[2] = {band.key_end(at.row) - col0, band.key_end(at.row + 8) - col0};
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 2; i++)
      if (8 * (i / 4) + i % 2 >= end[(i / 2) % 2]) acc_s[i] = -CUDART_INF_F;
  }
  if (band.window_left >= 0 && (n_block < blocks.full_begin || none_full)) {
    const int begin[2] = {band.key_begin(at.row) - col0, band.key_begin(at.row + 8) - col0};
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 2; i++)
      if (8 * (i / 4) + i % 2 < begin[(i / 2) % 2]) acc_s[i] = -CUDART_INF_F;
  }
}

// General variants: scores in natural units.
template <class Traits>
__device__ __forceinline__ void modify_scores(float (&acc_s)[Traits::kBlockN / 2], const FwdParams& p, const Tile& tile,
                                              FragmentPlace at, int n_block) {
  const ScoreMod mod = ScoreMod::of(p, tile.batch, tile.head);
  const int col0 = n_block * Traits::kBlockN + at.column;
#pragma unroll
  for (int i = 0; i < Traits::kBlockN / 2; i++) acc_s[i] *= mod.softmax_scale;
  if (mod.softcap != 0.f) {
    const float twice = 2.f * kLog2e / mod.softcap;
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 2; i++) {
      // tanh(x) = 1 - 2 / (1 + exp(2x)): its absolute error of 1e-7 is what counts here.
      const float q = __fdividef(2.f, 1.f + exp2_approx(acc_s[i] * twice));
      acc_s[i] = mod.softcap - mod.softcap * q;
    }
  }
  if (mod.alibi_slope != 0.f) {
    const int diagonal = at.row + tile.seqlen_k - tile.seqlen_q - col0;
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 2; i++) {
      const int distance = diagonal + 8 * ((i / 2) % 2) - 8 * (i / 4) - i % 2;
      acc_s[i] -= mod.alibi_slope * fabsf(float(distance));
    }
  }
  if (p.bias.ptr != nullptr) {
    const int64_t head = tile.batch * p.bias.batch + tile.head * p.bias.head;
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 2; i++) {
      const int row = at.row + 8 * ((i / 2) % 2), col = col0 + 8 * (i / 4) + i % 2;
      if (row >= tile.seqlen_q || col >= tile.seqlen_k) continue;
      const int64_t offset = head + row * p.bias.row + col * p.bias.col;
      acc_s[i] += p.bias.is_f32 ? static_cast<const float*>(p.bias.ptr)[offset]
                                : to_float(static_cast<const typename Traits::Element*>(p.bias.ptr)[offset]);
    }
  }
}

// Zeroes the entries of P that dropout drops; the survivors' scale is applied to the output.
template <class Traits>
__device__ __forceinline__ void drop(uint32_t (&p)[Traits::kBlockN / 16][4], const FwdParams& params, const Tile& tile,
                                     FragmentPlace at, int n_block) {
  const Dropout dropout = Dropout::of(params.dropout_p, params.rng_state);
  const uint32_t threshold = min(dropout.threshold, 0xFFFFu) * 0x10001u;
  const uint32_t head = tile.batch * params.num_heads + tile.head;
#pragma unroll
  for (int g = 0; g < Traits::kBlockN / 32; g++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Philox random = dropout.octet(head, at.row + 8 * r, n_block * Traits::kBlockN + 32 * g + at.column);
#pragma unroll
      for (int i = 0; i < 4; i++) p[2 * g + i / 2][2 * (i % 2) + r] &= __vcmpgeu2(random.word[i], threshold);
    }
  }
}

}  // namespace flash::sm90
