// Bitwise equal dQ in whatever order thread blocks add to it: the sums are exact. Every addend is rounded to a multiple
// of a unit of its row, chosen from a bound that holds for every partial sum,
//   |dQ_ic| <= sum_j P_ij |dP_ij - delta_i| |K_jc| <= (|dO_i| max |V_j| + |delta_i|) max |K_jc|
// with Euclidean norms of the rows of dO and V. fp32 adds multiples of a unit exactly up to 2^24 units, so the
// additions are the ordinary ones. Where that is too coarse beside the rounding of P and dS to 16 bit (long sequences,
// few keys that are much larger than the others) the sums are integers of 30 bits, which cost more instructions. NaN or
// infinity in the inputs make the bound, and with it the row, NaN.
#pragma once

#include <cmath>

#include "../attn/seqlen.h"

namespace flash::sm90 {

// Of a group of keys of one key-value head, or of all its groups. As bits of non-negative floats, which order like the
// floats, NaN above all: arithmetic on the device makes only the one without a sign, 0x7fffffff.
struct KeyBounds {
  int largest_v;  // |V_j|, of a row
  int largest_k;  // |K_jc|, of an element
  int smallness;  // the largest 1 / (rms |V_j| rms |K_jc|) of a group

  FLASH_HD KeyBounds larger(const KeyBounds& b) const {
    return {max_of(largest_v, b.largest_v), max_of(largest_k, b.largest_k), max_of(smallness, b.smallness)};
  }
};

// 64, 128 or 256 columns
FLASH_HD constexpr int padded_columns(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
// Keys of a group, which a warp bounds.
FLASH_HD constexpr int bounds_keys(int head_dim) { return 4096 / padded_columns(head_dim); }
inline constexpr int kFewestBoundsKeys = bounds_keys(256);

// The most keys that a query of the sequence can see.
FLASH_HD int visible_keys(const AttnParams& p, const SeqInfo& seq) {
  const int64_t window = int64_t(p.window_left) + p.window_right + 1;
  return p.window_left < 0 || p.window_right < 0 || window > seq.seqlen_k ? seq.seqlen_k : int(window);
}

// How the rows of dQ of one head are summed.
struct ExactSum {
  float largest_v, largest_k;
  bool integers;  // one answer for all rows of a sequence and key-value head: pairs ask once a tile (bwd_pair_dq.cuh)

  // The noise of rounded addends grows with the root of their number, dQ of a row falls with the root of its keys: in
  // units of the error that plain attention in 16 bit makes, noise is proportional to the number of keys and to how
  // much larger the largest keys are than usual ones. Normal random inputs reach the limit at 30000 keys, where noise
  // is about 0.7 of that error.
  static constexpr float kLimit = 0x1.8p17f;

  FLASH_HD static ExactSum of(float largest_v, float largest_k, float smallness, int keys) {
    return {largest_v, largest_k, !(largest_v * largest_k * smallness * float(keys) < kLimit)};
  }

  // Units per 1, negative for integers. `norm`: of the row of dO, divided by the probability of keeping a key.
  FLASH_HD float scale(float norm, float delta) const {
    constexpr float kRounding = 1.0625f;  // P and dS are rounded to 16 bit
    const float bound = (norm * largest_v + fabsf(delta)) * largest_k * kRounding;
    const float units = bound < INFINITY ? (integers ? 0x1p30f : 0x1p23f) / (bound > 0x1p-90f ? bound : 0x1p-90f) : NAN;
    return copysignf(units, integers ? -1.f : 1.f);
  }
};

// x in units, rounded to an integer if it is below 2^22 and to a multiple of 1/2 up to 2^23: such multiples fp32 adds
// exactly up to 2^23.
FLASH_HD float round_to_unit(float x, float units) {
  constexpr float kMagic = 0x1.8p23f;
  return fmaf(x, units, kMagic) - kMagic;
}

}  // namespace flash::sm90
