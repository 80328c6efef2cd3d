// Warpgroup 0 of a thread block of a pair: S, P, dV. See bwd_pair_warpgroup.cuh.
#pragma once

#include "bwd_general.cuh"
#include "bwd_pair_warpgroup.cuh"

namespace flash::sm90 {

template <class Traits>
struct ValueWarpgroup : PairWarpgroup<Traits> {
  using Base = PairWarpgroup<Traits>;
  using Base::args, Base::block, Base::smem, Base::rank, Base::index, Base::m_block, Base::kBlockM;
  using typename Base::DoutRing, typename Base::Fragments, typename Base::Scores, typename Base::Stats,
      typename Base::T;

  float acc_dv[Traits::kHeadDimV / 2];  // 64 x kHeadDimV

  __device__ __forceinline__ ValueWarpgroup(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                            int rank, int index)
      : Base(args, block, smem, rank, index) {
#pragma unroll
    for (int i = 0; i < Traits::kHeadDimV / 2; i++) acc_dv[i] = 0.f;
  }

  __device__ __forceinline__ uint32_t keys_full() const { return smem.k_full(); }
  __device__ __forceinline__ uint32_t keys_empty() const { return smem.k_empty(); }

  // Until the slot may be written.
  __device__ __forceinline__ void wait_slot() {
    if (Traits::kMayBias && args.copies_bias)  // bias has come into it
      ptx::mbarrier_wait(smem.bias_full(this->slot()), this->slot_phase());
    else
      ptx::mbarrier_wait(smem.slot_empty(this->slot()), this->slot_phase() ^ 1);
  }
  // P, in general variants times d score / d S, goes to warpgroup 1.
  __device__ __forceinline__ void hand_over() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.p_full(this->slot()));
  }

  template <bool kMasked>
  __device__ __forceinline__ void make_general_p(Scores& acc_s, Fragments& p, const Stats& lse, int first_query) {
    const uint32_t address = transposed_address(smem.slot(this->slot()));  // where bias was, P comes
    const GeneralScores<T, Traits::kOption> general(args, block, block.head_kv * block.steps.group + this->head,
                                                    this->key(), first_query, address, smem.kept(this->stage()));
    const VisibleQueries visible = VisibleQueries::of(block.band, this->key(), first_query);
#pragma unroll
    for (int c = 0; c < kBlockM / 16; c++) {
      general.template exponentials<kMasked>(acc_s + 8 * c, p[c], lse, visible, c);
      general.store_factors(acc_s + 8 * c, address + c * 16 * 128);
    }
  }

  // S of step `index`, on tile `m`
  template <bool kMayBeForeign = true>
  __device__ __forceinline__ void issue_first(Scores& acc_s, int m) {
    if constexpr (kMayBeForeign) this->clear_foreign_queries(1, m);
    if (!Traits::kAhead || index < this->end) this->wait_q();
    issue_scores<T, Traits::kHeadDim, Traits::kKeys>(acc_s, ptx::Descriptor::of(smem.k()),
                                                     ptx::Descriptor::of(smem.q(this->stage())));
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(Scores& carried) {
    Scores fresh;
    Scores& acc_s = pick<Traits::kAhead>(carried, fresh);
    Fragments p;
    Stats lse;
    if constexpr (!Traits::kAhead) issue_first<kMasked>(acc_s, m_block);
    lse.template load<0>(smem.stats(this->stage()));
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_s);
    this->release_keys(keys_empty());
    const int first_query = m_block * kBlockM + threadIdx.x % 4 * 2;
    if constexpr (Traits::kGeneral) {
      wait_slot();
      make_general_p<kMasked>(acc_s, p, lse, first_query);
    } else {
      exponentials(acc_s, lse, args.p.softmax_scale * kLog2e);
      if constexpr (kMasked) hide(acc_s, VisibleQueries::of(block.band, this->key(), first_query));
      pack_fragments<T>(acc_s, p);
      wait_slot();
      store_transposed(smem.slot(this->slot()), p);
    }
    hand_over();
    this->release_q(index);
    constexpr int kParts = DoutRing::kParts, kPart = Traits::kHeadDimV / 2 / kParts;
    using Part = float (&)[kPart];
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      this->wait_dout(part);
      issue_gradients<T>(reinterpret_cast<Part>(acc_dv[part * kPart]), p,
                         ptx::Descriptor::of(smem.dout(DoutRing::place(index, part)), Traits::kPanelBytes));
    }
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
    if constexpr (kParts == 2) {
      ptx::wgmma_wait_group<Traits::kAhead ? 2 : 1>();
      ptx::pin(reinterpret_cast<Part>(acc_dv));
      this->release_dout(index - 1, 0);
    }
    ptx::wgmma_wait_group<Traits::kAhead ? 1 : 0>();
    ptx::pin(acc_dv);
    ptx::pin(p);
    this->release_dout(index - 1, kParts - 1);
  }

  __device__ __forceinline__ void skip(Scores& carried) {
    if constexpr (Traits::kAhead) ptx::wgmma_wait_group<0>();
    this->release_keys(keys_empty());
    const Fragments zeros = {};
    wait_slot();
    store_transposed(smem.slot(this->slot()), zeros);
    ptx::fence_proxy_async();  // warpgroup 1 leaves them as they are
    hand_over();
    this->wait_q();
    this->release_q(index);
    this->skip_dout();
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
  }
};

}  // namespace flash::sm90
