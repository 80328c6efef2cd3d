// What general variants do beyond plain ones, switched at run time: scale, softcap, ALiBi and bias of the scores,
// dropout of P. attn/score.h is the readable form of this file.
#pragma once

#include "../attn/dropout.h"
#include "../attn/score.h"
#include "../ptx/fence.cuh"
#include "../ptx/matrix.cuh"
#include "../ptx/prmt.cuh"
#include "fwd_scores.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdGeneral {
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2;

  const FwdArgs& args;
  const FwdParams& params;
  const FwdSmem<Traits> smem;
  const int warpgroup;
  RingState bias{0};
  uint64_t seed = 0, offset = 0;  // of dropout
  FragmentPlace at;               // this thread's, in the tile at hand: rows at.row and at.row + 8
  float slope;

 public:
  __device__ __forceinline__ FwdGeneral(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : args(a), params(a.params), smem(s), warpgroup(w) {
    if (Traits::kGeneral && has(Option::kDropout)) {
      seed = params.rng_state[0];
      offset = params.rng_state[1];
    }
  }

  __device__ __forceinline__ void open(const Tile& tile, FragmentPlace place) {
    at = place;
    slope = 0.f;
    if (params.alibi_slopes != nullptr) slope = params.alibi_slopes[tile.batch * params.alibi_batch_stride + tile.head];
  }

  // Q K^T -> what enters the softmax (ScoreUnits).
  __device__ __forceinline__ void modify(float (&acc_s)[kScores], const Tile& tile, int n_block) {
    float factor = params.softmax_scale;
    if (has(Option::kSoftcap)) {
      softcap(acc_s, params.softmax_scale / params.softcap);
      factor = params.softcap;
    }
    if (has(Option::kAlibi)) {
      alibi(acc_s, factor, at.row + tile.seqlen_k - tile.seqlen_q, n_block * kBlockN);
      factor = 1.f;
    }
    if (has(Option::kBias)) {
      bias_of_block(acc_s, factor, tile, n_block * kBlockN + at.column);
    } else if (kOption == Option::kAny && !has(Option::kAlibi) && !(factor > 0.f)) {
      scale(acc_s, factor);
    }
  }

  // Zeroes the entries of P that dropout drops; the scale of the others is applied to the output.
  __device__ __forceinline__ void drop(uint32_t (&p)[kBlockN / 16][4], const Tile& tile, int n_block) const {
    if (!has(Option::kDropout)) return;
    const Dropout dropout{seed, offset, args.dropout_threshold, 1.f};
    const uint32_t head = tile.batch * params.num_heads + tile.head;
#pragma unroll
    for (int g = 0; g < kBlockN / 32; g++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Philox random = dropout.octet(head, at.row + 8 * r, n_block * kBlockN + at.column + 32 * g);
#pragma unroll
        for (int i = 0; i < 4; i++)
          p[2 * g + i / 2][2 * (i % 2) + r] &= ptx::signs_of_halves(dropout.kept_signs(random.word[i]));
      }
    }
  }

 private:
  static constexpr Option kOption = Traits::kOption;

  __device__ __forceinline__ bool has(Option option) const {
    if constexpr (kOption != Option::kAny) return option == kOption;
    return option == Option::kSoftcap ? params.softcap != 0.f
           : option == Option::kAlibi ? params.alibi_slopes != nullptr
           : option == Option::kBias  ? params.bias.ptr != nullptr
                                      : params.dropout_p != 0.f;
  }

  __device__ __forceinline__ void bias_of_block(float (&acc_s)[kScores], float factor, const Tile& tile, int col0) {
    if (kOption == Option::kBias || args.copies_bias) {
      add_copied_bias(acc_s, factor);
    } else if constexpr (kOption == Option::kAny) {
      if (params.bias.is_f32) {
        add_bias<float, float2>(acc_s, factor, tile, col0);
      } else {
        add_bias<Element, uint32_t>(acc_s, factor, tile, col0);
      }
    }
  }

  __device__ __forceinline__ static void scale(float (&acc_s)[kScores], float factor) {
#pragma unroll
    for (int i = 0; i < kScores; i++) acc_s[i] *= factor;
  }

  // q.k -> tanh(q.k * x_per_qk). Special functions are what is short: while all arguments of a warp are small, a
  // polynomial of odd powers does; its absolute error of 1.3e-7 is that of the other form.
  __device__ __forceinline__ static void softcap(float (&acc_s)[kScores], float x_per_qk) {
    // In u = 4 x, since |u| < 2 is one bit of a float: the bits of all of them are joined by or.
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      acc_s[i] *= 4.f * x_per_qk;
      bits |= __float_as_uint(acc_s[i]);
    }
    if (__any_sync(~0u, bits >> 30 & 1)) {
      tanh_of_quarter_any(acc_s);
    } else {
      tanh_of_quarter_small(acc_s);
    }
  }

  // tanh(x) = x (c0 + c1 x^2 + c2 x^4 + c3 x^6) for |x| < 1/2.
  __device__ __forceinline__ static void tanh_of_quarter_small(float (&u)[kScores]) {
    constexpr float c0 = 0.99999768f / 4, c1 = -0.33320654f / 64, c2 = 0.13145129f / 1024, c3 = -0.04337203f / 16384;
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      const float t = u[i] * u[i];
      u[i] *= fmaf(t, fmaf(t, fmaf(t, c3, c2), c1), c0);
    }
  }

  // tanh(x) = 1 - 2 / (1 + exp(2 x)). Four elements share one reciprocal; the bound keeps their product finite, and
  // beyond it tanh is 1.
  __device__ __forceinline__ static void tanh_of_quarter_any(float (&u)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = 1.f + exp2_approx(fminf(u[i + j] * (0.5f * kLog2e), 30.f));
      const float front = x[0] * x[1], back = x[2] * x[3];
      const float minus_twice = __fdividef(-2.f, front * back);
      const float of_front = minus_twice * back, of_back = minus_twice * front;
      u[i] = fmaf(of_front, x[1], 1.f);
      u[i + 1] = fmaf(of_front, x[0], 1.f);
      u[i + 2] = fmaf(of_back, x[3], 1.f);
      u[i + 3] = fmaf(of_back, x[2], 1.f);
    }
  }

  // acc * factor - slope * |diagonal - column|; diagonal: of this thread's first row. The distance is linear in the
  // column on either side of the diagonal; where causal masks one side, on the whole block.
  __device__ __forceinline__ void alibi(float (&acc_s)[kScores], float factor, int diagonal, int col0) const {
    const int warpgroup_diagonal = diagonal - (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);  // of its first row
    const float ahead = float(col0 + at.column - diagonal);  // of this thread's first entry
    const bool left = col0 + kBlockN - 1 <= warpgroup_diagonal || params.window_right == 0;
    if (left || col0 >= warpgroup_diagonal + 63) {
      const float rise = left ? slope : -slope;  // per column
      const float start[2] = {rise * ahead, rise * (ahead - 8.f)};
#pragma unroll
      for (int i = 0; i < kScores; i++)
        acc_s[i] = fmaf(acc_s[i], factor, fmaf(rise, float(8 * (i / 4) + i % 2), start[(i / 2) % 2]));
    } else {
#pragma unroll
      for (int i = 0; i < kScores; i++)
        acc_s[i] = fmaf(acc_s[i], factor, -slope * fabsf(ahead + float(8 * (i / 4) + i % 2 - 8 * ((i / 2) % 2))));
    }
  }

  // acc * factor + bias, which the copy engine has laid down in the 128-byte swizzle (wgmma.cuh).
  __device__ __forceinline__ void add_copied_bias(float (&acc_s)[kScores], float factor) {
    // This lane's row in the matrices of ldmatrix: 8 columns and 8 rows, rows 8 further down, then the next columns.
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = threadIdx.x % 128 / 32 * 16 + matrix % 2 * 8 + lane % 8;
    const uint32_t first = smem.bias(bias.stage, warpgroup) + row * 128 + ((matrix / 2) ^ (lane % 8)) * 16;
    ptx::mbarrier_wait(smem.bias_full(bias.stage, warpgroup), bias.parity);
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      uint32_t pair[4];
      ptx::ldmatrix_x4(pair, first ^ (i * 4));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 x = unpack(pair[j]);
        acc_s[i + 2 * j] = fmaf(acc_s[i + 2 * j], factor, x.x);
        acc_s[i + 2 * j + 1] = fmaf(acc_s[i + 2 * j + 1], factor, x.y);
      }
    }
    ptx::fence_proxy_async();  // before the copy engine writes there again, all reads have their results
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem.bias_empty(bias.stage, warpgroup));
    bias.template advance<FwdSmem<Traits>::kBiasStages>();
  }

  // acc * factor + bias. Bias of two neighbouring columns in one load where rows are contiguous and aligned and the
  // block has all its columns.
  template <class Bias, class Pair>
  __device__ __forceinline__ void add_bias(float (&acc_s)[kScores], float factor, const Tile& tile, int col0) const {
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
        acc_s[i] = fmaf(acc_s[i], factor, x.x);
        acc_s[i + 1] = fmaf(acc_s[i + 1], factor, x.y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; i++) {
        const int col = 8 * (i / 4) + i % 2;
        acc_s[i] = fmaf(acc_s[i], factor, col0 + col < tile.seqlen_k ? to_float(row[(i / 2) % 2][col * b.col]) : 0.f);
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
