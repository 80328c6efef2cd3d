// The device's part of bwd_exact_sum.h: bounds of the keys, and additions of integers.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_args.cuh"

namespace flash::sm90 {

// What was loaded stays as it is until here. Else it is taken apart where it comes in, each load waits for the one
// before, and twice the registers hold it.
__device__ __forceinline__ void keep_packed(uint4& x) { asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)); }

template <class T>
__device__ __forceinline__ float dot8(const uint4& x, const uint4& y) {
  const T* a = reinterpret_cast<const T*>(&x);
  const T* b = reinterpret_cast<const T*>(&y);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(to_float(a[i]), to_float(b[i]), sum);
  return sum;
}

// NaN is larger than all numbers.
__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

struct GroupBounds {
  float largest_norm2, largest, sum2;  // of a row, of an element, of all
};

// Of at most kMaxRows rows, of which `rows` exist, by a warp; every lane learns of it. The largest norm is found if
// kNorms.
template <class T, int kColumns, int kMaxRows, bool kNorms>
__device__ __forceinline__ GroupBounds bounds_of(const T* first, int64_t stride, int rows, int columns) {
  constexpr int kLanes = kColumns / 8, kRows = 32 / kLanes;  // rows at once
  constexpr int kInFlight = 8;
  const int lane = threadIdx.x % 32, column = lane % kLanes * 8;
  GroupBounds b{};
  uint32_t largest = 0;  // of two elements: as integers, without the sign, 16-bit floats keep their order
#pragma unroll 1
  for (int row0 = lane / kLanes; row0 < kMaxRows; row0 += kInFlight * kRows) {
    uint4 x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const int row = row0 + i * kRows;
      x[i] = uint4{0, 0, 0, 0};
      if (row < rows && column < columns) x[i] = *reinterpret_cast<const uint4*>(first + row * stride + column);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      keep_packed(x[i]);
      float norm2 = dot8<T>(x[i], x[i]);
      b.sum2 += norm2;
      if constexpr (kNorms) {
#pragma unroll
        for (int l = 1; l < kLanes; l *= 2) norm2 += __shfl_xor_sync(~0u, norm2, l);
        b.largest_norm2 = larger(b.largest_norm2, norm2);
      }
      for (uint32_t pair : {x[i].x, x[i].y, x[i].z, x[i].w}) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
    }
  }
  const T* pair = reinterpret_cast<const T*>(&largest);
  b.largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(larger(to_float(pair[0]), to_float(pair[1])))));
  b.largest_norm2 = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(b.largest_norm2)));
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) b.sum2 += __shfl_xor_sync(~0u, b.sum2, lanes);
  return b;
}

// Group `item` of the keys, by a warp; neighbours are of neighbouring heads, which are neighbours in memory.
template <class T, int kHeadDim, int kHeadDimV>
__device__ __forceinline__ void bound_keys(const BwdArgs& args, int64_t item) {
  constexpr int kKeys = bounds_keys(kHeadDim);
  const BwdParams& p = args.p;
  const int groups = ceil_div(p.seqlen_k, kKeys);
  const int head = int(item % p.num_heads_kv), group = int(item / p.num_heads_kv % groups);
  const int64_t batch = item / p.num_heads_kv / groups;
  if (batch >= p.batch) return;
  const SeqInfo seq = SeqInfo::of(p, int(batch));
  const int key0 = group * kKeys, keys = min_of(kKeys, seq.seqlen_k - key0);
  if (keys <= 0) return;
  const T* first_v = static_cast<const T*>(p.v.ptr) + offset_of(p.v, int(batch), seq.k0, key0, head);
  const T* first_k = static_cast<const T*>(p.k.ptr) + offset_of(p.k, int(batch), seq.k0, key0, head);
  const GroupBounds v = bounds_of<T, padded_columns(kHeadDimV), kKeys, true>(first_v, p.v.row, keys, p.head_dim_v);
  const GroupBounds k = bounds_of<T, padded_columns(kHeadDim), kKeys, false>(first_k, p.k.row, keys, p.head_dim);
  if (threadIdx.x % 32 != 0) return;
  const float smallness = sqrtf(float(keys)) / sqrtf(v.sum2) * sqrtf(float(keys) * p.head_dim) / sqrtf(k.sum2);
  args.key_bounds[head * args.key_groups + first_key_group(p, seq, int(batch)) + group] = {
      __float_as_int(sqrtf(v.largest_norm2)), __float_as_int(k.largest), __float_as_int(smallness)};
}

__device__ __forceinline__ void red_add(int32_t* address, int32_t x) {
  asm volatile("red.global.add.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

// As integers: a lane's four numbers of eight columns: rows lane / 4 and lane / 4 + 8, with their scales.
__device__ __forceinline__ void add_integers(int32_t* dst, const float* acc, float scale0, float scale1) {
#pragma unroll
  for (int i = 0; i < 4; i++) red_add(dst + i * 32, __float2int_rn(acc[i] * (i < 2 ? scale0 : scale1)));
}

}  // namespace flash::sm90
