// The dQ warpgroup of a thread block of a pair: dQ (kBlockM x half of the columns) = dS K over the keys of both blocks.
#pragma once

#include "../ptx/cluster.cuh"
#include "bwd_dq.cuh"
#include "bwd_pair_args.cuh"

namespace flash::sm90 {

// acc (+)= dS (64 x 64 keys) K (64 keys x 2 kCount columns)
template <class Traits, int kCount>
__device__ __forceinline__ void issue_half_dq(float (&acc)[kCount], uint32_t ds, uint32_t keys, bool accumulate) {
  const ptx::Descriptor a = ptx::Descriptor::of(ds).opaque(),
                        b = ptx::Descriptor::of(keys, Traits::kPanelBytes).opaque();
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < Traits::kKeys / 16; i++)
    ptx::wgmma_ss<typename Traits::T, ptx::Major::kK, ptx::Major::kMN>(acc, a + ptx::k_major_step(i, Traits::kBlockM),
                                                                       b + ptx::mn_major_step(i), accumulate || i != 0);
  ptx::wgmma_commit_group();
}

// Until the other block's dS is in the slot, whose barrier is armed for the next one.
template <class Traits>
__device__ __forceinline__ void wait_for_peer_ds(BwdPairSmem<Traits> smem, int slot, uint32_t phase) {
  ptx::mbarrier_wait(smem.peer_full(slot), phase);
  if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive_expect_tx(smem.peer_full(slot), Traits::kPanelBytes);
}

// This warp has used the slot of both blocks.
template <class Traits>
__device__ __forceinline__ void release_ds(BwdPairSmem<Traits> smem, int slot, int rank) {
  if (threadIdx.x % 32 != 0) return;
  ptx::mbarrier_arrive(smem.slot_empty(slot));
  ptx::mbarrier_arrive_remote_read(smem.slot_empty(slot), rank ^ 1);
}

// As in bwd_dq.cuh, in all copies of K that dQ reads.
template <class Traits>
__device__ __forceinline__ void clear_unused_pair_keys(const BwdArgs& args, const BwdBlock& block,
                                                       BwdPairSmem<Traits> smem, int rank) {
  constexpr int kKeys = Traits::kKeys;
  const int used = block.seq.seqlen_k - block.n_block * Traits::kTile.block_n;
  if (used >= Traits::kTile.block_n || !may_hold_unused_keys(args.p)) return;
  const int own = min_of(kKeys, max_of(0, used - rank * kKeys)),
            peer = min_of(kKeys, max_of(0, used - (rank ^ 1) * kKeys));
  zero_rows<128>(smem.peer_k(), Traits::kHalfPanels, kKeys, peer, threadIdx.x % 128);
  if constexpr (Traits::kHalfIsPanels)
    zero_rows<128>(smem.k(), Traits::kPanels, kKeys, own, threadIdx.x % 128);
  else
    zero_rows<128>(smem.own_k(), Traits::kHalfPanels, kKeys, own, threadIdx.x % 128);
  ptx::bar_sync(3, 128);
}

// Whether exact sums of this tile's steps are integers: one answer for all rows that see a key-value head's keys
// (bwd_exact_sum.h). The whole warp asks. Loops that know it are half as long as one that asks in every step.
__device__ __forceinline__ bool sums_integers(const BwdArgs& args, const BwdBlock& block) {
  if (block.steps.total() == 0) return false;
  const int64_t band = block.head_kv * block.steps.group * args.bands + block.band0;
  return __any_sync(~0u, signbit(args.row_scale[band * kBandRows]));
}

// All steps of a tile of keys, whichever sums the call asks for.
template <class Traits>
__device__ __forceinline__ void add_pair_tile_to_dq(const BwdArgs& args, const BwdBlock& block,
                                                    BwdPairSmem<Traits> smem, int rank, int& index) {
  constexpr int kBandsOfStep = Traits::kBlockM / kBandRows, kFirstGroup = Traits::kHalf / 8;
  constexpr int kColumns = Traits::kTile.dq_columns, kPieces = Traits::kHalf / kColumns;
  const int warp = threadIdx.x / 32 % 4;
  const int groups = args.p.head_dim / 8, bands = ceil_div(block.seq.seqlen_q, kBandRows);
  const uint32_t own_k =
      Traits::kHalfIsPanels ? smem.k() + rank * Traits::kHalfPanels * Traits::kPanelBytes : smem.own_k();
  const int end = index + block.steps.total();
  BwdSteps::Step step{block.steps.begin, 0};
  float acc[kColumns / 2];
#pragma unroll 1
  for (; index < end; index++) {
    const int slot = index % Traits::kDsStages;
    const uint32_t phase = phase_of<Traits::kDsStages>(index);
    const int my_band = step.m_block * kBandsOfStep + warp, head = block.head_kv * block.steps.group + step.head;
    const DqBand dq = DqBand::of(args, head * args.bands + block.band0 + min_of(my_band, bands - 1));
    ptx::mbarrier_wait(smem.ds_full(slot), phase);
#pragma unroll
    for (int piece = 0; piece < kPieces; piece++) {
      const int panels = piece * (kColumns / 64) * Traits::kPanelBytes;
      ptx::pin(acc);
      issue_half_dq<Traits>(acc, smem.slot(slot), own_k + panels, false);
      if (piece == 0) wait_for_peer_ds(smem, slot, phase);
      issue_half_dq<Traits>(acc, smem.peer_ds(slot), smem.peer_k() + panels, true);
      ptx::wgmma_wait_group<0>();
      ptx::pin(acc);
      if (piece == kPieces - 1) release_ds(smem, slot, rank);
      if (my_band < bands) dq.add(args, acc, rank * kFirstGroup + piece * (kColumns / 8), groups);
    }
    step = block.steps.ahead(step, 1);
  }
}

}  // namespace flash::sm90
