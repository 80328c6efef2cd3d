// What general variants do beyond plain ones, switched at run time: scale, softcap, ALiBi and bias of the scores,
// dropout of P. attn/score.h is the readable form of this file.
//
// A block whose scores need no mask goes from Q K^T to P at once where the call has one option only: what the option
// does is part of the argument of exp2. All others are modified in place first.
#pragma once

#include "../attn/score.h"
#include "../ptx/wgmma.cuh"
#include "fwd_bias.cuh"
#include "fwd_bias_copied.cuh"
#include "fwd_dropout.cuh"
#include "fwd_softcap.cuh"
#include "fwd_softmax.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdGeneral {
  static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2, kGroups = kBlockN / 16;
  static constexpr Option kOption = Traits::kOption;
  static constexpr int kDirectLine = 0, kDirectShort = 1, kDirectLong = 2, kInPlace = 3;  // of `softcap`

  const FwdArgs& args;
  const FwdParams& params;
  const int warpgroup;
  float slope;
  int diagonal;  // the column on it in the warpgroup's first row
  DropoutOfRows dropout;
  int softcap;  // which form serves the tile: as its largest score so far says

 public:
  FwdCopiedBias<Traits> bias;
  static constexpr bool kBiasFirst = FwdCopiedBias<Traits>::kFirst;

  __device__ __forceinline__ FwdGeneral(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : bias(a, s, w), args(a), params(a.params), warpgroup(w) {}

  __device__ __forceinline__ void open(const Tile& tile) {
    softcap = kDirectLine;
    if constexpr (kOption == Option::kDropout)
      dropout.open(Dropout::of(0.f, params.rng_state), head_index(tile), row(tile), column());
    slope = 0.f;
    if (params.alibi_slopes != nullptr) slope = params.alibi_slopes[tile.batch * params.alibi_batch_stride + tile.head];
    diagonal = __shfl_sync(~0u, first_row(tile) + tile.seqlen_k - tile.seqlen_q, 0);  // is uniform, then
  }

  // What needs no scores, while the products of a block are under way.
  __device__ __forceinline__ void under_products() {
    if constexpr (FwdCopiedBias<Traits>::kAhead) bias.load();
  }

  // Whether exponentials() can take the block as Q K^T leaves it; the same for all threads.
  __device__ __forceinline__ bool is_direct(int n_block) const {
    if constexpr (kOption == Option::kSoftcap) return softcap != kInPlace;
    if constexpr (kOption == Option::kAlibi) return side(n_block) != 0;
    return kOption != Option::kAny;
  }

  // Whether scores are likely to fall from this block to the next.
  __device__ __forceinline__ bool is_peak(int n_block) const { return kOption == Option::kAlibi && side(n_block) == 0; }

  // Q K^T -> P. False if the scores turn out to be too large for it.
  __device__ __forceinline__ bool exponentials(float (&acc_s)[kScores], uint32_t (&p)[kGroups][4],
                                               FwdSoftmax<Traits>& softmax, int n_block) {
    if constexpr (kOption == Option::kSoftcap) {
      if (softcap == kDirectLine) return softcap_exponentials(acc_s, p, softmax, args.softcap.exponent_line);
      if (softcap == kDirectShort) return softcap_exponentials(acc_s, p, softmax, args.softcap.exponent_short);
      return softcap_exponentials(acc_s, p, softmax, args.softcap.exponent_long);
    }
    float block_sum[2] = {};
    if constexpr (kOption == Option::kAlibi) {
      const float rise = slope * kLog2e * side(n_block), ahead = columns_ahead(n_block);
      const float base[2] = {fmaf(rise, ahead, -softmax.shift(0)), fmaf(rise, ahead - 8.f, -softmax.shift(1))};
      softmax.template exponentials_of<0, kGroups>(
          [&](int i, float) {
            return fmaf(acc_s[i], args.factor_log2, fmaf(rise, float(8 * (i / 4) + i % 2), base[(i / 2) % 2]));
          },
          p, block_sum);
    } else if constexpr (kOption == Option::kBias) {
      if constexpr (kBiasFirst) {
        softmax.template exponentials_of<0, kGroups>(
            [&](int i, float shift) { return fmaf(acc_s[i], args.factor_log2, -shift); }, p, block_sum);
      } else {
        softmax.template exponentials_of<0, kGroups>(
            [&](int i, float shift) { return fmaf(acc_s[i], args.factor_log2, fmaf(bias.loaded(i), kLog2e, -shift)); },
            p, block_sum);
      }
    } else {
      softmax.template exponentials<0, kGroups>(acc_s, p, block_sum);
      dropout.drop(p, n_block * kBlockN, args.dropout_thresholds);
    }
    return finish(softmax, block_sum);
  }

  // Q K^T -> what enters the softmax (ScoreUnits).
  __device__ __forceinline__ void modify(float (&acc_s)[kScores], const Tile& tile, int n_block) {
    float factor = params.softmax_scale;
    if (has(Option::kSoftcap)) {
      cap(acc_s);
      factor = params.softcap;
    }
    if (has(Option::kAlibi)) {
      alibi(acc_s, factor, n_block);
      factor = 1.f;
    }
    if (has(Option::kBias)) {
      bias_of_block(acc_s, factor, tile, n_block * kBlockN + column());
    } else if (kOption == Option::kAny && !has(Option::kAlibi) && !(factor > 0.f)) {
#pragma unroll
      for (int i = 0; i < kScores; i++) acc_s[i] *= factor;
    }
  }

  // Zeroes the entries of P that dropout drops; the scale of the others is applied to the output. exponentials() has
  // done it.
  __device__ __forceinline__ void drop(uint32_t (&p)[kGroups][4], const Tile& tile, int n_block) {
    if constexpr (kOption == Option::kDropout) {
      dropout.drop(p, n_block * kBlockN, args.dropout_thresholds);
    } else if constexpr (kOption == Option::kAny) {
      if (!has(Option::kDropout)) return;
      Dropout any = Dropout::of(0.f, params.rng_state);  // read anew: there are no registers to keep it
      any.threshold = args.dropout_thresholds & 0xFFFF;
      drop_rows(p, any.draw(head_index(tile), row(tile), n_block * kBlockN + column()), Kept{any});
    }
  }

  // P is there.
  __device__ __forceinline__ void release() {
    if (is_bias_copied()) bias.release();
  }

 private:
  __device__ __forceinline__ bool has(Option option) const {
    if constexpr (kOption != Option::kAny) return option == kOption;
    return option == Option::kSoftcap ? params.softcap != 0.f
           : option == Option::kAlibi ? params.alibi_slopes != nullptr
           : option == Option::kBias  ? params.bias.ptr != nullptr
                                      : params.dropout_p != 0.f;
  }

  // This thread's place is worked out where it is needed: registers are short.
  __device__ __forceinline__ int first_row(const Tile& tile) const {  // of the warpgroup
    return tile.m_block * Traits::kBlockM + 64 * warpgroup;
  }
  __device__ __forceinline__ static int row_in_warpgroup() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ int row(const Tile& tile) const { return first_row(tile) + row_in_warpgroup(); }
  __device__ __forceinline__ uint32_t head_index(const Tile& tile) const {  // over the batch
    return tile.batch * params.num_heads + tile.head;
  }
  __device__ __forceinline__ static int column() { return 2 * (threadIdx.x % 4); }

  __device__ __forceinline__ static bool finish(FwdSoftmax<Traits>& softmax, const float (&block_sum)[2],
                                                bool invalid = false) {
    const bool good = !softmax.too_large(block_sum, invalid);
    if (good) softmax.add(block_sum);
    return good;
  }

  __device__ __forceinline__ bool is_bias_copied() const {
    return kOption == Option::kBias || (kOption == Option::kAny && args.copies_bias);
  }
  __device__ __forceinline__ void bias_of_block(float (&acc_s)[kScores], float factor, const Tile& tile, int col0) {
    if (is_bias_copied()) {
      bias.add(acc_s, factor);
    } else if constexpr (kOption == Option::kAny) {
      if (params.bias.is_f32) {
        add_bias<Traits, float, float2>(acc_s, factor, params, tile, row(tile), col0);
      } else {
        add_bias<Traits, typename Traits::Element, uint32_t>(acc_s, factor, params, tile, row(tile), col0);
      }
    }
  }

  // ---- softcap

  template <class Tanh>
  __device__ __forceinline__ bool softcap_exponentials(const float (&acc_s)[kScores], uint32_t (&p)[kGroups][4],
                                                       FwdSoftmax<Traits>& softmax, const Softcap<Tanh>& cap) {
    float block_sum[2] = {}, shift[2] = {softmax.shift(0), softmax.shift(1)};
    int largest = 0, previous = 0;  // squares, which are not negative, are in order as integers
    softmax.template exponentials_of<0, kGroups>(
        [&](int i, float) {
          // Now and then a shift depends on the largest so far (by nothing): else the compiler puts off the maxima to
          // the end and has no registers for the squares.
          if (i % 8 == 0)
            shift[i / 8 % 2] = __int_as_float(__float_as_int(shift[i / 8 % 2]) ^ (largest & args.nothing));
          const float square = acc_s[i] * acc_s[i];
          if (i % 2 == 0) previous = __float_as_int(square);
          if (i % 2 == 1) largest = __vimax3_s32(largest, previous, __float_as_int(square));
          return fmaf(acc_s[i], cap.factor(square), -shift[(i / 2) % 2]);
        },
        p, block_sum);
    return finish(softmax, block_sum, !(__int_as_float(largest) <= cap.max_square));
  }

  // q.k -> tanh.
  __device__ __forceinline__ void cap(float (&acc_s)[kScores]) {
    const auto& tanh = args.softcap.tanh_long;
    int largest = 0;
#pragma unroll
    for (int i = 0; i < kScores; i += 2)
      largest = __vimax3_s32(largest, __float_as_int(acc_s[i] * acc_s[i]), __float_as_int(acc_s[i + 1] * acc_s[i + 1]));
    const float square = __int_as_float(largest);
    ptx::pin(acc_s);  // squares are computed again: there are no registers to keep them
    if (__any_sync(~0u, !(square <= tanh.max_square))) {
      tanh_of_any(acc_s, args.softcap.x_per_qk);
      softcap = kInPlace;
    } else {
#pragma unroll
      for (int i = 0; i < kScores; i++) acc_s[i] *= tanh.factor(acc_s[i] * acc_s[i]);
      if (__any_sync(~0u, square > 0.7f * args.softcap.exponent_short.max_square)) {
        softcap = max(softcap, kDirectLong);
      } else if (__any_sync(~0u, square > 0.7f * args.softcap.exponent_line.max_square)) {
        softcap = max(softcap, kDirectShort);
      }
    }
  }

  // ---- ALiBi

  // Columns from the diagonal to this thread's first entry, in its first row.
  __device__ __forceinline__ float columns_ahead(int n_block) const {
    return float(n_block * kBlockN + column() - diagonal - row_in_warpgroup());
  }

  // The distance is linear in the column where the warpgroup's block lies on one side of the diagonal: 1 if that is the
  // left one, where scores rise with the column, -1 on the right, 0 across. Where causal masks the right side, the
  // whole block counts as left.
  __device__ __forceinline__ int side(int n_block) const {
    const int col0 = n_block * kBlockN;
    if (col0 + kBlockN - 1 <= diagonal || params.window_right == 0) return 1;
    return col0 >= diagonal + 63 ? -1 : 0;
  }

  // acc * factor - slope * |diagonal - column|.
  __device__ __forceinline__ void alibi(float (&acc_s)[kScores], float factor, int n_block) const {
    const float ahead = columns_ahead(n_block);
    const int of_block = side(n_block);
    if (of_block != 0) {
      const float rise = slope * of_block;  // per column
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
};

}  // namespace flash::sm90
