// A main warpgroup: 64 keys. For every tile of queries that sees them it computes P and dS, adds to dK and dV in
// registers and hands dS to the dQ warpgroup through shared memory. Main warpgroups do not wait for each other.
#pragma once

#include "../ptx/named_barrier.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_general.cuh"
#include "bwd_loads.cuh"
#include "bwd_products.cuh"

namespace flash::sm90 {

template <class Traits>
struct MainWarpgroup {
  using T = typename Traits::T;
  static constexpr int kBlockM = Traits::kBlockM, kHeadDim = Traits::kHeadDim;
  // Whether the factor of dS waits in the dS tile, as 16 bits, until dP is there: registers are short.
  static constexpr bool kFactorInSlot = Traits::kGeneral && !Traits::kJoint && Has<Traits::kOption>::kFactorApart;

  const BwdArgs& args;
  const BwdSmem<Traits> smem;
  uint8_t* const shared;
  const int warpgroup;
  int tile = 0;       // of keys, counted in this thread block
  int index = 0;      // of the step, counted over all tiles
  int m_block, head;  // of the step
  int stage = 0;      // of its Q and dO

  using Scores = float[kBlockM / 2];            // 64 keys x kBlockM queries
  using Fragments = uint32_t[kBlockM / 16][4];  // the same in 16 bit, an A operand
  using Stats = QueryStats<kBlockM / 8>;

  float acc_dk[kHeadDim / 2], acc_dv[kHeadDim / 2];  // 64 x kHeadDim
  KeyFragments<kHeadDim> k_fragments, v_fragments;

  __device__ __forceinline__ MainWarpgroup(const BwdArgs& args, BwdSmem<Traits> smem, uint8_t* shared, int warpgroup)
      : args(args), smem(smem), shared(shared), warpgroup(warpgroup) {}

  __device__ __forceinline__ const BwdBlock& block() const { return block_of(smem, shared, tile); }
  __device__ __forceinline__ int kv_stage() const { return tile % Traits::kKvStages; }

  __device__ __forceinline__ void issue_s(Scores& acc_s) {
    const ptx::Descriptor q = ptx::Descriptor::of(smem.q(stage));
    if constexpr (Traits::kKvInRegisters)
      issue_scores<T, kHeadDim>(acc_s, k_fragments, q);
    else
      issue_scores<T, kHeadDim, Traits::kBlockN>(acc_s, ptx::Descriptor::of(smem.k(kv_stage()) + warpgroup * 8192), q);
  }
  __device__ __forceinline__ void issue_dp(Scores& acc_dp) {
    const ptx::Descriptor dout = ptx::Descriptor::of(smem.dout(stage));
    if constexpr (Traits::kKvInRegisters)
      issue_scores<T, kHeadDim>(acc_dp, v_fragments, dout);
    else
      issue_scores<T, kHeadDim, Traits::kBlockN>(acc_dp, ptx::Descriptor::of(smem.v(kv_stage()) + warpgroup * 8192),
                                                 dout);
  }
  __device__ __forceinline__ void issue_dv(Fragments& p) {
    issue_gradients<T>(acc_dv, p, ptx::Descriptor::of(smem.dout(stage), kBlockM * 128));
  }
  __device__ __forceinline__ void issue_dk(Fragments& ds) {
    issue_gradients<T>(acc_dk, ds, ptx::Descriptor::of(smem.q(stage), kBlockM * 128));
  }

