// From S to P in the general variants: softcap, ALiBi, bias and dropout, as the call asks for.
#pragma once

#include "../attn/dropout.h"
#include "bwd_scores.cuh"

namespace flash::sm90 {

// tanh and its derivative by one exponential: absolute error 3e-7 (scores need no relative one), and a derivative that
// keeps its digits where tanh saturates.
__device__ __forceinline__ void tanh_and_derivative(float x, float& value, float& derivative) {
  const float e = exp2_approx(fabsf(x) * (-2.f * kLog2e)), r = __fdividef(1.f, 1.f + e);
  value = copysignf((1.f - e) * r, x);
  derivative = 4.f * e * r * r;
}

// The general variant: softcap, ALiBi, bias and dropout, as the call asks for (attn/score.h has the order), for one
// head. Reads its options from the kernel's parameters: registers are short.
struct GeneralScores {
  const BwdParams& p;
  const Band& band;
  const int batch, head;

  // Which of a thread's entries of `kQueries` queries are visible: bit i for entry acc[i].
  template <int kQueries>
  __device__ __forceinline__ uint32_t visible_entries(int key, int first_query) const {
    const VisibleQueries visible = VisibleQueries::of(band, key, first_query);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kQueries / 2; i++) bits |= uint32_t(visible(i)) << i;
    return bits;
  }

  // Which of them dropout keeps.
  template <int kQueries>
  __device__ __forceinline__ uint32_t kept_entries(int key, int first_query) const {
    if (p.dropout_p == 0.f) return ~0u;
    const Dropout dropout = Dropout::of(p.dropout_p, p.rng_state);
    uint32_t kept = 0;
#pragma unroll 1
    for (int i = 0; i < kQueries / 4; i++) {  // query i % 2 of group i / 2
      const Philox random = dropout.octet(uint32_t(batch * p.num_heads + head), first_query + 8 * (i / 2) + i % 2, key);
#pragma unroll
      for (int r = 0; r < 2; r++) kept |= uint32_t(dropout.keep(random, key + 8 * r)) << (4 * (i / 2) + 2 * r + i % 2);
    }
    return kept;
  }

  template <class T>
  __device__ __forceinline__ float bias(int query, int key) const {
    const int64_t at = batch * p.bias.batch + head * p.bias.head + query * p.bias.row + key * p.bias.col;
    return p.bias.is_f32 ? static_cast<const float*>(p.bias.ptr)[at] : to_float(static_cast<const T*>(p.bias.ptr)[at]);
  }

  // Entries 4g ... 4g + 3. acc_s: S in, P times d score / d S out, negative where dropped. probabilities: P, 0 where
  // dropped, packed by key.
  template <class T, int kCount>
  __device__ __forceinline__ void exponentials(float (&acc_s)[kCount], uint32_t (&probabilities)[2], int g, float2 lse,
                                               int key, int first_query, uint32_t visible_entries,
                                               uint32_t kept_entries) const {
    const float slope = p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] : 0.f;
    float kept_p[2][2];  // [key][query]
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int i = 4 * g + 2 * r + c, query = first_query + 8 * g + c, j = key + 8 * r;
        const bool seen = visible_entries >> i & 1, kept = kept_entries >> i & 1;
        float score = acc_s[i] * p.softmax_scale, derivative = 1.f;
        if (p.softcap != 0.f) {
          float t;
          tanh_and_derivative(score / p.softcap, t, derivative);
          score = p.softcap * t;
        }
        score -= slope * float(abs(band.diagonal(query) - j));
        if (p.bias.ptr != nullptr && seen) score += bias<T>(query, j);
        const float x = seen ? exp2_approx((score - (c == 0 ? lse.x : lse.y)) * kLog2e) : 0.f;
        kept_p[r][c] = kept ? x : 0.f;
        acc_s[i] = !seen ? 0.f : kept ? x * derivative : -x * derivative;  // unseen: K may be NaN
      }
#pragma unroll
    for (int r = 0; r < 2; r++) probabilities[r] = pack2<T>(kept_p[r][0], kept_p[r][1]);
  }
};

}  // namespace flash::sm90
