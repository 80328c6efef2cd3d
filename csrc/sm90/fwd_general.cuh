// What general variants do beyond plain ones, switched at run time: scale, softcap, ALiBi and bias of the scores,
// dropout of P. Scores come out in natural units (attn/score.h says why, and is the readable form of this file).
#pragma once

#include "../attn/dropout.h"
#include "../attn/score.h"
#include "fwd_scores.cuh"

namespace flash::sm90 {

template <class Traits>
struct FwdGeneral {
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2;

  const FwdParams& params;
  const Tile& tile;
  FragmentPlace at;  // rows at.row and at.row + 8
  int col0;          // this thread's first column

  __device__ __forceinline__ FwdGeneral(const FwdParams& p, const Tile& t, FragmentPlace place, int n_block)
      : params(p), tile(t), at(place), col0(n_block * kBlockN + place.column) {}

  // Q K^T -> scores.
  __device__ __forceinline__ void modify(float (&acc_s)[kScores]) const {
    if (params.softcap != 0.f) {
      softcap(acc_s, params.softcap, params.softmax_scale);
    } else {
#pragma unroll
      for (int i = 0; i < kScores; i++) acc_s[i] *= params.softmax_scale;
    }
    if (params.alibi_slopes != nullptr)
      alibi(acc_s, params.alibi_slopes[tile.batch * params.alibi_batch_stride + tile.head]);
    if (params.bias.ptr != nullptr) {
      if (params.bias.is_f32) {
        add_bias<float, float2>(acc_s);
      } else {
        add_bias<Element, uint32_t>(acc_s);
      }
    }
  }

  // Zeroes the entries of P that dropout drops; the scale of the others is applied to the output.
  __device__ __forceinline__ void drop(uint32_t (&p)[kBlockN / 16][4]) const {
    const Dropout dropout = Dropout::of(params.dropout_p, params.rng_state);
    const uint32_t threshold = min(dropout.threshold, 0xFFFFu) * 0x10001u;
    const uint32_t head = tile.batch * params.num_heads + tile.head;
#pragma unroll
    for (int g = 0; g < kBlockN / 32; g++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Philox random = dropout.octet(head, at.row + 8 * r, col0 + 32 * g);
#pragma unroll
        for (int i = 0; i < 4; i++) p[2 * g + i / 2][2 * (i % 2) + r] &= __vcmpgeu2(random.word[i], threshold);
      }
    }
  }

 private:
  // cap * tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)): its absolute error of 1e-7 cap is what counts here.
  // Special functions are what is short, so four elements share one reciprocal; the bound keeps their product finite,
  // and beyond it tanh is 1.
  __device__ __forceinline__ static void softcap(float (&acc_s)[kScores], float cap, float scale) {
    const float twice = 2.f * kLog2e * scale / cap;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = 1.f + exp2_approx(fminf(acc_s[i + j] * twice, 30.f));
      const float front = x[0] * x[1], back = x[2] * x[3];
      const float minus_twice = __fdividef(-2.f * cap, front * back);
      const float of_front = minus_twice * back, of_back = minus_twice * front;
      acc_s[i] = fmaf(of_front, x[1], cap);
      acc_s[i + 1] = fmaf(of_front, x[0], cap);
      acc_s[i + 2] = fmaf(of_back, x[3], cap);
      acc_s[i + 3] = fmaf(of_back, x[2], cap);
    }
  }

  __device__ __forceinline__ void alibi(float (&acc_s)[kScores], float slope) const {
    const float diagonal = float(at.row + tile.seqlen_k - tile.seqlen_q - col0);
#pragma unroll
    for (int i = 0; i < kScores; i++)
      acc_s[i] = fmaf(-slope, fabsf(diagonal + float(8 * ((i / 2) % 2) - 8 * (i / 4) - i % 2)), acc_s[i]);
  }

  // Bias of two neighbouring columns in one load where rows are contiguous and aligned and the block has all its
  // columns.
  template <class Bias, class Pair>
  __device__ __forceinline__ void add_bias(float (&acc_s)[kScores]) const {
    const auto& b = params.bias;
    const Bias* base = static_cast<const Bias*>(b.ptr) + tile.batch * b.batch + tile.head * b.head;
    const Bias* row[2];
    uintptr_t places = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      row[r] = base + min(at.row + 8 * r, tile.seqlen_q - 1) * b.row + col0 * b.col;
      places |= reinterpret_cast<uintptr_t>(row[r]);
    }
    if (b.col == 1 && places % sizeof(Pair) == 0 && col0 - at.column + kBlockN <= tile.seqlen_k) {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const Pair pair = __ldg(reinterpret_cast<const Pair*>(row[(i / 2) % 2] + 8 * (i / 4)));
        const float2 x = unpack(pair);
        acc_s[i] += x.x;
        acc_s[i + 1] += x.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; i++) {
        const int col = 8 * (i / 4) + i % 2;
        if (col0 + col < tile.seqlen_k) acc_s[i] += to_float(row[(i / 2) % 2][col * b.col]);
      }
    }
  }

  __device__ __forceinline__ static float2 unpack(float2 pair) { return pair; }
  __device__ __forceinline__ static float2 unpack(uint32_t pair) {
    if constexpr (Traits::kDType == DType::kF16) {
      return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    } else {
      return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
    }
  }
};

}  // namespace flash::sm90
