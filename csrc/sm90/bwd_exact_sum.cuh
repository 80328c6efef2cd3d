// The device's part of bwd_exact_sum.h: bounds of the keys, and additions of integers.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_args.cuh"

namespace flash::sm90 {

inline constexpr int kBoundsThreads = 256;

// 64, 128 or 256 columns
FLASH_HD constexpr int padded_columns(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
// Of one head, which a warp bounds.
FLASH_HD constexpr int bounds_keys(int head_dim) { return 4096 / padded_columns(head_dim); }

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

// The warps of a block take neighbouring heads, which are neighbours in memory.
template <class T, int kHeadDim, int kHeadDimV>
__global__ void __launch_bounds__(kBoundsThreads) bwd_key_bounds(const __grid_constant__ BwdArgs args, int groups) {
  ptx::griddepcontrol_launch_dependents();
  const BwdParams& p = args.p;
  const int64_t item = int64_t(blockIdx.x) * (kBoundsThreads / 32) + threadIdx.x / 32;
  const int head = int(item % p.num_heads_kv), group = int(item / p.num_heads_kv % groups);
  const int64_t batch = item / p.num_heads_kv / groups;
  if (batch >= p.batch) return;
  const SeqInfo seq = SeqInfo::of(p, int(batch));
  constexpr int kKeys = bounds_keys(kHeadDim);
  const int key0 = group * kKeys, keys = min_of(kKeys, seq.seqlen_k - key0);
  if (keys <= 0) return;
  const T* first_v = static_cast<const T*>(p.v.ptr) + offset_of(p.v, int(batch), seq.k0, key0, head);
  const T* first_k = static_cast<const T*>(p.k.ptr) + offset_of(p.k, int(batch), seq.k0, key0, head);
  const GroupBounds v = bounds_of<T, padded_columns(kHeadDimV), kKeys, true>(first_v, p.v.row, keys, p.head_dim_v);
  const GroupBounds k = bounds_of<T, padded_columns(kHeadDim), kKeys, false>(first_k, p.k.row, keys, p.head_dim);
  if (threadIdx.x % 32 != 0) return;
  KeyBounds* bounds = args.key_bounds + batch * p.num_heads_kv + head;
  const float smallness = sqrtf(float(keys)) / sqrtf(v.sum2) * sqrtf(float(keys) * p.head_dim) / sqrtf(k.sum2);
  atomicMax(&bounds->largest_v, __float_as_uint(sqrtf(v.largest_norm2)));
  atomicMax(&bounds->largest_k, __float_as_uint(k.largest));
  atomicMax(&bounds->smallness, __float_as_uint(smallness));
}

__device__ __forceinline__ ExactSum exact_sum(const BwdArgs& args, const SeqInfo& seq, int batch, int head_kv) {
  const KeyBounds& b = args.key_bounds[int64_t(batch) * args.p.num_heads_kv + head_kv];
  return ExactSum::of(__uint_as_float(b.largest_v), __uint_as_float(b.largest_k), __uint_as_float(b.smallness),
                      visible_keys(args.p, seq));
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
