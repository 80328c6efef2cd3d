// The device's part of bwd_exact_sum.h: bounds of the keys, and additions of integers.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_args.cuh"

namespace flash::sm90 {

inline constexpr int kBoundsThreads = 256, kBoundsKeys = 128;

// NaN is larger than all numbers.
__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

struct RowBounds {
  float largest_norm2, largest, sum2;  // of a row, of an element, of all
};

// By 16 threads per row; every thread of a row's sixteen learns of it.
template <class T>
__device__ __forceinline__ RowBounds bounds_of(const T* first, int64_t stride, int rows, int columns) {
  constexpr int kLanes = 16, kPasses = kBoundsKeys * kLanes / kBoundsThreads;
  const int lane = threadIdx.x % kLanes, chunks = columns / 8;
  RowBounds b{};
  float norm2[kPasses] = {};
  for (int chunk = lane; chunk < chunks; chunk += kLanes) {
    uint4 x[kPasses];  // in flight together
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      const int row = threadIdx.x / kLanes + i * (kBoundsThreads / kLanes);
      x[i] = uint4{0, 0, 0, 0};
      if (row < rows) x[i] = *reinterpret_cast<const uint4*>(first + row * stride + chunk * 8);
    }
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      const T* values = reinterpret_cast<const T*>(&x[i]);
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const float value = to_float(values[c]);
        norm2[i] = fmaf(value, value, norm2[i]);
        b.largest = larger(b.largest, fabsf(value));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPasses; i++) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) norm2[i] += __shfl_xor_sync(~0u, norm2[i], lanes);
    b.sum2 += norm2[i];
    b.largest_norm2 = larger(b.largest_norm2, norm2[i]);
  }
  return b;
}

template <class T>
__global__ void __launch_bounds__(kBoundsThreads) bwd_key_bounds(const __grid_constant__ BwdArgs args, int key_blocks) {
  ptx::griddepcontrol_launch_dependents();
  const BwdParams& p = args.p;
  const int block = int(blockIdx.x % key_blocks), item = int(blockIdx.x / key_blocks);
  const int batch = item / p.num_heads_kv, head = item % p.num_heads_kv;
  const SeqInfo seq = SeqInfo::of(p, batch);
  const int key0 = block * kBoundsKeys, keys = min_of(kBoundsKeys, seq.seqlen_k - key0);
  if (keys <= 0) return;
  const RowBounds v = bounds_of(static_cast<const T*>(p.v.ptr) + offset_of(p.v, batch, seq.k0, key0, head), p.v.row,
                                keys, p.head_dim_v);
  const RowBounds k =
      bounds_of(static_cast<const T*>(p.k.ptr) + offset_of(p.k, batch, seq.k0, key0, head), p.k.row, keys, p.head_dim);
  __shared__ float sums[2][kBoundsThreads / 32];
  KeyBounds* bounds = args.key_bounds + item;
  const uint32_t largest_v = __reduce_max_sync(~0u, __float_as_uint(sqrtf(v.largest_norm2)));
  const uint32_t largest_k = __reduce_max_sync(~0u, __float_as_uint(k.largest));
  const float sum_v = v.sum2 + __shfl_xor_sync(~0u, v.sum2, 16), sum_k = k.sum2 + __shfl_xor_sync(~0u, k.sum2, 16);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&bounds->largest_v, largest_v);
    atomicMax(&bounds->largest_k, largest_k);
    sums[0][threadIdx.x / 32] = sum_v;
    sums[1][threadIdx.x / 32] = sum_k;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total_v = 0.f, total_k = 0.f;
  for (int i = 0; i < kBoundsThreads / 32; i++) total_v += sums[0][i], total_k += sums[1][i];
  atomicMax(&bounds->smallness,
            __float_as_uint(sqrtf(float(keys)) / sqrtf(total_v) * sqrtf(float(keys) * p.head_dim) / sqrtf(total_k)));
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
