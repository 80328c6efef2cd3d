// Rows behind the last packed sequence have gradients too: zeros.
#pragma once

#include "../attn/numeric.cuh"
#include "../attn/seqlen.h"

namespace flash::sm80 {

struct BwdTail {
  static constexpr int kThreads = 256, kBlocks = 64;  // there are few such rows, usually none
};

template <class T>
__device__ __forceinline__ void clear_rows(const Strided& t, int64_t first_row, int64_t total_rows, int heads,
                                           int cols) {
  for (int64_t row = (first_row < 0 ? 0 : first_row) + blockIdx.x; row < total_rows; row += gridDim.x)
    for (int i = threadIdx.x; i < heads * cols; i += BwdTail::kThreads)
      static_cast<T*>(t.ptr)[row * t.row + i / cols * t.head + i % cols] = from_float<T>(0.f);
}

template <class T>
__global__ void __launch_bounds__(BwdTail::kThreads) bwd_tail(const __grid_constant__ BwdParams p) {
  if (p.cu_seqlens_q != nullptr) clear_rows<T>(p.dq, p.cu_seqlens_q[p.batch], p.total_q, p.num_heads, p.head_dim);
  if (p.cu_seqlens_k != nullptr) {
    clear_rows<T>(p.dk, p.cu_seqlens_k[p.batch], p.total_k, p.num_heads_kv, p.head_dim);
    clear_rows<T>(p.dv, p.cu_seqlens_k[p.batch], p.total_k, p.num_heads_kv, p.head_dim_v);
  }
}

}  // namespace flash::sm80
