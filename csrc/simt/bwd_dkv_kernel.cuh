// dk and dv: a CTA owns kBlockM keys of one kv head and streams past them the queries of every head of its group,
// kBlockN at a time, so that grouped heads need neither expanded gradients nor a reduction. Score tiles are transposed:
// keys are rows. On tensor cores it also adds up dq if that need not be bitwise repeatable.
#pragma once

#include "bwd_add_dq.cuh"
#include "bwd_scores.cuh"
#include "kernel.cuh"

namespace flash::simt {

// The queries that a CTA visits: block by block, head by head.
struct QueryWalk {
  BlockRange blocks;
  int first_head, group;

  __device__ int steps() const { return blocks.count() * group; }
  __device__ int head(int step) const { return first_head + step / blocks.count(); }
  __device__ int block(int step) const { return blocks.begin + step % blocks.count(); }
};

// lse and delta of rows row0 ... row0 + kRows - 1 to shared memory; rows that do not exist give 0 and are masked.
template <int kRows>
__device__ __forceinline__ void load_stats(float* sLse, float* sDelta, const BwdParams& p, const SeqInfo& seq,
                                           int batch_index, int head, int row0) {
  const int row = row0 + int(threadIdx.x) % kRows;
  const bool valid = row < seq.seqlen_q;
  if (threadIdx.x < kRows) {
    const float* lse = p.lse.ptr + offset_of(p.lse, batch_index, seq.q0, valid ? row : 0, head);
    const float* delta = p.delta.ptr + offset_of(p.delta, batch_index, seq.q0, valid ? row : 0, head);
    copy_4(sLse + threadIdx.x, lse, valid);
    copy_4(sDelta + threadIdx.x, delta, valid);
  }
}

template <class T>
__device__ __forceinline__ QueryStats<T::kS> read_stats(const float* sLse, const float* sDelta) {
  QueryStats<T::kS> stats;
#pragma unroll
  for (int c = 0; c < T::kS; c++) stats.set(c, sLse[T::Math::score_col(c)], sDelta[T::Math::score_col(c)]);
  return stats;
}

// What a CTA keeps in shared memory. Rows of tiles are kStride apart.
template <class T>
struct DkvShared {
  static constexpr int kKeyTile = T::kBlockM * T::kStride, kQueryTile = T::kBlockN * T::kStride;
  float *sK, *sV;        // (kBlockM, kHeadDim) each
  float *sQ, *sdO;       // (kBlockN, kHeadDim) each
  float *sLse, *sDelta;  // (kBlockN) each
  float* scratch;        // FMA: of the warps' products; TF32: dS (kBlockN, kBlockM)

