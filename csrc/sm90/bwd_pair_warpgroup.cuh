// Warpgroups 0 and 1 of a thread block of a pair share its 64 keys by product:
//   warpgroup 0   S, P, dV   and hands P to warpgroup 1 through a slot in shared memory
//   warpgroup 1   dP, dS, dK and puts dS into the slot in place of P, where dQ and, if kDsShared, dK read it
// Where registers allow it (kAhead) each issues the first product of the next step behind the last one of this step, so
// that the tensor cores do not idle in between; behind the last step that is a product of stale tiles that nobody
// reads. Warp w of both works on the same 16 keys, so the slot passes from warp to warp without conflicts: what a warp
// of warpgroup 1 overwrites, only it has read. Warpgroup 0 fills it again when the dQ warpgroups of both blocks, and
// dK if it reads dS there, are done with it (slot_empty in bwd_pair_args.cuh).
#pragma once

#include "../ptx/cluster.cuh"
#include "../ptx/named_barrier.cuh"
#include "bwd_pair_loads.cuh"
#include "bwd_products.cuh"
#include "bwd_scores.cuh"

namespace flash::sm90 {

template <bool kFirst, class T>
__device__ __forceinline__ T& pick(T& first, T& second) {
  if constexpr (kFirst)
    return first;
  else
    return second;
}

// What both have in common: the walk over the steps.
template <class Traits>
struct PairWarpgroup {
  using T = typename Traits::T;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr bool kGeneral = Traits::kGeneral, kAhead = Traits::kAhead;
  using Scores = float[kBlockM / 2];            // 64 keys x kBlockM queries
  using Fragments = uint32_t[kBlockM / 16][4];  // the same in 16 bit, an A operand
  using Stats = QueryStats<kBlockM / 8>;
  using DoutRing = typename Traits::DoutRing;

  const BwdArgs& args;
  const BwdBlock& block;
  const BwdPairSmem<Traits> smem;
  const int rank;
  int index;              // of the step, counted over all tiles of keys
  const int end;          // behind the last step of this tile
  int m_block, head = 0;  // of the step

  __device__ __forceinline__ PairWarpgroup(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                           int rank, int index)
      : args(args),
        block(block),
        smem(smem),
        rank(rank),
        index(index),
        end(index + block.steps.total()),
        m_block(block.steps.begin) {}

  __device__ __forceinline__ int stage() const { return index % Traits::kStages; }
  __device__ __forceinline__ int slot() const { return index % Traits::kDsStages; }
  __device__ __forceinline__ uint32_t slot_phase() const { return phase_of<Traits::kDsStages>(index); }
  __device__ __forceinline__ int key() const {  // the first of this thread's two, within the segment
    return block.n_block * Traits::kTile.block_n + rank * Traits::kKeys + threadIdx.x / 32 % 4 * 16 +
           threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ void wait_q() {
    ptx::mbarrier_wait(smem.q_full(stage()), phase_of<Traits::kStages>(index));
  }
  __device__ __forceinline__ void wait_dout(int part) {
    ptx::mbarrier_wait(smem.dout_full(DoutRing::place(index, part)), DoutRing::parity(index, part));
  }

  // This warp no longer needs Q, or dO, of step `step`.
  __device__ __forceinline__ void release_q(int step) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.q_empty(step % Traits::kStages));
  }
  __device__ __forceinline__ void release_dout(int step, int part) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.dout_empty(DoutRing::place(step, part)));
  }
  __device__ __forceinline__ void skip_dout() {
#pragma unroll
    for (int part = 0; part < DoutRing::kParts; part++) wait_dout(part), release_dout(index, part);
  }

  // In the last step of a tile, when this warp has read its keys: the next tile's may come. Where the dQ warpgroup
  // needs them too they are released with the tile.
  static constexpr bool kReleasesEarly = !Traits::kHalfIsPanels;
  __device__ __forceinline__ void release_keys(uint32_t bar) {
    if (kReleasesEarly && index + 1 == end && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(bar);
  }

  // Queries beyond the segment, which only masked tiles hold: both warpgroups write the zeros, so that neither has to
  // wait for the other.
  __device__ __forceinline__ void clear_foreign_queries(int barrier, int m_block) {
    if (m_block != block.foreign_m) return;
    wait_q();
#pragma unroll
    for (int part = 0; part < DoutRing::kParts; part++) wait_dout(part);
    const int rows = block.seq.seqlen_q - m_block * kBlockM;
    zero_rows_compact<128>(smem.q(stage()), Traits::kPanels, kBlockM, rows, threadIdx.x % 128);
#pragma unroll 1
    for (int part = 0; part < DoutRing::kParts; part++)
      zero_rows_compact<128>(smem.dout(DoutRing::place(index, part)), Traits::kPartPanels, kBlockM, rows,
                             threadIdx.x % 128);
    ptx::bar_sync(barrier, 128);
  }
  // With index already that of the next step: its tile of queries; -2 behind the last step, which is no tile to clear.
  __device__ __forceinline__ int next_m() const {
    if (index >= end) return -2;
    return m_block + 1 == block.steps.end() ? block.steps.begin : m_block + 1;
  }
};

// The steps of one head up to tile `end`; `warpgroup` has skip() and step<kMasked>(), which count its index.
template <Visit kVisit, class Warpgroup>
__device__ __forceinline__ void walk(Warpgroup& warpgroup, typename Warpgroup::Scores& carried, int end) {
#pragma unroll 1
  for (; warpgroup.m_block < end; warpgroup.m_block++) {
    if constexpr (kVisit == Visit::kSkip)
      warpgroup.skip(carried);
    else
      warpgroup.template step<kVisit == Visit::kMasked>(carried);
  }
}

template <class Warpgroup>
__device__ __forceinline__ void walk_all(Warpgroup& warpgroup) {
  const BwdBlock& block = warpgroup.block;
  const BlockRange& mine = block.mine[warpgroup.rank];
  const int begin = block.steps.begin, end = block.steps.end();
  if (block.steps.total() == 0) return;
  typename Warpgroup::Scores carried;
  if constexpr (Warpgroup::kAhead) warpgroup.issue_first(carried, begin);
#pragma unroll 1
  for (warpgroup.head = 0; warpgroup.head < block.steps.group; warpgroup.head++) {
    warpgroup.m_block = begin;
    walk<Visit::kSkip>(warpgroup, carried, min_of(mine.begin, end));
    walk<Visit::kMasked>(warpgroup, carried, mine.full_begin);
    walk<Visit::kFull>(warpgroup, carried, mine.full_end);
    walk<Visit::kMasked>(warpgroup, carried, mine.end);
    walk<Visit::kSkip>(warpgroup, carried, end);
  }
  if constexpr (Warpgroup::kAhead) ptx::wgmma_wait_group<0>();
}

}  // namespace flash::sm90
