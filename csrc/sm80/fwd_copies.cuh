// Copies blocks of keys into the two stages of K and V.
#pragma once

#include "../ptx/shared.cuh"
#include "forget.cuh"
#include "fwd_barriers.cuh"
#include "fwd_place.cuh"

namespace flash::sm80 {

template <class Traits>
struct FwdCopies {
  using T = typename Traits::T;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  static constexpr int kBlockN = Traits::kBlockN, kStageBytes = TileK::kBytes + TileV::kBytes;

  const FwdParams& params;
  const uint32_t smem;

  // Of a block of keys. step: how many came before it, which counts where warps wait at barriers.
  __device__ __forceinline__ uint32_t stage(int block, int step) const {
    return smem + Traits::kSmem.kv + ((Traits::kIsPair ? step : block) & 1) * kStageBytes;
  }
  __device__ __forceinline__ FwdBarriers<Traits> barriers() const { return {smem}; }

  __device__ __forceinline__ void block(int block, const FwdPlace& at, int step = 0) const {
    if (block >= at.begin) {
      if (at.whole_rows && (block + 1) * kBlockN <= at.seq.seqlen_k) {
        whole_block(block, static_cast<const T*>(at.k), static_cast<const T*>(at.v), step);
      } else {
        const auto thread = [] { return Traits::kHeadDim == 96 ? forget(threadIdx.x) : threadIdx.x; };
        RowLoader<T, TileK, Traits::kThreads>(params.k, at.work.batch_index, at.seq.k0, at.head_kv, at.seq.seqlen_k,
                                              params.head_dim)
            .load(stage(block, step), block * kBlockN, thread());
        RowLoader<T, TileV, Traits::kThreads>(params.v, at.work.batch_index, at.seq.k0, at.head_kv, at.seq.seqlen_k,
                                              params.head_dim_v)
            .load(stage(block, step) + TileK::kBytes, block * kBlockN, thread());
        if constexpr (Traits::kIsPair) publish_stores();
      }
      if constexpr (Traits::kIsPair) barriers().arrive_full(step);
    }
    if constexpr (!Traits::kIsPair) ptx::cp_async_commit_group();
  }

  // k, v: of the sequence's first key.
  __device__ __forceinline__ void load_pointers(const T*& k, const T*& v) const {
    static_assert(offsetof(FwdPlace, k) == 0 && offsetof(FwdPlace, v) == 8);
    ptx::ld_shared(k, v, smem + Traits::kSmem.place);
  }
  __device__ __forceinline__ void whole_block(int block, const T* k, const T* v, int step = 0) const {
    const int row0 = block * kBlockN;
    const unsigned thread = forget(threadIdx.x);
    load_whole_tile<TileK, Traits::kThreads>(stage(block, step), k + row0 * params.k.row, params.k.row, thread);
    load_whole_tile<TileV, Traits::kThreads>(stage(block, step) + TileK::kBytes, v + row0 * params.v.row, params.v.row,
                                             thread);
  }

  // The same from the thread's first chunks on, which move on to the block before.
  __device__ __forceinline__ void first_chunks(int block, const T*& k, const T*& v) const {
    using LanesK = CopyLanes<TileK, Traits::kThreads>;
    using LanesV = CopyLanes<TileV, Traits::kThreads>;
    load_pointers(k, v);
    k += (block * kBlockN + LanesK::row(threadIdx.x)) * params.k.row + LanesK::col(threadIdx.x);
    v += (block * kBlockN + LanesV::row(threadIdx.x)) * params.v.row + LanesV::col(threadIdx.x);
  }
  __device__ __forceinline__ void whole_chunks(int block, const T*& k, const T*& v) const {
    using LanesK = CopyLanes<TileK, Traits::kThreads>;
    using LanesV = CopyLanes<TileV, Traits::kThreads>;
    const unsigned thread = forget(threadIdx.x);
    const int64_t stride_k = forget(params.k.row), stride_v = forget(params.v.row);
    load_whole_chunks<TileK, Traits::kThreads>(
        stage(block, 0) + TileK::offset(LanesK::row(thread), LanesK::col(thread)), k, stride_k);
    load_whole_chunks<TileV, Traits::kThreads>(
        stage(block, 0) + TileK::kBytes + TileV::offset(LanesV::row(thread), LanesV::col(thread)), v, stride_v);
    k -= kBlockN * stride_k, v -= kBlockN * stride_v;
  }
};

}  // namespace flash::sm80