  __device__ explicit DkvShared(float* shared)
      : sK(shared),
        sV(sK + kKeyTile),
        sQ(sV + kKeyTile),
        sdO(sQ + kQueryTile),
        sLse(sdO + kQueryTile),
        sDelta(sLse + T::kBlockN),
        scratch(sDelta + T::kBlockN) {}
};

// dk and dv of a warp's keys. Keys beyond seqused_k exist in memory and get zeros; in packed calls they were cleared
// before.
template <class T>
__device__ __forceinline__ void store_dk_dv(const BwdParams& p, const SeqInfo& seq, const WorkTile& work,
                                            const float (&acc_dk)[T::kR][T::kO], const float (&acc_dv)[T::kR][T::kO]) {
  const int rows = p.cu_seqlens_k ? seq.seqlen_k : p.seqlen_k;
  const int row0 = work.block * T::kBlockM + T::warp() * T::kWarpRows;
  float scale[T::kR];
#pragma unroll
  for (float& x : scale) x = p.softmax_scale;
  store_rows<T>(Rows::of(p.dk, p, work.batch_index, seq.k0, rows, work.head, p.head_dim), acc_dk, row0, scale);
#pragma unroll
  for (float& x : scale) x = 1.f;
  store_rows<T>(Rows::of(p.dv, p, work.batch_index, seq.k0, rows, work.head, p.head_dim_v), acc_dv, row0, scale);
}

// Q and dO have one buffer each: dO arrives while S is computed, the next Q while dv is.
template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kMinCtas) bwd_dkv_simt_kernel(const __grid_constant__ BwdParams p) {
  using Math = typename T::Math;
  static_assert(T::kBlockN <= T::kThreads);
  extern __shared__ __align__(16) float shared[];
  const DkvShared<T> smem(shared);
  const WorkTile work = WorkTile::of(ceil_div(p.seqlen_k, T::kBlockM), p.num_heads_kv);
  const SeqInfo seq = SeqInfo::of(p, work.batch_index);
  const int n0 = work.block * T::kBlockM, warp_row = T::warp() * T::kWarpRows, group = p.num_heads / p.num_heads_kv;
  if (n0 >= (p.cu_seqlens_k ? seq.seqlen_k : p.seqlen_k)) return;

  const QueryWalk walk{query_blocks(Band::of(p, seq), n0, T::kBlockM, T::kBlockN), work.head * group, group};
  const int steps = walk.steps();
  const auto load_keys = [&](float* tile, const Strided& t, int cols) {
    const Rows rows = Rows::of(t, p, work.batch_index, seq.k0, seq.seqlen_k, work.head, cols);
    load_tile<T::kBlockM, T::kHeadDim, T::kThreads>(tile, rows, n0);
  };
  const auto load_queries = [&](float* tile, const Strided& t, int step, int cols) {
    const Rows rows = Rows::of(t, p, work.batch_index, seq.q0, seq.seqlen_q, walk.head(step), cols);
    load_tile<T::kBlockN, T::kHeadDim, T::kThreads>(tile, rows, walk.block(step) * T::kBlockN);
  };
  float acc_dk[T::kR][T::kO] = {}, acc_dv[T::kR][T::kO] = {};
  load_keys(smem.sK, p.k, p.head_dim);
  load_keys(smem.sV, p.v, p.head_dim_v);
  if (steps > 0) load_queries(smem.sQ, p.q, 0, p.head_dim);

  for (int step = 0; step < steps; step++) {
    const int m_block = walk.block(step), m0 = m_block * T::kBlockN;
    wait_for_copies();
    __syncthreads();  // Q has landed, and every warp is done with the last dO
    load_queries(smem.sdO, p.dout, step, p.head_dim_v);
    load_stats<T::kBlockN>(smem.sLse, smem.sDelta, p, seq, work.batch_index, walk.head(step), m0);
    float acc_s[T::kR][T::kS] = {};
    Math::template scores<T::kStride>(acc_s, smem.sK + warp_row * T::kStride, smem.sQ, round_up(p.head_dim, 32));

    wait_for_copies();
    __syncthreads();  // dO, lse and delta have landed
    float acc_dp[T::kR][T::kS] = {};
    Math::template scores<T::kStride>(acc_dp, smem.sV + warp_row * T::kStride, smem.sdO, round_up(p.head_dim_v, 32));
    const Head head(p, seq, work.batch_index, walk.head(step));
    to_gradients<true>(acc_s, acc_dp, head, Place<Math, true>{n0 + warp_row, m0}, walk.blocks.needs_mask(m_block),
                       read_stats<T>(smem.sLse, smem.sDelta));
    if constexpr (T::kCanAddDq)
      if (!p.deterministic) share_ds<T>(smem.scratch, acc_dp, warp_row);
    Math::template accumulate<T::kStride>(acc_dk, acc_dp, smem.sQ, T::warp_scratch(smem.scratch));

    __syncthreads();  // every warp is done with Q, and dS is complete
    if (step + 1 < steps) load_queries(smem.sQ, p.q, step + 1, p.head_dim);
    Math::template accumulate<T::kStride>(acc_dv, acc_s, smem.sdO, T::warp_scratch(smem.scratch));
    if constexpr (T::kCanAddDq)
      if (!p.deterministic) add_dq<T>(p, seq, work.batch_index, walk.head(step), m0, smem.scratch, smem.sK);
  }
  store_dk_dv<T>(p, seq, work, acc_dk, acc_dv);
}

}  // namespace flash::simt
