// Forward: a CTA owns kBlockM queries of one head and streams the keys and values past them (FlashAttention, algorithm
// 1).
#pragma once

#include "fwd_softmax.cuh"
#include "kernel.cuh"
#include "score.cuh"

namespace flash::simt {

template <class T>
__device__ __forceinline__ void fwd_epilogue(const FwdParams& p, const Rows& out, const Head& head, int head_index,
                                             int64_t lse_offset, int row0,
                                             OnlineSoftmax<typename T::Math, T::kR>& softmax,
                                             const float (&acc_o)[T::kR][T::kO]) {
  const float* sink = p.sinks ? p.sinks + head_index : nullptr;
  const float kept_scale = p.dropout_p != 0.f ? head.dropout.scale : 1.f;
  float scale[T::kR];
#pragma unroll
  for (int r = 0; r < T::kR; r++) {
    scale[r] = softmax.finish(r, sink) * kept_scale;
    const int row = row0 + T::Math::row(r);
    if (row < out.rows && T::Math::lane_col() == 0) p.lse.ptr[lse_offset + row] = softmax.lse(r);
  }
  store_rows<T>(out, acc_o, row0, scale);
}

// K and V have one buffer each: while a warp multiplies with one, the other is on its way.
template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kMinCtas) fwd_simt_kernel(const __grid_constant__ FwdParams p) {
  using Math = typename T::Math;
  extern __shared__ __align__(16) float shared[];
  float* sQ = shared;                        // (kBlockM, kHeadDim), rows kStride apart
  float* sK = sQ + T::kBlockM * T::kStride;  // (kBlockN, kHeadDim)
  float* sV = sK + T::kBlockN * T::kStride;  // (kBlockN, kHeadDim)
  float* scratch = T::warp_scratch(sV + T::kBlockN * T::kStride);

  const int m_blocks = ceil_div(p.seqlen_q, T::kBlockM);
  const WorkTile work = WorkTile::of(m_blocks, p.num_heads);
  const SeqInfo seq = SeqInfo::of(p, work.batch_index);
  const int m0 = (m_blocks - 1 - work.block) * T::kBlockM;  // the longest rows of a causal mask first
  if (m0 >= seq.seqlen_q) return;

  const int head_kv = work.head / (p.num_heads / p.num_heads_kv);
  const Head head(p, seq, work.batch_index, work.head);
  const Rows q = Rows::of(p.q, p, work.batch_index, seq.q0, seq.seqlen_q, work.head, p.head_dim);
  const Rows k = Rows::of(p.k, p, work.batch_index, seq.k0, seq.seqlen_k, head_kv, p.head_dim);
  const Rows v = Rows::of(p.v, p, work.batch_index, seq.k0, seq.seqlen_k, head_kv, p.head_dim_v);
  const Rows out = Rows::of(p.out, p, work.batch_index, seq.q0, seq.seqlen_q, work.head, p.head_dim_v);

  const int warp_row = T::warp() * T::kWarpRows;
  const int depth = round_up(p.head_dim, 32);
  const BlockRange blocks = key_blocks(head.band, m0, T::kBlockM, T::kBlockN);

  OnlineSoftmax<Math, T::kR> softmax;
  float acc_o[T::kR][T::kO] = {};

  load_tile<T::kBlockM, T::kHeadDim, T::kThreads>(sQ, q, m0);
  if (blocks.count() > 0) load_tile<T::kBlockN, T::kHeadDim, T::kThreads>(sK, k, blocks.begin * T::kBlockN);

  for (int n_block = blocks.begin; n_block < blocks.end; n_block++) {
    const int n0 = n_block * T::kBlockN;
    wait_for_copies();
    __syncthreads();  // K has landed, and every warp is done with the last V
    load_tile<T::kBlockN, T::kHeadDim, T::kThreads>(sV, v, n0);

    float acc_s[T::kR][T::kS] = {};
    Math::template scores<T::kStride>(acc_s, sQ + warp_row * T::kStride, sK, depth);
    const Place<Math, false> at{m0 + warp_row, n0};
    to_scores(acc_s, head, at, blocks.needs_mask(n_block));
    softmax.step(acc_s, acc_o);
#pragma unroll
    for (int r = 0; r < T::kR; r++)
      if (p.dropout_p != 0.f) drop(acc_s[r], kept_bits<Math, false, T::kS>(head, at, r), 1.f);

    wait_for_copies();
    __syncthreads();  // V has landed, and every warp is done with K
    if (n_block + 1 < blocks.end) load_tile<T::kBlockN, T::kHeadDim, T::kThreads>(sK, k, n0 + T::kBlockN);
    Math::template accumulate<T::kStride>(acc_o, acc_s, sV, scratch);
  }

  const int64_t lse_offset = offset_of(p.lse, work.batch_index, seq.q0, 0, work.head);
  fwd_epilogue<T>(p, out, head, work.head, lse_offset, m0 + warp_row, softmax, acc_o);
}

template <class T>
void launch_fwd(const FwdParams& p, Stream stream) {
  launch<T>(fwd_simt_kernel<T>, "fwd_simt", p, grid_of(p.seqlen_q, T::kBlockM, p.num_heads, p.batch), stream);
}

}  // namespace flash::simt
