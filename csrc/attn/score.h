// From q.k to the score that enters the softmax, in natural units: scale, softcap, ALiBi, bias, in this order.
// The general variants use it; plain kernels fold the scale into their exponentials instead.
// Scores stay in natural units until the maximum is subtracted: finfo.min times log2(e) would overflow to -inf, and a
// finite bias is not a mask.
#pragma once

#include <cmath>

#include "../params.h"
#include "host_device.h"

namespace flash {

struct ScoreMod {
  float softmax_scale, softcap;
  float alibi_slope;  // 0: off

  FLASH_HD static ScoreMod of(const AttnParams& p, int batch_index, int head) {
    return {p.softmax_scale, p.softcap,
            p.alibi_slopes ? p.alibi_slopes[batch_index * p.alibi_batch_stride + head] : 0.f};
  }

  // distance: |diagonal(i) - j|; bias: already loaded, 0 if there is none.
  FLASH_HD float operator()(float qk, int distance, float bias) const {
    float s = qk * softmax_scale;
    if (softcap != 0.f) s = softcap * tanhf(s / softcap);
    return s - alibi_slope * float(distance) + bias;
  }

  // d score / d (q.k * softmax_scale) = 1 - tanh^2 = 1 / cosh^2. 1 - t * t would have no digits left where t is near 1.
  FLASH_HD float derivative(float qk) const {
    if (softcap == 0.f) return 1.f;
    const float e = expf(-2.f * fabsf(qk * softmax_scale / softcap));
    return 4.f * e / ((1.f + e) * (1.f + e));
  }
};

// What the Hopper forward's general variants give to the softmax, which multiplies by a scale in any case: natural
// units only where something is added to the scores; else q.k, or with softcap tanh, as it is.
struct ScoreUnits {
  float factor;      // of q.k, or of tanh
  bool is_applied;   // the factor, before the softmax
  float to_natural;  // what is left for the softmax; positive

  FLASH_HD static ScoreUnits of(const AttnParams& p) {
    const float factor = p.softcap != 0.f ? p.softcap : p.softmax_scale;
    const bool is_applied = p.alibi_slopes != nullptr || p.bias.ptr != nullptr || !(factor > 0.f);
    return {factor, is_applied, is_applied ? 1.f : factor};
  }
};

}  // namespace flash
