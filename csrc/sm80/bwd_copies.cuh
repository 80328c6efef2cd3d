// What the backward's loop copies into shared memory: the tile's keys once, a block of queries in every step.
#pragma once

#include "bwd_mainloop.cuh"

namespace flash::sm80 {

template <class Traits>
__device__ __forceinline__ void BwdMainloop<Traits>::load_keys(const SeqInfo& seq, int batch_index, int head_kv) const {
  RowLoader<T, TileK, kThreads>(params.k, batch_index, seq.k0, head_kv, seq.seqlen_k, params.head_dim).load(smem, col0);
  RowLoader<T, TileV, kThreads>(params.v, batch_index, seq.k0, head_kv, seq.seqlen_k, params.head_dim_v)
      .load(smem + Traits::kSmem.v, col0);
}

// lse, then delta.
template <class Traits>
__device__ __forceinline__ void BwdMainloop<Traits>::load_stats(uint32_t stage, int row0, int head) const {
  static_assert(2 * kBlockM <= kThreads);
  const int j = Traits::kSharesP ? forget_before_sm90(threadIdx.x) : threadIdx.x, row = row0 + j % kBlockM;
  if (j < 2 * kBlockM) {
    const float* stats = j < kBlockM ? place.lse + head * params.lse.head : place.delta + head * params.delta.head;
    ptx::cp_async_4(stage + TileQ::kBytes + TileDo::kBytes + 4 * j, stats + row, row < band.seqlen_q);
  }
}

template <class Traits>
__device__ __forceinline__ void BwdMainloop<Traits>::load_queries(const Step& step) const {
  const uint32_t stage = stage_of(step);
  const int row0 = step.block * kBlockM, head = step.head - first_head;
  if constexpr (Traits::kStatsFirst) load_stats(stage, row0, head);
  if (place.whole_rows && row0 + kBlockM <= band.seqlen_q) {
    load_whole_tile<TileQ, kThreads>(stage, place.q + row0 * params.q.row + head * params.q.head, params.q.row,
                                     threadIdx.x);
    load_whole_tile<TileDo, kThreads>(stage + TileQ::kBytes,
                                      place.dout + row0 * params.dout.row + head * params.dout.head, params.dout.row,
                                      threadIdx.x);
  } else {
    RowLoader<T, TileQ, kThreads>(params.q, place.batch_index, place.q0, step.head, band.seqlen_q, params.head_dim)
        .load(stage, row0);
    RowLoader<T, TileDo, kThreads>(params.dout, place.batch_index, place.q0, step.head, band.seqlen_q,
                                   params.head_dim_v)
        .load(stage + TileQ::kBytes, row0);
    if constexpr (Traits::kHasBarriers) publish_stores();
  }
  if constexpr (!Traits::kStatsFirst) load_stats(stage, row0, head);
  if constexpr (Traits::kHasBarriers) {
    barriers.arrive_full(step.count);
  } else {
    ptx::cp_async_commit_group();
  }
}

}  // namespace flash::sm80
