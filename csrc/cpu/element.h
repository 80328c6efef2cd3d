// Elements of tensors: fp32, fp16, bf16. Arithmetic is always fp32; these convert, rounding to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace flash::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

// Without a branch, so that loops over it become vector code.
inline float to_float(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  // The fields at their places of a float, then the difference of the exponents' biases; exact for subnormal numbers
  // too.
  const float finite = std::bit_cast<float>(uint32_t(x.bits & 0x7FFFu) << 13) * 0x1p112f;
  const uint32_t inf_or_nan = (x.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(finite) | inf_or_nan);
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  // Half a unit of the last kept place, less one if that place is even; a carry reaches the exponent, which is right.
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const uint32_t quiet_nan = bits >> 16 | 0x0040u;
  return {uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded)};
}

template <>
inline Half from_float<Half>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude - (uint32_t(127 - 15) << 23) + 0x0FFFu + (magnitude >> 13 & 1u)) >> 13;
  // Below 2^-14 the last place is 2^-24, as it is in a float of [0.5, 1): the addition rounds.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t inf_or_nan = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t half = magnitude >= 0x47800000u ? inf_or_nan : magnitude < 0x38800000u ? subnormal : normal;
  return {uint16_t(sign | half)};
}

}  // namespace flash::cpu
