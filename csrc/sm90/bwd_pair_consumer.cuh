// Warpgroups 0 and 1 of a thread block of a pair share its 64 keys by product:
//   warpgroup 0   S, P, dV   and hands P to warpgroup 1 through a slot in shared memory
//   warpgroup 1   dP, dS, dK and puts dS into the slot in place of P
// Where registers allow it (kAhead) each issues the first product of the next step behind the last one of this step, so
// that the tensor cores do not idle in between; behind the last step that is a product of stale tiles that nobody
// reads. Warp w of both works on the same 16 keys, so the slot passes from warp to warp without conflicts: what a warp
// of warpgroup 1 overwrites, only it has read.
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

  const BwdArgs& args;
  const BwdBlock& block;
  const BwdPairSmem<Traits> smem;
  const int rank;
  int index = 0, m_block, head = 0;  // of the step

  __device__ __forceinline__ PairWarpgroup(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                           int rank)
      : args(args), block(block), smem(smem), rank(rank), m_block(block.steps.begin) {}

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
  __device__ __forceinline__ void wait_dout() {
    ptx::mbarrier_wait(smem.dout_full(stage()), phase_of<Traits::kStages>(index));
  }

  // Queries beyond the segment: both warpgroups write the zeros, so that neither has to wait for the other.
  __device__ __forceinline__ void clear_foreign_queries(int barrier, int m_block) {
    if (m_block != block.foreign_m) return;
    wait_q();
    wait_dout();
    const int rows = block.seq.seqlen_q - m_block * kBlockM;
    zero_rows<128>(smem.q(stage()), Traits::kPanels, kBlockM, rows, threadIdx.x % 128);
    zero_rows<128>(smem.dout(stage()), Traits::kPanelsV, kBlockM, rows, threadIdx.x % 128);
    ptx::bar_sync(barrier, 128);
  }
  // With index already that of the next step: its tile of queries; -2 behind the last step, which is no tile to clear.
  __device__ __forceinline__ int next_m() const {
    if (index >= block.steps.total()) return -2;
    return m_block + 1 == block.steps.end() ? block.steps.begin : m_block + 1;
  }
  __device__ __forceinline__ BwdSteps::Step here() const { return {m_block, head}; }
};

template <class Traits>
struct ValueWarpgroup : PairWarpgroup<Traits> {
  using Base = PairWarpgroup<Traits>;
  using Base::args, Base::block, Base::smem, Base::rank, Base::index, Base::m_block, Base::kBlockM;
  using typename Base::Fragments, typename Base::Scores, typename Base::T;

  float acc_dv[Traits::kHeadDimV / 2];  // 64 x kHeadDimV

  __device__ __forceinline__ ValueWarpgroup(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                            int rank)
      : Base(args, block, smem, rank) {
#pragma unroll
    for (int i = 0; i < Traits::kHeadDimV / 2; i++) acc_dv[i] = 0.f;
  }

  // P, in general variants times d score / d S and negative where dropped, goes to warpgroup 1.
  __device__ __forceinline__ void wait_slot() {
    ptx::mbarrier_wait_cluster(smem.slot_empty(this->slot()), this->slot_phase() ^ 1);
  }
  __device__ __forceinline__ void hand_over() {
    ptx::fence_proxy_async();  // of hidden tiles warpgroup 1 leaves the zeros as they are
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.p_full(this->slot()));
  }

  __device__ __forceinline__ void make_general_p(Scores& acc_s, Fragments& p, uint32_t stats, int first_query) {
    const GeneralScores general{args.p, block.band, block.batch, block.head_kv * block.steps.group + this->head};
    const uint32_t visible = general.visible_entries<kBlockM>(this->key(), first_query);
    const uint32_t kept = general.kept_entries<kBlockM>(this->key(), first_query);
    const uint32_t address = transposed_address(smem.slot(this->slot()));
    uint32_t factor[4];
#pragma unroll
    for (int g = 0; g < kBlockM / 8; g++) {
      uint32_t packed[2];
      general.exponentials<T>(acc_s, packed, g, stats, this->key(), first_query, visible, kept);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        p[g / 2][g % 2 * 2 + r] = packed[r];
        factor[g % 2 * 2 + r] = pack2<T>(acc_s[4 * g + 2 * r], acc_s[4 * g + 2 * r + 1]);
      }
      if (g % 2 == 1) ptx::stmatrix_x4_trans(address + g / 2 * 16 * 128, factor);
    }
  }

  // S of step `index`, on tile `m`
  __device__ __forceinline__ void issue_first(Scores& acc_s, int m) {
    this->clear_foreign_queries(1, m);
    if (index < block.steps.total()) this->wait_q();
    issue_scores<T, Traits::kHeadDim, Traits::kKeys>(acc_s, ptx::Descriptor::of(smem.k()),
                                                     ptx::Descriptor::of(smem.q(this->stage())));
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(Scores& carried) {
    Scores fresh;
    Scores& acc_s = pick<Traits::kAhead>(carried, fresh);
    Fragments p;
    if constexpr (!Traits::kAhead) issue_first(acc_s, m_block);
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_s);
    const uint32_t stats = smem.stats(this->stage());
    const int first_query = m_block * kBlockM + threadIdx.x % 4 * 2;
    if constexpr (Traits::kGeneral) {
      wait_slot();
      make_general_p(acc_s, p, stats, first_query);
    } else {
      exponentials(acc_s, stats, args.p.softmax_scale * kLog2e);
      if constexpr (kMasked) hide(acc_s, VisibleQueries::of(block.band, this->key(), first_query));
      pack_fragments<T>(acc_s, p);
      wait_slot();
      store_transposed(smem.slot(this->slot()), p);
    }
    hand_over();
    release_q<Traits>(args, block, smem, index, this->here());
    this->wait_dout();
    issue_gradients<T>(acc_dv, p, ptx::Descriptor::of(smem.dout(this->stage()), Traits::kPanelBytes));
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
    ptx::wgmma_wait_group<Traits::kAhead ? 1 : 0>();
    ptx::pin(acc_dv);
    ptx::pin(p);
    release_dout<Traits>(args, block, smem, index - 1, this->here());
  }

  __device__ __forceinline__ void skip(Scores& carried) {
    if constexpr (Traits::kAhead) ptx::wgmma_wait_group<0>();
    const Fragments zeros = {};
    wait_slot();
    store_transposed(smem.slot(this->slot()), zeros);
    hand_over();
    this->wait_q();
    release_q<Traits>(args, block, smem, index, this->here());
    this->wait_dout();
    release_dout<Traits>(args, block, smem, index, this->here());
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
  }
};

