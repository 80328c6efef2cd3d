// Copies into the shared memory of one thread block of a pair. Q and dO come and go apart, since each is needed by two
// products at different times.
#pragma once

#include "bwd_loads.cuh"
#include "bwd_pair_args.cuh"

namespace flash::sm90 {

// K, V and the halves of K that dQ needs, in the order in which the last tile's are done with. `parity`: of the waits
// for them.
template <class Traits>
__device__ __forceinline__ void load_pair_keys(const BwdArgs& args, const BwdKeys& block, BwdPairSmem<Traits> smem,
                                               int rank, uint32_t parity) {
  constexpr int kPanel = Traits::kPanelBytes;
  constexpr int kHalves = Traits::kHalfPanels * (Traits::kHalfIsPanels ? 1 : 2);
  const int first = int(block.seq.k0) + block.n_block * Traits::kTile.block_n;
  const int own = first + rank * Traits::kKeys, peer = first + (rank ^ 1) * Traits::kKeys;
  const int batch = args.p.cu_seqlens_k ? 0 : block.batch;
  const int k_head = block.head_kv * args.step_k.head, k_batch = batch * args.step_k.batch;
  ptx::mbarrier_wait(smem.k_empty(), parity);
  ptx::mbarrier_arrive_expect_tx(smem.k_full(), Traits::kPanels * kPanel);
  load_tile<Traits::kPanels>(smem.k(), kPanel, &args.map_k, smem.k_full(), own, k_head, k_batch);
  ptx::mbarrier_wait(smem.v_empty(), parity);
  ptx::mbarrier_arrive_expect_tx(smem.v_full(), Traits::kPanelsV * kPanel);
  load_tile<Traits::kPanelsV>(smem.v(), kPanel, &args.map_v, smem.v_full(), own, block.head_kv * args.step_v.head,
                              batch * args.step_v.batch);
  const uint32_t bar = smem.half_full();
  ptx::mbarrier_wait(smem.half_empty(), parity);
  ptx::mbarrier_arrive_expect_tx(bar, kHalves * kPanel);
#pragma unroll
  for (int i = 0; i < Traits::kHalfPanels; i++) {
    const int column = rank * Traits::kHalf + 64 * i;
    ptx::tma_load(smem.peer_k() + i * kPanel, &args.map_k, bar, column, peer, k_head, k_batch);
    if constexpr (!Traits::kHalfIsPanels)
      ptx::tma_load(smem.own_k() + i * kPanel, &args.map_k, bar, column, own, k_head, k_batch);
  }
}

template <class Traits>
__device__ __forceinline__ void load_q(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem, int stage,
                                       BwdSteps::Step step) {
  const int head = block.head_kv * block.steps.group + step.head;
  const int64_t band = head * args.bands + block.band0 + step.m_block * (Traits::kBlockM / kBandRows);
  const uint32_t bar = smem.q_full(stage);
  ptx::mbarrier_arrive_expect_tx(bar, Traits::kPanels * Traits::kPanelBytes + Traits::kStatsBytes);
  load_tile<Traits::kPanels>(smem.q(stage), Traits::kPanelBytes, &args.map_q, bar,
                             int(block.seq.q0) + step.m_block * Traits::kBlockM, head * args.step_q.head,
                             (args.p.cu_seqlens_q ? 0 : block.batch) * args.step_q.batch);
  ptx::bulk_load(smem.stats(stage), args.stats + band * kBandStats, bar, Traits::kStatsBytes);
}

// Part `part` of dO of a step, into its place in the ring.
template <class Traits>
__device__ __forceinline__ void load_dout(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                          int place, BwdSteps::Step step, int part) {
  constexpr int kPanels = Traits::kPartPanels;
  const int head = block.head_kv * block.steps.group + step.head;
  const uint32_t bar = smem.dout_full(place);
  ptx::mbarrier_arrive_expect_tx(bar, kPanels * Traits::kPanelBytes);
  load_tile<kPanels>(smem.dout(place), Traits::kPanelBytes, &args.map_dout, bar,
                     int(block.seq.q0) + step.m_block * Traits::kBlockM, head * args.step_dout.head,
                     (args.p.cu_seqlens_q ? 0 : block.batch) * args.step_dout.batch, part * kPanels);
}

}  // namespace flash::sm90
