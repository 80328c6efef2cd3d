// The gradient of the additive bias: the sum of dS over every dimension that the bias is broadcast over. A CTA owns one
// tile of the bias and computes dS anew for everything that is added to it, in a fixed order and without atomics.
#pragma once

#include "bias_work.h"
#include "bwd_dq_kernel.cuh"

namespace flash::simt {

// Adds dS of the query block m0 ... and the key block n0 ... of one head to acc.
template <class T>
__device__ __forceinline__ void add_ds(float (&acc)[T::kR][T::kS], float* shared, const BwdParams& p,
                                       const SeqInfo& seq, int batch_index, int head_index, int m0, int n0) {
  using Math = typename T::Math;
  float* sQ = shared;                         // (kBlockM, kHeadDim), rows kStride apart
  float* sdO = sQ + T::kBlockM * T::kStride;  // (kBlockM, kHeadDim)
  float* sK = sdO + T::kBlockM * T::kStride;  // (kBlockN, kHeadDim)
  float* sV = sK + T::kBlockN * T::kStride;   // (kBlockN, kHeadDim)
  const int head_kv = head_index / (p.num_heads / p.num_heads_kv), warp_row = T::warp() * T::kWarpRows;
  const Head head(p, seq, batch_index, head_index);
  const auto load = [&](auto rows_constant, float* tile, const Strided& t, int64_t first, int rows, int h, int cols,
                        int row0) {
    load_tile<decltype(rows_constant)::value, T::kHeadDim, T::kThreads>(
        tile, Rows::of(t, p, batch_index, first, rows, h, cols), row0);
  };
  constexpr std::integral_constant<int, T::kBlockM> kQueries;
  constexpr std::integral_constant<int, T::kBlockN> kKeys;
  load(kQueries, sQ, p.q, seq.q0, seq.seqlen_q, head_index, p.head_dim, m0);
  load(kQueries, sdO, p.dout, seq.q0, seq.seqlen_q, head_index, p.head_dim_v, m0);
  load(kKeys, sK, p.k, seq.k0, seq.seqlen_k, head_kv, p.head_dim, n0);
  load(kKeys, sV, p.v, seq.k0, seq.seqlen_k, head_kv, p.head_dim_v, n0);
  wait_for_copies();
  __syncthreads();

  float acc_s[T::kR][T::kS] = {}, acc_dp[T::kR][T::kS] = {};
  Math::template scores<T::kStride>(acc_s, sQ + warp_row * T::kStride, sK, round_up(p.head_dim, 32));
  Math::template scores<T::kStride>(acc_dp, sdO + warp_row * T::kStride, sV, round_up(p.head_dim_v, 32));
  to_gradients<false>(acc_s, acc_dp, head, Place<Math, false>{m0 + warp_row, n0}, true,
                      load_row_stats<T>(p, seq, batch_index, head_index, m0 + warp_row));
#pragma unroll
  for (int r = 0; r < T::kR; r++)
#pragma unroll
    for (int c = 0; c < T::kS; c++) acc[r][c] += acc_dp[r][c];
  __syncthreads();  // every warp is done with the tiles
}

// Adds up the rows and columns that the bias is broadcast over and writes what remains.
template <class T>
__device__ __forceinline__ void store_dbias(float* tile, const float (&acc)[T::kR][T::kS], const BwdParams& p,
                                            const BiasWork& work) {
  constexpr int kStride = T::kBlockN + 1;  // tile: (kBlockM, kBlockN)
  const bool one_row = p.dbias.row == 0, one_col = p.dbias.col == 0;
#pragma unroll
  for (int r = 0; r < T::kR; r++)
#pragma unroll
    for (int c = 0; c < T::kS; c++)
      tile[(T::warp() * T::kWarpRows + T::Math::row(r)) * kStride + T::Math::score_col(c)] = acc[r][c];
  __syncthreads();
  if (one_col)
    for (int row = threadIdx.x; row < T::kBlockM; row += T::kThreads)
      for (int col = 1; col < T::kBlockN; col++) tile[row * kStride] += tile[row * kStride + col];
  __syncthreads();
  if (one_row)
    for (int col = threadIdx.x; col < (one_col ? 1 : T::kBlockN); col += T::kThreads)
      for (int row = 1; row < T::kBlockM; row++) tile[col] += tile[row * kStride + col];
  __syncthreads();

  const int m0 = one_row ? 0 : work.begin[2] * T::kBlockM, n0 = one_col ? 0 : work.begin[3] * T::kBlockN;
  const int rows = one_row ? 1 : min_of(T::kBlockM, p.seqlen_q - m0),
            cols = one_col ? 1 : min_of(T::kBlockN, p.seqlen_k - n0);
  float* dbias = static_cast<float*>(const_cast<void*>(p.dbias.ptr)) + work.begin[0] * p.dbias.batch +
                 work.begin[1] * p.dbias.head;
  for (int i = threadIdx.x; i < rows * cols; i += T::kThreads) {
    const int row = i / cols, col = i % cols;
    dbias[(m0 + row) * p.dbias.row + (n0 + col) * p.dbias.col] = tile[row * kStride + col];
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kMinCtas) dbias_simt_kernel(const __grid_constant__ BwdParams p) {
  static_assert(T::kBlockN <= T::kHeadDim);  // the tile of dS reuses the place of Q
  extern __shared__ __align__(16) float shared[];
  const int sizes[4] = {p.batch, p.num_heads, ceil_div(p.seqlen_q, T::kBlockM), ceil_div(p.seqlen_k, T::kBlockN)};
  const BiasWork work = BiasWork::of(p.dbias, blockIdx.x, sizes);
  float acc[T::kR][T::kS] = {};

  for (int batch_index = work.begin[0]; batch_index < work.end[0]; batch_index++) {
    const SeqInfo seq = SeqInfo::of(p, batch_index);
    for (int m_block = work.begin[2]; m_block < work.end[2]; m_block++) {
      const BlockRange seen = key_blocks(Band::of(p, seq), m_block * T::kBlockM, T::kBlockM, T::kBlockN);
      for (int n_block = max_of(work.begin[3], seen.begin); n_block < min_of(work.end[3], seen.end); n_block++)
        for (int head = work.begin[1]; head < work.end[1]; head++)
          add_ds<T>(acc, shared, p, seq, batch_index, head, m_block * T::kBlockM, n_block * T::kBlockN);
    }
  }
  store_dbias<T>(shared, acc, p, work);
}

template <class T>
void launch_dbias(const BwdParams& p, Stream stream) {
  int parts[4] = {p.batch, p.num_heads, ceil_div(p.seqlen_q, T::kBlockM), ceil_div(p.seqlen_k, T::kBlockN)};
  BiasWork::split(p.dbias, parts);
  launch<T>(dbias_simt_kernel<T>, "dbias_simt", p, int64_t(parts[0]) * parts[1] * parts[2] * parts[3], stream);
}

}  // namespace flash::simt