template <class Traits>
struct KeyWarpgroup : PairWarpgroup<Traits> {
  using Base = PairWarpgroup<Traits>;
  using Base::args, Base::block, Base::smem, Base::rank, Base::index, Base::m_block, Base::kBlockM;
  using typename Base::Fragments, typename Base::Scores, typename Base::T;

  float acc_dk[Traits::kHeadDim / 2];  // 64 x kHeadDim

  __device__ __forceinline__ KeyWarpgroup(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                          int rank)
      : Base(args, block, smem, rank) {
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; i++) acc_dk[i] = 0.f;
  }

  // The slot holds dS: to the dQ warpgroups of both blocks. The other block's copy of the slot is free when this one
  // is.
  __device__ __forceinline__ void hand_over() {
    const int slot = this->slot();
    const uint32_t bar = smem.ds_full(slot), phase = this->slot_phase();
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && ptx::mbarrier_arrive_is_last(bar)) {
      ptx::mbarrier_wait(bar, phase);  // passes at once; orders the other warps' stores before the copy
      ptx::bulk_copy_to_cluster(ptx::mapa(smem.peer_ds(slot), rank ^ 1), smem.slot(slot),
                                ptx::mapa(smem.peer_full(slot), rank ^ 1), Traits::kPanelBytes);
    }
  }

  // dP of step `index`, on tile `m`
  __device__ __forceinline__ void issue_first(Scores& acc_dp, int m) {
    this->clear_foreign_queries(2, m);
    if (index < block.steps.total()) this->wait_dout();
    issue_scores<T, Traits::kHeadDimV, Traits::kKeys>(acc_dp, ptx::Descriptor::of(smem.v()),
                                                      ptx::Descriptor::of(smem.dout(this->stage())));
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(Scores& carried) {
    Scores fresh;
    Scores& acc_dp = pick<Traits::kAhead>(carried, fresh);
    Fragments ds;
    uint32_t p[4];  // of 16 queries at a time: registers are short
    if constexpr (!Traits::kAhead) issue_first(acc_dp, m_block);
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_dp);
    release_dout<Traits>(args, block, smem, index, this->here());
    this->wait_q();
    ptx::mbarrier_wait(smem.p_full(this->slot()), this->slot_phase());
    const uint32_t address = transposed_address(smem.slot(this->slot()));
    const float dropout_scale = Traits::kGeneral ? 1.f / (1.f - args.p.dropout_p) : 1.f;
    score_gradients<T, Traits::kGeneral, kMasked>(acc_dp, ds, smem.stats(this->stage()), dropout_scale, [&](int i) {
      if (i % 8 == 0) ptx::ldmatrix_x4_trans(p, address + i / 8 * 16 * 128);
      return unpack2(p[i / 2 % 4], T());
    });
    issue_gradients<T>(acc_dk, ds, ptx::Descriptor::of(smem.q(this->stage()), Traits::kPanelBytes));
    store_transposed(smem.slot(this->slot()), ds);
    hand_over();
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
    ptx::wgmma_wait_group<Traits::kAhead ? 1 : 0>();
    ptx::pin(acc_dk);
    ptx::pin(ds);
    release_q<Traits>(args, block, smem, index - 1, this->here());
  }

  __device__ __forceinline__ void skip(Scores& carried) {
    if constexpr (Traits::kAhead) ptx::wgmma_wait_group<0>();
    ptx::mbarrier_wait(smem.p_full(this->slot()), this->slot_phase());
    hand_over();
    this->wait_dout();
    release_dout<Traits>(args, block, smem, index, this->here());
    this->wait_q();
    release_q<Traits>(args, block, smem, index, this->here());
    index++;
    if constexpr (Traits::kAhead) issue_first(carried, this->next_m());
  }
};

// The steps of one head up to tile `end`; `warpgroup` has skip() and step<kMasked>(), which count its index.
enum class Visit { kSkip, kMasked, kFull };

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
    if constexpr (!Warpgroup::kGeneral) {  // whose every step masks
      walk<Visit::kMasked>(warpgroup, carried, mine.full_begin);
      walk<Visit::kFull>(warpgroup, carried, mine.full_end);
    }
    walk<Visit::kMasked>(warpgroup, carried, mine.end);
    walk<Visit::kSkip>(warpgroup, carried, end);
  }
  if constexpr (Warpgroup::kAhead) ptx::wgmma_wait_group<0>();
}

}  // namespace flash::sm90
