// Warpgroup 1 of a thread block of a pair: dP, dS, dK. See bwd_pair_warpgroup.cuh.
#pragma once

#include "../ptx/cluster.cuh"
#include "bwd_pair_warpgroup.cuh"

namespace flash::sm90 {

template <class Traits>
struct KeyWarpgroup : PairWarpgroup<Traits> {
  using Base = PairWarpgroup<Traits>;
  using Base::args, Base::block, Base::smem, Base::rank, Base::index, Base::m_block, Base::kBlockM;
  using typename Base::DoutRing, typename Base::Fragments, typename Base::Scores, typename Base::Stats,
      typename Base::T;

  float acc_dk[Traits::kHeadDim / 2];  // 64 x kHeadDim

  __device__ __forceinline__ KeyWarpgroup(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                          int rank, int index)
      : Base(args, block, smem, rank, index) {
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; i++) acc_dk[i] = 0.f;
  }

  __device__ __forceinline__ uint32_t keys_full() const { return smem.v_full(); }
  __device__ __forceinline__ uint32_t keys_empty() const { return smem.v_empty(); }

  // The slot holds dS: to the dQ warpgroups of both blocks. The other block's copy of the slot is free when this one
  // is.
  __device__ __forceinline__ void hand_over() {
    const int slot = this->slot();
    const uint32_t bar = smem.ds_full(slot), phase = this->slot_phase();
    ptx::fence_proxy_async();
    if constexpr (Traits::kDsShared) {
      ptx::bar_sync(2, 128);  // dK takes what all four warps have stored
      if (threadIdx.x % 128 != 0) return;
      ptx::mbarrier_arrive(bar);
    } else {
      __syncwarp();
      if (threadIdx.x % 32 != 0 || !ptx::mbarrier_arrive_is_last(bar)) return;
      ptx::mbarrier_wait(bar, phase);  // passes at once; orders the other warps' stores before the copy
    }
    ptx::bulk_copy_to_cluster(ptx::mapa(smem.peer_ds(slot), rank ^ 1), smem.slot(slot),
                              ptx::mapa(smem.peer_full(slot), rank ^ 1), Traits::kPanelBytes);
  }
  // dK is done with the slot.
  __device__ __forceinline__ void release_slot() {
    if (Traits::kDsShared && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.slot_empty(this->slot()));
  }

  // dP of step `index`, on tile `m`
  template <bool kMayBeForeign = true>
  __device__ __forceinline__ void issue_first(Scores& acc_dp, int m) {
    if constexpr (kMayBeForeign) this->clear_foreign_queries(2, m);
#pragma unroll
    for (int part = 0; part < DoutRing::kParts; part++) {
      if (!Traits::kAhead || index < this->end) this->wait_dout(part);
      issue_scores<T, Traits::kHeadDimV / DoutRing::kParts, Traits::kKeys>(
          acc_dp, ptx::Descriptor::of(smem.v() + part * Traits::kPartPanels * Traits::kPanelBytes),
          ptx::Descriptor::of(smem.dout(DoutRing::place(index, part))), part != 0);
    }
  }

  // dP is there, which dO was for and, in the last step, V.
  __device__ __forceinline__ void finish_first(Scores& acc_dp) {
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_dp);
    this->release_keys(keys_empty());
#pragma unroll
    for (int part = 0; part < DoutRing::kParts; part++) this->release_dout(index, part);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(Scores& carried) {
    if constexpr (Traits::kDsShared)
      step_from_shared<kMasked>();
    else
      step_from_registers<kMasked>(carried);
  }

  // dK takes dS from the slot: no thread holds more of dS than 16 queries' at a time.
  template <bool kMasked>
  __device__ __forceinline__ void step_from_shared() {
    static_assert(!Traits::kAhead);
    constexpr int kBands = kBlockM / kBandRows, kStatsBytes = kBandStats * int(sizeof(float));
    Scores acc_dp;
    issue_first<kMasked>(acc_dp, m_block);
    this->wait_q();
    const uint32_t stats = smem.stats(this->stage());
    QueryStats<kBandRows / 8> delta[2];  // of this band, and of the next one
    delta[0].template load<1>(stats);
    delta[1].template load<1>(stats + kStatsBytes);
    finish_first(acc_dp);
    ptx::mbarrier_wait(smem.p_full(this->slot()), this->slot_phase());
    const uint32_t address = transposed_address(smem.slot(this->slot()));
    const EntriesOf<Traits::kMayDrop> entries(args.p, smem.kept(this->stage()));
    uint32_t p[2][4];
    ptx::ldmatrix_x4_trans(p[0], address);
#pragma unroll
    for (int band = 0; band < kBands; band++) {
      if (band + 1 < kBands) ptx::ldmatrix_x4_trans(p[(band + 1) % 2], address + (band + 1) * kBandRows * 128);
      uint32_t ds[1][4];
      score_gradients<T, kMasked>(
          reinterpret_cast<float (&)[8]>(acc_dp[8 * band]), ds, delta[band % 2], entries,
          [&](int i) { return unpack2<T>(p[band % 2][i / 2]); }, 8 * band);
      if (band + 2 < kBands) delta[band % 2].template load<1>(stats + (band + 2) * kStatsBytes);
      ptx::stmatrix_x4_trans(address + band * kBandRows * 128, ds[0]);
    }
    hand_over();
    issue_gradients_from_shared<T, kBlockM>(acc_dk, ptx::Descriptor::of(smem.slot(this->slot())),
                                            ptx::Descriptor::of(smem.q(this->stage()), Traits::kPanelBytes));
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_dk);
    this->release_q(index);
    release_slot();
    index++;
  }

  template <bool kMasked>
  __device__ __forceinline__ void step_from_registers(Scores& carried) {
    Scores fresh;
    Scores& acc_dp = pick<Traits::kAhead>(carried, fresh);
    Fragments ds;
    uint32_t p[4];  // of 16 queries at a time: registers are short
    if constexpr (!Traits::kAhead) issue_first<kMasked>(acc_dp, m_block);
    finish_first(acc_dp);
    this->wait_q();
    Stats delta;
    delta.template load<1>(smem.stats(this->stage()));
    ptx::mbarrier_wait(smem.p_full(this->slot()), this->slot_phase());
    const uint32_t address = transposed_address(smem.slot(this->slot()));
    const EntriesOf<Traits::kMayDrop> entries(args.p, smem.kept(this->stage()));
    score_gradients<T, kMasked>(acc_dp, ds, delta, entries, [&](int i) {
      if (i % 8 == 0) ptx::ldmatrix_x4_trans(p, address + i / 8 * 16 * 128);
      return unpack2<T>(p[i / 2 % 4]);
    });
    issue_gradients<T>(acc_dk, ds, ptx::Descriptor::of(smem.q(this->stage()), Traits::kPanelBytes));
    store_transposed(smem.slot(this->slot()), ds);
    hand_over();
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
    ptx::wgmma_wait_group<Traits::kAhead ? DoutRing::kParts : 0>();
    ptx::pin(acc_dk);
    ptx::pin(ds);
    this->release_q(index - 1);
  }

  __device__ __forceinline__ void skip(Scores& carried) {
    if constexpr (Traits::kAhead) ptx::wgmma_wait_group<0>();
    this->release_keys(keys_empty());
    ptx::mbarrier_wait(smem.p_full(this->slot()), this->slot_phase());
    hand_over();
    release_slot();
    this->skip_dout();
    this->wait_q();
    this->release_q(index);
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
  }
};

}  // namespace flash::sm90
