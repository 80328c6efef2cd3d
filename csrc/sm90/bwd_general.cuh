// What general variants do beyond plain ones to a transposed tile (bwd_scores.cuh): scale, softcap, ALiBi and bias of
// the scores, dropout of P. attn/score.h is the readable form of this file.
#pragma once

#include "../ptx/matrix.cuh"
#include "bwd_kept.cuh"
#include "bwd_scores.cuh"

namespace flash::sm90 {

// Which parts a kernel has, and which of them the call at hand asks for.
template <Option kOption>
struct Has {
  template <Option kOne>
  static constexpr bool kMay = may_have(kOption, kOne);
  // Units of scores and LSE: natural where a bias is added. In units of log2(e) finfo.min would become -inf, and a
  // finite bias is not a mask.
  static constexpr bool kNatural = kMay<Option::kBias>;
  // Whether dS needs another factor than P as dV has it.
  static constexpr bool kFactorApart = kMay<Option::kSoftcap> || kMay<Option::kDropout>;

  __device__ __forceinline__ static bool softcap(const AttnParams& p) {
    return kOption == Option::kSoftcap || (kMay<Option::kSoftcap> && p.softcap != 0.f);
  }
  __device__ __forceinline__ static bool alibi(const AttnParams& p) {
    return kOption == Option::kAlibi || (kMay<Option::kAlibi> && p.alibi_slopes != nullptr);
  }
  __device__ __forceinline__ static bool bias(const AttnParams& p) {
    return kOption == Option::kBias || (kMay<Option::kBias> && p.bias.ptr != nullptr);
  }
};

// s -> tanh(s * x_per_s), and its derivative there. Special functions are what is short: while all arguments of a warp
// are below 1/2 a polynomial of odd powers does. The other form keeps the derivative's digits where tanh is near 1, and
// four elements share one reciprocal. Absolute errors of tanh are 1.3e-7 in both.
__device__ __forceinline__ void tanh_with_derivative(float* s, float (&derivative)[8], float x_per_s) {
  constexpr float c0 = 0.99999768f, c1 = -0.33320654f, c2 = 0.13145129f, c3 = -0.04337203f;
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    s[i] *= x_per_s;
    largest = fmaxf(largest, fabsf(s[i]));
  }
  if (__any_sync(~0u, largest >= 0.5f)) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      float e[4];  // exp(-2 |x|)
#pragma unroll
      for (int j = 0; j < 4; j++) e[j] = exp2_approx(fabsf(s[i + j]) * (-2.f * kLog2e));
      const float front = (1.f + e[0]) * (1.f + e[1]), back = (1.f + e[2]) * (1.f + e[3]);
      const float r = __fdividef(1.f, front * back), of_front = r * back, of_back = r * front;
      const float inverse[4] = {of_front * (1.f + e[1]), of_front * (1.f + e[0]), of_back * (1.f + e[3]),
                                of_back * (1.f + e[2])};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float x = e[j] * inverse[j];
        s[i + j] = copysignf(fmaf(-2.f, x, 1.f), s[i + j]);
        derivative[i + j] = 4.f * x * inverse[j];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float t = s[i] * s[i];
      s[i] *= fmaf(t, fmaf(t, fmaf(t, c3, c2), c1), c0);
      derivative[i] = fmaf(-s[i], s[i], 1.f);
    }
  }
}

// The tile of 64 keys of one head that a thread's warpgroup works on.
template <class T, Option kOption>
class GeneralScores {
  using Has = sm90::Has<kOption>;

  const BwdArgs& args;
  const BwdParams& p;
  const BwdBlock& block;
  const int head, key, first_query;  // of all heads; of this thread's first entry
  const uint32_t bias_row;           // this lane's row in the copied tile of bias, as transposed_address has it
  const EntriesOf<Has::template kMay<Option::kDropout>> entries;
  float slope = 0.f, ahead = 0.f;  // ALiBi; of the first entry's diagonal over its key

 public:
  // bias, kept: of the warpgroup, where there are such.
  __device__ __forceinline__ GeneralScores(const BwdArgs& args, const BwdBlock& block, int head, int key,
                                           int first_query, uint32_t bias, uint32_t kept)
      : args(args),
        p(args.p),
        block(block),
        head(head),
        key(key),
        first_query(first_query),
        bias_row(bias),
        entries(args.p, kept) {
    if (!Has::alibi(p)) return;
    slope = p.alibi_slopes[block.batch * p.alibi_batch_stride + head] * (Has::kNatural ? 1.f : kLog2e);
    ahead = float(block.band.diagonal(first_query) - key);
  }

