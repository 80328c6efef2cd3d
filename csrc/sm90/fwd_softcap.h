// Polynomials for softcap: special functions are what is short, so they serve where arguments allow.
#pragma once

#include <algorithm>
#include <cmath>

#include "../attn/host_device.h"
#include "../params.h"

namespace flash::sm90 {

// tanh(x) = x (c[0] + c[1] x^2 + c[2] x^4 ...) for |x| <= kBound, to a relative error of kError.
struct TanhLine {
  static constexpr int kTerms = 2;
  static constexpr float kBound = 0.18f, kError = 1.8e-5f;
  static constexpr float c[kTerms] = {0.999982751f, -0.329063577f};
};
struct TanhShort {
  static constexpr int kTerms = 3;
  static constexpr float kBound = 0.4f, kError = 7e-6f;
  static constexpr float c[kTerms] = {0.999993753f, -0.332625795f, 0.121277867f};
};
struct TanhLong {
  static constexpr int kTerms = 5;
  static constexpr float kBound = 1.1f, kError = 1.6e-5f;
  static constexpr float c[kTerms] = {0.999984821f, -0.332690457f, 0.128821064f, -0.0422313361f, 0.0077050827f};
};

// q.k -> scale * tanh(q.k * x_per_qk) = q.k * (c[0] + c[1] (q.k)^2 + ...): all factors are in the coefficients.
template <class Tanh>
struct Softcap {
  float c[Tanh::kTerms];
  float max_square;  // of q.k; negative: serves none

  static Softcap of(float x_per_qk, float scale) {
    Softcap s;
    const float square = x_per_qk * x_per_qk, bound = Tanh::kBound / x_per_qk;
    float factor = scale * x_per_qk;
    for (int i = 0; i < Tanh::kTerms; i++, factor *= square) s.c[i] = Tanh::c[i] * factor;
    // A softcap far below softmax_scale makes coefficients infinite, and they would make NaN of a score of 0.
    s.max_square = std::isfinite(s.c[Tanh::kTerms - 1]) ? bound * bound : -1.f;
    return s;
  }

  // What q.k has to be multiplied with.
  FLASH_HD float factor(float square) const {
    float y = c[Tanh::kTerms - 1];
    for (int i = Tanh::kTerms - 2; i >= 0; i--) y = y * square + c[i];
    return y;
  }
};

struct SoftcapArgs {
  static constexpr float kMaxError = 5e-5f;  // of a score that something is added to
  Softcap<TanhLine> exponent_line;           // to what exp2 takes
  Softcap<TanhShort> exponent_short;
  Softcap<TanhLong> exponent_long, tanh_long;
  float x_per_qk;

  static SoftcapArgs of(const AttnParams& p, float scale_log2) {
    const float x_per_qk = p.softcap != 0.f ? p.softmax_scale / p.softcap : 1.f;
    SoftcapArgs a{Softcap<TanhLine>::of(x_per_qk, scale_log2), Softcap<TanhShort>::of(x_per_qk, scale_log2),
                  Softcap<TanhLong>::of(x_per_qk, scale_log2), Softcap<TanhLong>::of(x_per_qk, 1.f), x_per_qk};
    if (p.alibi_slopes != nullptr || p.bias.ptr != nullptr) {
      // They may cancel a large score, and the LSE, small then, shows its absolute error.
      const float largest = kMaxError / (TanhLong::kError * p.softmax_scale);
      a.tanh_long.max_square = std::min(a.tanh_long.max_square, largest * largest);
    }
    return a;
  }
};

}  // namespace flash::sm90
