// Rows of packed gradients behind the last segment: nothing reaches them, and they have to say so.
#pragma once

#include "bwd_args.cuh"

namespace flash::sm90 {

inline constexpr int kTailBlocks = 64, kTailThreads = 256;

// Rows [first, rows) of a packed tensor.
template <class T>
__device__ __forceinline__ void clear_rows(const Strided& t, int64_t first, int64_t rows, int heads, int columns) {
  const int chunks = columns / 8;
  const int64_t count = (rows - first) * heads * chunks;
  for (int64_t i = int64_t(blockIdx.x) * kTailThreads + threadIdx.x; i < count; i += kTailBlocks * kTailThreads) {
    const int64_t row = first + i / chunks / heads;
    const int head = int(i / chunks % heads), chunk = int(i % chunks);
    T* dst = static_cast<T*>(t.ptr) + row * t.row + head * t.head + chunk * 8;
    *reinterpret_cast<uint4*>(dst) = uint4{0, 0, 0, 0};
  }
}

template <class T>
__global__ void __launch_bounds__(kTailThreads) bwd_tail(const __grid_constant__ BwdArgs args) {
  const BwdParams& p = args.p;
  if (p.cu_seqlens_q) clear_rows<T>(p.dq, p.cu_seqlens_q[p.batch], p.total_q, p.num_heads, p.head_dim);
  if (p.cu_seqlens_k) {
    clear_rows<T>(p.dk, p.cu_seqlens_k[p.batch], p.total_k, p.num_heads_kv, p.head_dim);
    clear_rows<T>(p.dv, p.cu_seqlens_k[p.batch], p.total_k, p.num_heads_kv, p.head_dim_v);
  }
}

}  // namespace flash::sm90