  // Entries of 16 queries, number `chunk` of the tile. s: S in; P times d score / d S out. Returns P, 0 where dropped,
  // as the A operand of dV.
  template <bool kMasked, int kGroups>
  __device__ __forceinline__ void exponentials(float* s, uint32_t (&probabilities)[4], const QueryStats<kGroups>& lse,
                                               const VisibleQueries& visible, int chunk) const {
    float derivative[8], added[8];
    float factor = p.softmax_scale;
    if (Has::softcap(p)) {
      if constexpr (kMasked) {  // elements share a reciprocal, and a hidden one may be NaN
#pragma unroll
        for (int e = 0; e < 8; e++) s[e] = visible(8 * chunk + e) ? s[e] : 0.f;
      }
      tanh_with_derivative(s, derivative, p.softmax_scale / p.softcap);
      factor = p.softcap;
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++) derivative[e] = 1.f;
    }
    if (Has::bias(p)) {
      load_bias<kMasked>(added, chunk, visible);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++) added[e] = 0.f;
    }
    if (Has::alibi(p)) subtract_alibi(added, chunk);
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float2 of_group = lse.of[2 * chunk + e / 4];
      const float l = e % 2 == 0 ? of_group.x : of_group.y;
      float score;
      if constexpr (Has::kNatural)
        score = (fmaf(s[e], factor, added[e]) - l) * kLog2e;
      else if constexpr (kOption == Option::kAlibi)
        score = fmaf(s[e], factor * kLog2e, -l) + added[e];
      else
        score = fmaf(s[e], factor * kLog2e, -l);
      x[e] = exp2_approx(score);
      if constexpr (kMasked) {  // behind the exponential: whatever a hidden row holds stays out
        const bool seen = visible(8 * chunk + e);
        x[e] = seen ? x[e] : 0.f;
        derivative[e] = seen ? derivative[e] : 0.f;
      }
      s[e] = Has::template kMay<Option::kSoftcap> ? x[e] * derivative[e] : x[e];
    }
#pragma unroll
    for (int e = 0; e < 8; e += 2)
      probabilities[e / 2] = pack2<T>(x[e], x[e + 1]) & entries.mask_of_pair(8 * chunk + e);
  }

  // What exponentials() left in s, to the rows of these 16 queries in a tile (transposed_address).
  __device__ __forceinline__ static void store_factors(const float* s, uint32_t address) {
    uint32_t factor[4];
#pragma unroll
    for (int j = 0; j < 4; j++) factor[j] = pack2<T>(s[2 * j], s[2 * j + 1]);
    ptx::stmatrix_x4_trans(address, factor);
  }

 private:
  // Bias comes by the copy engine where it can, else straight from global memory.
  template <bool kMasked>
  __device__ __forceinline__ void load_bias(float (&added)[8], int chunk, const VisibleQueries& visible) const {
    if (kOption == Option::kBias || args.copies_bias) {
      uint32_t pair[4];
      ptx::ldmatrix_x4_trans(pair, bias_row + chunk * 16 * 128);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 b = unpack2<T>(pair[j]);
        added[2 * j] = b.x, added[2 * j + 1] = b.y;
      }
    } else if constexpr (kOption == Option::kAny) {
      const int64_t at =
          block.batch * p.bias.batch + head * p.bias.head + (first_query + 16 * chunk) * p.bias.row + key * p.bias.col;
      if (p.bias.is_f32)
        load_bias_from<kMasked>(static_cast<const float*>(p.bias.ptr) + at, added, chunk, visible);
      else
        load_bias_from<kMasked>(static_cast<const T*>(p.bias.ptr) + at, added, chunk, visible);
    }
  }
  template <bool kMasked, class Number>
  __device__ __forceinline__ void load_bias_from(const Number* bias, float (&added)[8], int chunk,
                                                 const VisibleQueries& visible) const {
    if (p.bias.row == 0) {  // masks of keys, mostly
      const bool exists[2] = {!kMasked || key < block.seq.seqlen_k, !kMasked || key + 8 < block.seq.seqlen_k};
      const float of_key[2] = {exists[0] ? to_float(bias[0]) : 0.f, exists[1] ? to_float(bias[8 * p.bias.col]) : 0.f};
#pragma unroll
      for (int e = 0; e < 8; e++) added[e] = of_key[e / 2 % 2];
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int query = 8 * (e / 4) + e % 2, r = e / 2 % 2;
      added[e] = !kMasked || visible(8 * chunk + e) ? to_float(bias[query * p.bias.row + 8 * r * p.bias.col]) : 0.f;
    }
  }

  // added -= slope * |diagonal(query) - key|
  __device__ __forceinline__ void subtract_alibi(float (&added)[8], int chunk) const {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float distance = ahead + float(16 * chunk + 8 * (e / 4) + e % 2 - 8 * (e / 2 % 2));
      added[e] -= slope * fabsf(distance);
    }
  }
};

}  // namespace flash::sm90
