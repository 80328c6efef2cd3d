// One block of keys of a consumer warpgroup: S = Q K^T, P = softmax(S), O += P V, with S, P and O in registers.
#pragma once

#include "../ptx/wgmma.cuh"
#include "fwd_consumer_pipeline.cuh"
#include "fwd_epilogue.cuh"
#include "fwd_general.cuh"
#include "fwd_softmax.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdBlock : protected FwdConsumerPipeline<Traits> {
 protected:
  using Pipeline = FwdConsumerPipeline<Traits>;
  using Pipeline::args, Pipeline::smem, Pipeline::warpgroup, Pipeline::q, Pipeline::k, Pipeline::v, Pipeline::slot;
  using Pipeline::arrive, Pipeline::release_k, Pipeline::release_v, Pipeline::begin_turn, Pipeline::end_turn;
  using Pipeline::tile, Pipeline::band, Pipeline::place;

  static constexpr FwdTile kTile = Traits::kTile;
  static constexpr int kBlockN = Traits::kBlockN, kGroups = kBlockN / 16;
  // Whether a step without a mask leaves what the call's option does to the exponentials.
  static constexpr bool kDirect = Traits::kGeneral && Traits::kOption != Option::kAny;
  // Blocks without a mask have a loop of their own: jumps over the masked step would cost a few percent.
  static constexpr bool kFullLoop = !Traits::kGeneral || kDirect;

  const ptx::Descriptor desc_q, desc_k, desc_v;
  BlockRange blocks;                   // of this warpgroup, inside those of the tile
  float acc_s[kBlockN / 2];            // (64, block_n)
  float acc_o[Traits::kHeadDimV / 2];  // (64, head_dim_v)
  uint32_t p[kGroups][4];              // (64, block_n) in 16 bit
  FwdSoftmax<Traits> softmax;
  FwdGeneral<Traits> general;

  __device__ __forceinline__ FwdBlock(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : Pipeline(a, s, w),
        desc_q(ptx::Descriptor::of(s.q(0, w))),
        desc_k(ptx::Descriptor::of(s.k(0))),
        desc_v(ptx::Descriptor::of(s.v(0), kBlockN * 128)),
        general(a, s, w) {
    softmax.scale = a.scale_log2;
  }

  // Added to acc_s if kAdd.
  template <bool kAdd = false>
  __device__ __forceinline__ void issue_qk() {
    const ptx::Descriptor a = (desc_q + q.stage * Traits::kWarpgroups * Traits::kQBytes).opaque();
    const ptx::Descriptor b = (desc_k + k.stage * Traits::kKBytes).opaque();
    ptx::pin(acc_s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 16; i++)
      ptx::wgmma_ss<typename Traits::Element>(acc_s, a + ptx::k_major_step(i, 64), b + ptx::k_major_step(i, kBlockN),
                                              kAdd || i != 0);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_pv(bool first) {
    const ptx::Descriptor b = (desc_v + v.stage * Traits::kVBytes).opaque();
    ptx::pin(acc_o);
    ptx::pin(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGroups; i++)
      ptx::wgmma_rs<typename Traits::Element>(acc_o, p[i], b + ptx::mn_major_step(i), i != 0 || !first);
    ptx::wgmma_commit_group();
  }

  // P V is complete when at most kPending younger products are not.
  template <int kPending>
  __device__ __forceinline__ void finish_pv(bool release = true) {
    ptx::wgmma_wait_group<kPending>();
    ptx::pin(acc_o);
    ptx::pin(p);
    if (release) release_v();
  }

  // Q K^T of block n_block is complete: of the tile's last block, Q is free as well.
  __device__ __forceinline__ void release_k_and_q(int n_block) {
    release_k();
    if (n_block == blocks.begin) arrive(smem.q_empty(q.stage, warpgroup));
  }

  // Q K^T -> what enters the softmax.
  template <bool kMasked>
  __device__ __forceinline__ void prepare_scores(int n_block) {
    if constexpr (Traits::kGeneral) general.modify(acc_s, tile(), n_block);
    if constexpr (kMasked) {
      if (blocks.needs_mask(n_block)) mask_block<Traits>(acc_s, band(), place(tile()), n_block, blocks);
    }
  }

  __device__ __forceinline__ void drop(int n_block) {
    if constexpr (Traits::kGeneral) general.drop(p, tile(), n_block);
  }

  __device__ __forceinline__ void begin_tile() {
    if constexpr (Traits::kGeneral) general.open(tile());
  }

  // P of the tile's first block.
  __device__ __forceinline__ void first_softmax(int n_block) {
    if constexpr (Traits::kGeneral) general.under_products();
    prepare_scores<true>(n_block);
    softmax.first(acc_s, args, p);
    drop(n_block);
    if constexpr (Traits::kGeneral) general.release();
    if constexpr (kTile.order == Order::kJoint) wait_v(v);
  }

  __device__ __forceinline__ void wait_v(const RingState& at) const {
    ptx::mbarrier_wait(smem.v_full(at.stage), at.parity);
  }

  __device__ __forceinline__ void store_tile(const Tile& t) {
    sm90::store_tile<Traits>(acc_o, softmax, args, t, place(t));
  }

  // S and P of block n_block, while P of the block before it, still in p, is multiplied with its V. Order::kJoint: that
  // V is there already, and that of block n_block is waited for under the products.
  template <bool kMasked>
  __device__ __forceinline__ void step(int n_block, bool first_pv) {
    if constexpr (kTile.order == Order::kOverlap) {
      ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
      ptx::mbarrier_wait(smem.v_full(v.stage), v.parity);
      begin_turn();
      issue_qk();
      issue_pv(first_pv);
      end_turn();
      if constexpr (Traits::kGeneral) general.under_products();
      ptx::wgmma_wait_group<1>();
      ptx::pin(acc_s);
      release_k_and_q(n_block);
      softmax_of_block<kMasked, kTile.early>(n_block, [&] { finish_pv<0>(); });
    } else {
      static_assert(!kTile.pingpong);
      issue_pv(first_pv);
      ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
      constexpr bool kBiasFirst = !kMasked && FwdGeneral<Traits>::kBiasFirst;
      if constexpr (kBiasFirst) general.bias.start(acc_s);
      issue_qk<kBiasFirst>();
      wait_v(v.template next<Pipeline::kStages>());
      if constexpr (Traits::kGeneral) general.under_products();
      finish_pv<1>();
      ptx::wgmma_wait_group<0>();
      ptx::pin(acc_s);
      release_k_and_q(n_block);
      softmax_of_block<kMasked, 0>(n_block, [] {});
    }
  }

  // Masks have a step of their own, which takes the maximum, but where all options share one.
  template <bool kMasked, int kEarly, class Wait>
  __device__ __forceinline__ void softmax_of_block(int n_block, Wait wait_pv) {
    if constexpr (kDirect && !kMasked) {
      direct_softmax(n_block, wait_pv);
    } else {
      prepare_scores<kMasked>(n_block);
      exponentials<!kMasked || (Traits::kGeneral && !kDirect), kEarly>(wait_pv);
      drop(n_block);
    }
    if constexpr (Traits::kGeneral) general.release();
  }

  // P of a block without a mask, from Q K^T where that goes, else with its maximum.
  template <class Wait>
  __device__ __forceinline__ void direct_softmax(int n_block, Wait wait_pv) {
    const bool direct = softmax.optimistic() && general.is_direct(n_block);
    wait_pv();
    if (direct && general.exponentials(acc_s, p, softmax, n_block)) return;
    ptx::pin(acc_s);  // nothing that the exponentials computed is kept for what follows
    if constexpr (FwdGeneral<Traits>::kBiasFirst) {
      general.bias.finish(acc_s);
    } else {
      general.modify(acc_s, tile(), n_block);
    }
    softmax.raise(acc_s, args, [&](const float (&correction)[2]) { softmax.correct(acc_o, correction); });
    softmax.exact(acc_s, p);
    if (general.is_peak(n_block)) softmax.expect_calm();
    drop(n_block);
  }

  // P of a block. Before the wait for P V, which still reads p: the first groups of P, into registers of their own, or
  // the maximum where it is needed. The vote on the groups' sums is also what keeps the compiler from moving the wait
  // in front of them.
  template <bool kOptimistic, int kEarly, class Wait>
  __device__ __forceinline__ void exponentials(Wait wait_pv) {
    // Warpgroups out of step lose one percent by it.
    constexpr bool kUnderProduct = kTile.order == Order::kOverlap && kTile.pingpong;
    uint32_t early[kEarly > 0 ? kEarly : 1][4];
    float block_sum[2] = {};
    Rise rise{};
    bool optimistic = kOptimistic && softmax.optimistic(), raised = false;
    if (kEarly > 0 && optimistic) {
      softmax.template exponentials<0, kEarly>(acc_s, early, block_sum);
      optimistic = !softmax.too_large(block_sum);
    }
    if (kUnderProduct && !optimistic) {
      softmax.raise(acc_s, args, [&](const float (&correction)[2]) { rise = {{correction[0], correction[1]}, true}; });
      raised = true;
    }
    wait_pv();
    if (optimistic) {
      softmax.template exponentials<kEarly, kGroups>(acc_s, p, block_sum);
      if (!softmax.too_large(block_sum)) {
        softmax.add(block_sum);
#pragma unroll
        for (int i = 0; i < kEarly * 4; i++) p[i / 4][i % 4] = early[i / 4][i % 4];
        return;
      }
    }
    if (!raised) {
      softmax.raise(acc_s, args, [&](const float (&correction)[2]) { softmax.correct(acc_o, correction); });
    } else if (rise.rises) {
      softmax.correct(acc_o, rise.correction);
    }
    softmax.exact(acc_s, p);
  }
};

}  // namespace flash::sm90