  // The first of this thread's two keys, within the segment.
  __device__ __forceinline__ int key() const {
    return block().n_block * Traits::kBlockN + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ int slot() const { return index % Traits::kDsStages; }
  __device__ __forceinline__ uint32_t ds_panel() const { return smem.ds(slot()) + warpgroup * kBlockM * 128; }
  __device__ __forceinline__ void wait_slot() {
    ptx::mbarrier_wait(smem.ds_empty(slot()), phase_of<Traits::kDsStages>(index) ^ 1);
  }

  // S -> P
  template <bool kMasked>
  __device__ __forceinline__ void make_p(Scores& acc_s, Fragments& p, const Stats& lse) {
    const int first_query = m_block * kBlockM + threadIdx.x % 4 * 2;
    if constexpr (Traits::kGeneral) {
      make_general_p<kMasked>(acc_s, p, lse, first_query);
    } else {
      exponentials(acc_s, lse, args.p.softmax_scale * kLog2e);
      if constexpr (kMasked) hide(acc_s, VisibleQueries::of(block().band, key(), first_query));
      pack_fragments<T>(acc_s, p);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void make_general_p(Scores& acc_s, Fragments& p, const Stats& lse, int first_query) {
    const GeneralScores<T, Traits::kOption> general(args, block(), block().head_kv * block().steps.group + head, key(),
                                                    first_query, transposed_address(smem.bias(stage, warpgroup)),
                                                    smem.kept(stage, warpgroup));
    const VisibleQueries visible = VisibleQueries::of(block().band, key(), first_query);
    const uint32_t address = transposed_address(ds_panel());
    if constexpr (kFactorInSlot) wait_slot();
#pragma unroll
    for (int c = 0; c < kBlockM / 16; c++) {
      general.template exponentials<kMasked>(acc_s + 8 * c, p[c], lse, visible, c);
      if constexpr (kFactorInSlot) general.store_factors(acc_s + 8 * c, address + c * 16 * 128);
    }
  }

  // dP -> dS
  template <bool kMasked>
  __device__ __forceinline__ void make_ds(const Scores& acc_s, const Fragments& p, const Scores& acc_dp, Fragments& ds,
                                          const Stats& delta) {
    const EntriesOf<Traits::kMayDrop> entries(args.p, smem.kept(stage, warpgroup));
    uint32_t factors[4];  // of 16 queries
    score_gradients<T, kMasked>(acc_dp, ds, delta, entries, [&](int i) {
      if constexpr (Traits::kJoint) {
        return float2{acc_s[i], acc_s[i + 1]};
      } else if constexpr (kFactorInSlot) {
        if (i % 8 == 0) ptx::ldmatrix_x4_trans(factors, transposed_address(ds_panel()) + i / 8 * 16 * 128);
        return unpack2<T>(factors[i / 2 % 4]);
      } else {
        return unpack2<T>(p[i / 8][i / 2 % 4]);
      }
    });
  }

  // dS, or zeros where this warpgroup's keys are not seen, to the dQ warpgroup.
  __device__ __forceinline__ void hand_over_ds(const Fragments& ds) {
    const int slot = this->slot();
    ptx::mbarrier_wait(smem.ds_empty(slot), phase_of<Traits::kDsStages>(index) ^ 1);
    store_transposed(smem.ds(slot) + warpgroup * kBlockM * 128, ds);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.ds_full(slot));  // the dQ warpgroup has the proxy fence
  }

  // Queries beyond the segment in the stage's tiles: rows of the next segment, or behind the last one.
  __device__ __forceinline__ void clear_foreign_queries(int rows) {
    const int thread = threadIdx.x % 128;
    zero_rows<128>(smem.q(stage), Traits::kPanels, kBlockM, rows, thread);
    zero_rows<128>(smem.dout(stage), Traits::kPanels, kBlockM, rows, thread);
    if (warpgroup == 0)
      ptx::bar_sync(1, 128);
    else
      ptx::bar_sync(2, 128);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step() {
    Scores acc_s, acc_dp;
    Fragments p, ds;
    Stats lse, delta;
    issue_s(acc_s);
    if constexpr (Traits::kJoint) issue_dp(acc_dp);
    lse.template load<0>(smem.stats(stage));
    ptx::wgmma_wait_group<Traits::kJoint ? 1 : 0>();
    ptx::pin(acc_s);
    make_p<kMasked>(acc_s, p, lse);
    if constexpr (!Traits::kJoint) issue_dp(acc_dp);
    issue_dv(p);
    if constexpr (Traits::kDeltaEarly) delta.template load<1>(smem.stats(stage));
    ptx::wgmma_wait_group<1>();
    ptx::pin(acc_dp);
    if constexpr (!Traits::kDeltaEarly) delta.template load<1>(smem.stats(stage));
    make_ds<kMasked>(acc_s, p, acc_dp, ds, delta);
    issue_dk(ds);
    hand_over_ds(ds);
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_dv);
    ptx::pin(acc_dk);
    ptx::pin(p);
    ptx::pin(ds);
  }

  __device__ __forceinline__ void skip() {
    const Fragments ds = {};
    hand_over_ds(ds);
  }

  // The steps up to tile `end` of one head.
  template <Visit kVisit>
  __device__ __forceinline__ void walk(int end) {
#pragma unroll 1
    for (; m_block < end; m_block++, index++) {
      ptx::mbarrier_wait(smem.full(stage), phase_of<Traits::kStages>(index));
      if (kVisit != Visit::kFull && m_block == block().foreign_m)
        clear_foreign_queries(block().seq.seqlen_q - m_block * kBlockM);
      if constexpr (kVisit == Visit::kSkip)
        skip();
      else
        step<kVisit == Visit::kMasked>();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty(stage));
      if (++stage == Traits::kStages) stage = 0;
    }
  }

  // All steps of a tile of keys.
  __device__ __forceinline__ void walk_tile() {
    const BlockRange& mine = block().mine[warpgroup];
    const int begin = block().steps.begin, end = block().steps.end();
#pragma unroll 1
    for (head = 0; head < block().steps.group; head++) {
      m_block = begin;
      walk<Visit::kSkip>(min_of(mine.begin, end));
      walk<Visit::kMasked>(mine.full_begin);
      walk<Visit::kFull>(mine.full_end);
      walk<Visit::kMasked>(mine.end);
      walk<Visit::kSkip>(end);
    }
  }

  __device__ __forceinline__ void store_dk_dv() const {
    const BwdParams& p = args.p;
    const int row0 = block().n_block * Traits::kBlockN + warpgroup * 64 + threadIdx.x / 32 % 4 * 16;
    const float dv_scale = p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f;
    T* dk = static_cast<T*>(p.dk.ptr) + offset_of(p.dk, block().batch, block().seq.k0, 0, block().head_kv);
    T* dv = static_cast<T*>(p.dv.ptr) + offset_of(p.dv, block().batch, block().seq.k0, 0, block().head_kv);
    store_rows<T, kHeadDim>(dv, p.dv.row, row0, block().rows_k, p.head_dim_v, acc_dv, dv_scale);
    store_rows<T, kHeadDim>(dk, p.dk.row, row0, block().rows_k, p.head_dim, acc_dk, p.softmax_scale);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; tile++) {
      if (wait_for_tile(smem, shared, tile).empty) break;
      ptx::mbarrier_wait(smem.kv_full(kv_stage()), phase_of<Traits::kKvStages>(tile));
      if constexpr (Traits::kKvInRegisters) {
        k_fragments.template load<Traits::kBlockN>(smem.k(kv_stage()), 64 * warpgroup);
        v_fragments.template load<Traits::kBlockN>(smem.v(kv_stage()), 64 * warpgroup);
      }
#pragma unroll
      for (int c = 0; c < kHeadDim / 2; c++) acc_dk[c] = acc_dv[c] = 0.f;
      walk_tile();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.kv_empty(kv_stage()));
      store_dk_dv();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tile_empty(tile));
    }
  }
};

}  // namespace flash::sm90
