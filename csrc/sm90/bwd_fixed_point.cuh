// Bitwise equal dQ in whatever order thread blocks add to it: the sum is kept in integers, which add up exactly. A
// row's unit comes from a bound that holds for every partial sum,
//   |dQ_ic| <= sum_j P_ij |dP_ij - delta_i| |K_jc| <= (|dO_i| sqrt(head_dim_v) max |V| + |delta_i|) max |K|
// with the Euclidean norm of the row of dO: so a sum of 30 bits cannot overflow, and its unit is far below the rounding
// of the 16-bit result. NaN or infinity in the inputs make the bound, and with it the row, NaN.
#pragma once

#include "bwd_args.cuh"

namespace flash::sm90 {

// The largest |V| and |K| among the used keys of each key-value head. A thread block takes kBoundsKeys keys of one
// head; the bits of non-negative floats order like the floats, NaN above all.
inline constexpr int kBoundsThreads = 256, kBoundsKeys = 128;

template <class T>
__device__ __forceinline__ uint32_t largest_of(const T* first, int64_t stride, int rows, int columns) {
  const int chunks = columns / 8;
  uint32_t largest = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < rows * chunks; i += kBoundsThreads) {
    const uint4 x = *reinterpret_cast<const uint4*>(first + i / chunks * stride + i % chunks * 8);
    const T* values = reinterpret_cast<const T*>(&x);
#pragma unroll
    for (int c = 0; c < 8; c++) largest = max(largest, __float_as_uint(fabsf(to_float(values[c]))));
  }
  return __reduce_max_sync(~0u, largest);
}

template <class T>
__global__ void __launch_bounds__(kBoundsThreads) bwd_key_bounds(const __grid_constant__ BwdArgs args, int key_blocks) {
  const BwdParams& p = args.p;
  const int block = int(blockIdx.x % key_blocks), item = int(blockIdx.x / key_blocks);
  const int batch = item / p.num_heads_kv, head = item % p.num_heads_kv;
  const SeqInfo seq = SeqInfo::of(p, batch);
  const int key0 = block * kBoundsKeys, keys = min_of(kBoundsKeys, seq.seqlen_k - key0);
  if (keys <= 0) return;
  const uint32_t largest_v = largest_of(static_cast<const T*>(p.v.ptr) + offset_of(p.v, batch, seq.k0, key0, head),
                                        p.v.row, keys, p.head_dim_v);
  const uint32_t largest_k =
      largest_of(static_cast<const T*>(p.k.ptr) + offset_of(p.k, batch, seq.k0, key0, head), p.k.row, keys, p.head_dim);
  if (threadIdx.x % 32 != 0) return;
  uint32_t* bounds = args.key_bounds + 2 * int64_t(item);
  atomicMax(bounds, largest_v);
  atomicMax(bounds + 1, largest_k);
}

// A power of two: the row's unit is its inverse. `norm`: of the row of dO.
__device__ __forceinline__ float fixed_point_scale(const BwdArgs& args, int batch, int head, float norm, float delta) {
  const BwdParams& p = args.p;
  const int head_kv = head / (p.num_heads / p.num_heads_kv);
  const uint32_t* bounds = args.key_bounds + 2 * (int64_t(batch) * p.num_heads_kv + head_kv);
  const float dropout_scale = p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f;
  constexpr float kRounding = 1.0625f;  // P and dS are rounded to 16 bit
  const float largest_dp = norm * dropout_scale * sqrtf(float(p.head_dim_v)) * __uint_as_float(bounds[0]);
  const float bound = (largest_dp + fabsf(delta)) * __uint_as_float(bounds[1]) * kRounding;
  if (!(bound < INFINITY)) return NAN;
  int exponent;
  frexpf(bound, &exponent);  // bound < 2^exponent
  return ldexpf(1.f, 30 - max_of(exponent, -90));
}

__device__ __forceinline__ void red_add(int32_t* address, int32_t x) {
  asm volatile("red.global.add.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

// A lane's four numbers of eight columns: rows lane / 4 and lane / 4 + 8, with their scales.
__device__ __forceinline__ void add_fixed_point(int32_t* dst, const float* acc, float scale0, float scale1) {
#pragma unroll
  for (int i = 0; i < 4; i++) red_add(dst + i * 32, __float2int_rn(acc[i] * (i < 2 ? scale0 : scale1)));
}

}  // namespace flash::sm90
