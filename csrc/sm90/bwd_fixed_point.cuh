// Bitwise equal dQ in whatever order thread blocks add to it: the sum is kept in integers, which add up exactly. A row's
// unit comes from a bound that holds for every partial sum,
//   |dQ_ic| <= sum_j P_ij |dP_ij - delta_i| |K_jc| <= (|dO_i| max_j |V_j| + |delta_i|) max |K|
// with Euclidean norms of rows: so a sum of 30 bits cannot overflow, and its unit is far below the rounding of the 16-bit
// result. NaN or infinity in the inputs make the bound, and with it the row, NaN.
#pragma once

#include "bwd_args.cuh"

namespace flash::sm90 {

// The largest norm of a row of V and the largest |K| among the used keys of each key-value head. One warp per key; the
// bits of non-negative floats order like the floats, NaN above all.
inline constexpr int kBoundsWarps = 8, kBoundsKeysPerWarp = 4;

template <class T>
__device__ __forceinline__ void bounds_of_row(const T* row, int columns, float& sum_of_squares, uint32_t& largest) {
  for (int c = threadIdx.x % 32 * 8; c < columns; c += 256) {
    const uint4 x = *reinterpret_cast<const uint4*>(row + c);
    const T* values = reinterpret_cast<const T*>(&x);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = to_float(values[i]);
      sum_of_squares = fmaf(v, v, sum_of_squares);
      largest = max(largest, __float_as_uint(fabsf(v)));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kBoundsWarps) bwd_key_bounds(const __grid_constant__ BwdArgs args, int key_blocks) {
  const BwdParams& p = args.p;
  const int block = int(blockIdx.x % key_blocks), item = int(blockIdx.x / key_blocks);
  const int batch = item / p.num_heads_kv, head = item % p.num_heads_kv;
  const SeqInfo seq = SeqInfo::of(p, batch);
  const int key0 = (block * kBoundsWarps + threadIdx.x / 32) * kBoundsKeysPerWarp;
  uint32_t largest_norm2 = 0, largest_k = 0, ignored_largest = 0;
#pragma unroll
  for (int i = 0; i < kBoundsKeysPerWarp; i++) {
    const int key = key0 + i;
    if (key >= seq.seqlen_k) break;
    float ignored = 0.f, norm2 = 0.f;
    bounds_of_row(static_cast<const T*>(p.k.ptr) + offset_of(p.k, batch, seq.k0, key, head), p.head_dim, ignored, largest_k);
    bounds_of_row(static_cast<const T*>(p.v.ptr) + offset_of(p.v, batch, seq.k0, key, head), p.head_dim_v, norm2,
                  ignored_largest);
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) norm2 += __shfl_xor_sync(~0u, norm2, lane);
    largest_norm2 = max(largest_norm2, __float_as_uint(norm2));
  }
  largest_k = __reduce_max_sync(~0u, largest_k);
  if (threadIdx.x % 32 != 0 || key0 >= seq.seqlen_k) return;
  uint32_t* bounds = args.key_bounds + 2 * int64_t(item);
  atomicMax(bounds, __float_as_uint(sqrtf(__uint_as_float(largest_norm2))));
  atomicMax(bounds + 1, largest_k);
}

// A power of two: the row's unit is its inverse. `norm`: of the row of dO.
__device__ __forceinline__ float fixed_point_scale(const BwdArgs& args, int batch, int head, float norm, float delta) {
  const BwdParams& p = args.p;
  const int head_kv = head / (p.num_heads / p.num_heads_kv);
  const uint32_t* bounds = args.key_bounds + 2 * (int64_t(batch) * p.num_heads_kv + head_kv);
  const float dropout_scale = p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f;
  constexpr float kRounding = 1.0625f;  // P and dS are rounded to 16 bit
  const float bound = (norm * dropout_scale * __uint_as_float(bounds[0]) + fabsf(delta)) * __uint_as_float(bounds[1]) * kRounding;
  if (!(bound < INFINITY)) return NAN;
  int exponent;
  frexpf(bound, &exponent);  // bound < 2^exponent
  return ldexpf(1.f, 30 - max_of(exponent, -90));
}

__device__ __forceinline__ void red_add(int32_t* address, int32_t x) {
  asm volatile("red.global.add.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

// As add_to_accumulator, for the band's rows lane / 4 and lane / 4 + 8 with their scales.
template <int kCount>
__device__ __forceinline__ void add_fixed_point(int32_t* dst, const float (&acc)[kCount], int groups, float scale0, float scale1) {
#pragma unroll
  for (int g = 0; g < kCount / 4; g++)
    if (g < groups) {
#pragma unroll
      for (int i = 0; i < 4; i++) red_add(dst + g * 128 + i * 32, __float2int_rn(acc[4 * g + i] * (i < 2 ? scale0 : scale1)));
    }
}

}  // namespace flash::sm90
