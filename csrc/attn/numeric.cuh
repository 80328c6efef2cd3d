// Conversions between fp32 and the 16-bit types in one place: torch's build flags remove the implicit ones.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../params.h"

namespace flash {

template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::kF32> {
  using type = float;
};
template <>
struct ElementOf<DType::kF16> {
  using type = __half;
};
template <>
struct ElementOf<DType::kBF16> {
  using type = __nv_bfloat16;
};
template <DType kDType>
using Element = typename ElementOf<kDType>::type;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (__is_same(T, __half)) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two floats packed into one 32-bit register, `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  if constexpr (__is_same(T, __half)) {
    const __half2 x = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
  } else {
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
  }
}

template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t x) {
  if constexpr (__is_same(T, __half)) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  } else {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)};
  }
}

__device__ __forceinline__ float exp2_approx(float x) {  // ex2.approx.ftz: exp2(-inf) = 0, 2 ulp
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {  // lg2.approx.ftz: off by 2^-22, near 1 in absolute terms
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

}  // namespace flash
