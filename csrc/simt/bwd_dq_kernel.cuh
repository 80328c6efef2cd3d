// dq: a CTA owns kBlockM queries of one head and streams the keys and values past them. P is computed anew here and in
// the kernel for dk and dv: two products more than with atomic additions to dq, but no workspace, and bitwise
// repeatable.
#pragma once

#include "bwd_scores.cuh"
#include "kernel.cuh"

namespace flash::simt {

// lse and delta of this lane's queries; rows that do not exist have P = 0.
template <class T>
__device__ __forceinline__ QueryStats<T::kR> load_row_stats(const BwdParams& p, const SeqInfo& seq, int batch_index,
                                                            int head, int row0) {
  const float* lse = p.lse.ptr + offset_of(p.lse, batch_index, seq.q0, 0, head);
  const float* delta = p.delta.ptr + offset_of(p.delta, batch_index, seq.q0, 0, head);
  QueryStats<T::kR> stats;
#pragma unroll
  for (int r = 0; r < T::kR; r++) {
    const int row = row0 + T::Math::row(r);
    const bool exists = row < seq.seqlen_q;
    stats.set(r, exists ? lse[row] : INFINITY, exists ? delta[row] : 0.f);
  }
  return stats;
}

// K and V have one buffer each: V arrives while the last K is in use, K while dP is computed.
template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kMinCtas) bwd_dq_simt_kernel(const __grid_constant__ BwdParams p) {
  using Math = typename T::Math;
  extern __shared__ __align__(16) float shared[];
  float* sQ = shared;                         // (kBlockM, kHeadDim), rows kStride apart
  float* sdO = sQ + T::kBlockM * T::kStride;  // (kBlockM, kHeadDim)
  float* sK = sdO + T::kBlockM * T::kStride;  // (kBlockN, kHeadDim)
  float* sV = sK + T::kBlockN * T::kStride;   // (kBlockN, kHeadDim)
  float* scratch = T::warp_scratch(sV + T::kBlockN * T::kStride);

  const int m_blocks = ceil_div(p.seqlen_q, T::kBlockM);
  const WorkTile work = WorkTile::of(m_blocks, p.num_heads);
  const SeqInfo seq = SeqInfo::of(p, work.batch_index);
  const int m0 = (m_blocks - 1 - work.block) * T::kBlockM;  // the longest rows of a causal mask first
  if (m0 >= seq.seqlen_q) return;

  const int head_kv = work.head / (p.num_heads / p.num_heads_kv);
  const Head head(p, seq, work.batch_index, work.head);
  const Rows q = Rows::of(p.q, p, work.batch_index, seq.q0, seq.seqlen_q, work.head, p.head_dim);
  const Rows dout = Rows::of(p.dout, p, work.batch_index, seq.q0, seq.seqlen_q, work.head, p.head_dim_v);
  const Rows k = Rows::of(p.k, p, work.batch_index, seq.k0, seq.seqlen_k, head_kv, p.head_dim);
  const Rows v = Rows::of(p.v, p, work.batch_index, seq.k0, seq.seqlen_k, head_kv, p.head_dim_v);
  const Rows dq = Rows::of(p.dq, p, work.batch_index, seq.q0, seq.seqlen_q, work.head, p.head_dim);

  const int warp_row = T::warp() * T::kWarpRows;
  const BlockRange blocks = key_blocks(head.band, m0, T::kBlockM, T::kBlockN);
  const auto stats = load_row_stats<T>(p, seq, work.batch_index, work.head, m0 + warp_row);
  float acc_dq[T::kR][T::kO] = {};

  load_tile<T::kBlockM, T::kHeadDim, T::kThreads>(sQ, q, m0);
  load_tile<T::kBlockM, T::kHeadDim, T::kThreads>(sdO, dout, m0);
  if (blocks.count() > 0) load_tile<T::kBlockN, T::kHeadDim, T::kThreads>(sV, v, blocks.begin * T::kBlockN);

  for (int n_block = blocks.begin; n_block < blocks.end; n_block++) {
    const int n0 = n_block * T::kBlockN;
    wait_for_copies();
    __syncthreads();  // V has landed, and every warp is done with the last K
    load_tile<T::kBlockN, T::kHeadDim, T::kThreads>(sK, k, n0);

    float acc_dp[T::kR][T::kS] = {};
    Math::template scores<T::kStride>(acc_dp, sdO + warp_row * T::kStride, sV, round_up(p.head_dim_v, 32));

    wait_for_copies();
    __syncthreads();  // K has landed, and every warp is done with V
    if (n_block + 1 < blocks.end) load_tile<T::kBlockN, T::kHeadDim, T::kThreads>(sV, v, n0 + T::kBlockN);

    float acc_s[T::kR][T::kS] = {};
    Math::template scores<T::kStride>(acc_s, sQ + warp_row * T::kStride, sK, round_up(p.head_dim, 32));
    to_gradients<true>(acc_s, acc_dp, head, Place<Math, false>{m0 + warp_row, n0}, blocks.needs_mask(n_block), stats);
    Math::template accumulate<T::kStride>(acc_dq, acc_dp, sK, scratch);
  }

  float scale[T::kR];
#pragma unroll
  for (float& x : scale) x = p.softmax_scale;
  store_rows<T>(dq, acc_dq, m0 + warp_row, scale);
}

}  // namespace flash::simt
