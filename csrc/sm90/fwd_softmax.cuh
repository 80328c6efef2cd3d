// The softmax of one warpgroup's rows, a block of scores at a time. A thread owns two rows, 8 apart (wgmma.cuh).
//
// P = exp2((s - reference) * scale) needs no running maximum, only a reference that keeps exp2 in range. The first
// block's maximum is the reference; later blocks without a mask take it as it is, and the partial row sums, needed in
// any case, show when it is too small: then the block is computed again from its scores with the maximum, everything
// accumulated so far is brought to the new reference, and the next kCalm blocks look for their maximum at once. A
// floating-point P loses nothing by being larger than 1.
#pragma once

#include <cfloat>

#include "../attn/numeric.cuh"
#include "fwd_traits.cuh"
#include "row_max.cuh"

namespace flash::sm90 {

template <class Traits>
struct FwdSoftmax {
  static constexpr int kColumns = Traits::kBlockN, kScores = kColumns / 2, kGroups = kColumns / 16;
  // A thread's sums of a block stay below it while the reference is good. An entry of P that is so much larger than all
  // that was seen before would be all of the result, and its rounding to 16 bit the result's error; plain attention has
  // none then, since its probability is 1. Brought to the new reference it is exactly 1 here as well.
  static constexpr float kLimit = 512.f;
  // (s - reference) * scale by one fma is off by the rounding of reference * scale: beyond it, subtract first.
  static constexpr float kMaxFmaReference = 4096.f;
  // With its maximum at hand, a block keeps the reference while no score is further above it, in log2 units. kSlack is
  // for one whose sums have reached kLimit, where one is; kArmedSlack for those that follow.
  static constexpr float kSlack = 2.5f, kArmedSlack = 8.f;
  static_assert(kScores * 5.66f < kLimit, "2^kSlack in every entry of a thread");
  // So many blocks in a row have to keep the reference before one is tried without its maximum again: where scores rise
  // throughout, the maximum is cheaper than a failure.
  static constexpr int kCalm = 8, kFar = 1 << 29;

  float scale;         // of the scores, to log2 units
  float reference[2];  // the maximum when it was last looked at, in units of the scores; -inf before any key
  float row_sum[2];    // of this thread's columns
  int exact_blocks;    // that are still to be worked on with their maximum; from kFar on, all of the tile
  bool odd;            // a reference of the warp is negative or far from 0

  // Whether the next block may do without its maximum; the same for all lanes of a warp.
  __device__ __forceinline__ bool optimistic() const { return exact_blocks <= 0; }
  // Scores do not rise from here on, as far as one knows.
  __device__ __forceinline__ void expect_calm() {
    if (exact_blocks < kFar) exact_blocks = 0;
  }

  // The reference of row r in log2 units.
  __device__ __forceinline__ float shift(int r) const { return reference[r] * scale; }

  // Groups kFrom ... kTo - 1 of 16 columns: P into p, its sums added to block_sum, which group 0 begins. argument(i,
  // shift) is what exp2 takes of score i, shift the reference in log2 units.
  template <int kFrom, int kTo, int kSize, class Argument>
  __device__ __forceinline__ void exponentials_of(Argument argument, uint32_t (&p)[kSize][4],
                                                  float (&block_sum)[2]) const {
    const float shift[2] = {reference[0] * scale, reference[1] * scale};
    float sum[2][2] = {{block_sum[0], 0.f}, {block_sum[1], 0.f}};
#pragma unroll
    for (int i = kFrom * 8; i < kTo * 8; i += 2) {
      const int r = (i / 2) % 2;
      const float a = exp2_approx(argument(i, shift[r]));
      const float b = exp2_approx(argument(i + 1, shift[r]));
      sum[r][0] = i < 4 ? a : sum[r][0] + a;
      sum[r][1] = i < 4 ? b : sum[r][1] + b;
      p[i / 8][(i / 2) % 4] = pack2<typename Traits::Element>(a, b);
    }
    block_sum[0] = sum[0][0] + sum[0][1];
    block_sum[1] = sum[1][0] + sum[1][1];
  }

  template <int kFrom, int kTo, int kSize>
  __device__ __forceinline__ void exponentials(const float (&acc_s)[kScores], uint32_t (&p)[kSize][4],
                                               float (&block_sum)[2]) const {
    exponentials_of<kFrom, kTo>([&](int i, float shift) { return fmaf(acc_s[i], scale, -shift); }, p, block_sum);
  }

  // Also true for inf and NaN, which a reference of -inf gives. The same for all lanes.
  __device__ __forceinline__ static bool too_large(const float (&block_sum)[2], bool invalid = false) {
    return __any_sync(~0u, !(block_sum[0] + block_sum[1] < kLimit) || invalid);
  }

  __device__ __forceinline__ void add(const float (&block_sum)[2]) {
    row_sum[0] += block_sum[0];
    row_sum[1] += block_sum[1];
  }

  // First block of a tile: its maximum becomes the reference.
  __device__ __forceinline__ void first(const float (&acc_s)[kScores], const FwdArgs& args, uint32_t (&p)[kGroups][4]) {
    thread_max(acc_s, reference);
    quad_max(reference);
    row_sum[0] = row_sum[1] = 0.f;
    exact_blocks = 0;
    look_at_reference(is_far(reference, args));
    exact(acc_s, p);
  }

  // Brings the reference up to the block's maximum if that is far above it. correct() gets the factors for all that was
  // accumulated before.
  template <class Correct>
  __device__ __forceinline__ void raise(const float (&acc_s)[kScores], const FwdArgs& args, Correct correct) {
    float top[2];
    if (odd) {
      thread_max(acc_s, top);
      top[0] = fmaxf(top[0], reference[0]);
      top[1] = fmaxf(top[1], reference[1]);
    } else {
      thread_max_from(acc_s, reference, top);
    }
    const float slack = exact_blocks > 0 ? kArmedSlack : kSlack;
    const bool is_above = top[0] > fmaf(slack, args.scores_per_log2, reference[0]) ||
                          top[1] > fmaf(slack, args.scores_per_log2, reference[1]);
    if (!__any_sync(~0u, is_above)) {
      exact_blocks--;
      return;
    }
    exact_blocks = max(exact_blocks, kCalm);
    const bool far = is_far(top, args);  // before lanes have exchanged them: that takes as long as the vote
    quad_max(top);
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      correction[r] = exp2_approx((reference[r] - fmaxf(top[r], -FLT_MAX)) * scale);  // not inf - inf
      reference[r] = top[r];
    }
    look_at_reference(far);
    correct(correction);
  }
  // No product may be in flight.
  template <int kOut>
  __device__ __forceinline__ void correct(float (&acc_o)[kOut], const float (&correction)[2]) {
    row_sum[0] *= correction[0];
    row_sum[1] *= correction[1];
#pragma unroll
    for (int i = 0; i < kOut; i++) acc_o[i] *= correction[(i / 2) % 2];
  }

  // With the reference at hand: the first block, or a later one after raise().
  __device__ __forceinline__ void exact(const float (&acc_s)[kScores], uint32_t (&p)[kGroups][4]) {
    float block_sum[2] = {};
    if (odd) {
      exact_exponentials(acc_s, p, block_sum);
    } else {
      exponentials<0, kGroups>(acc_s, p, block_sum);
    }
    add(block_sum);
  }

 private:
  // A reference far from 0 would cost accuracy in the fused form: then the maximum is used throughout.
  __device__ __forceinline__ static bool is_far(const float (&reference)[2], const FwdArgs& args) {
    const float limit = kMaxFmaReference * args.scores_per_log2;
    return __any_sync(~0u, (fabsf(reference[0]) > limit && reference[0] > -CUDART_INF_F) ||
                               (fabsf(reference[1]) > limit && reference[1] > -CUDART_INF_F));
  }

  __device__ __forceinline__ void look_at_reference(bool far) {
    if (far) exact_blocks = 2 * kFar;
    odd = far | (__any_sync(~0u, !(fminf(reference[0], reference[1]) >= 0.f)) != 0);
  }

  // Subtracts before it scales, so that the maximum gives exactly 1 however large the scores are.
  __device__ __forceinline__ void exact_exponentials(const float (&acc_s)[kScores], uint32_t (&p)[kGroups][4],
                                                     float (&block_sum)[2]) const {
    const float base[2] = {finite(reference[0]), finite(reference[1])};
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = (i / 2) % 2;
      const float a = exp2_approx((acc_s[i] - base[r]) * scale), b = exp2_approx((acc_s[i + 1] - base[r]) * scale);
      sum[r][0] += a;
      sum[r][1] += b;
      p[i / 8][(i / 2) % 4] = pack2<typename Traits::Element>(a, b);
    }
    block_sum[0] += sum[0][0] + sum[0][1];
    block_sum[1] += sum[1][0] + sum[1][1];
  }
};

}  // namespace flash::sm90
