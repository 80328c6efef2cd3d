// The dQ warpgroup of a pair with registers for two steps: the additions of one are issued beside the products of the
// next. In turn, the tensor cores would wait for the queue of additions, and the queue for them.
#pragma once

#include "bwd_pair_dq.cuh"

namespace flash::sm90 {

// All steps of a tile of keys. kExact: exact sums in floats; integers would take more registers than there are.
template <class Traits, bool kExact>
struct DeferredDq {
  static constexpr int kBandsOfStep = Traits::kBlockM / kBandRows;
  static constexpr int kCount = Traits::kHalf / 2, kGroups = kCount / 4;  // a thread's numbers; of eight columns each
  static constexpr int kEarly = kGroups / 2;  // added before the other block's dS is multiplied

  const BwdArgs& args;
  const BwdBlock& block;
  const BwdPairSmem<Traits> smem;
  const int rank;
  int& index;  // of the step, counted over all tiles of keys
  BwdSteps::Step step;

  const int groups = args.p.head_dim / 8 - rank * (Traits::kHalf / 8);  // that exist of this block's columns
  const int bands = ceil_div(block.seq.seqlen_q, kBandRows);

  struct Sum {
    float acc[kCount];  // 16 rows x kHalf of this warp
    DqBand dq;          // from this block's columns on
    bool exists;        // the band
  };

  // The product over this block's keys.
  __device__ __forceinline__ void start(Sum& sum) {
    static_assert(!Traits::kHalfIsPanels, "own_k has nothing in it");
    const int slot = index % Traits::kDsStages;
    const uint32_t phase = phase_of<Traits::kDsStages>(index);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);  // so that ptxas knows it to be uniform
    const int my_band = step.m_block * kBandsOfStep + warp, head = block.head_kv * block.steps.group + step.head;
    sum.exists = my_band < bands;
    const int64_t band = head * args.bands + block.band0 + (kExact ? min_of(my_band, bands - 1) : my_band);
    const DqBand dq = DqBand::of(args, band);
    sum.dq = {dq.dst + rank * (Traits::kHalf / 8) * 128, kExact ? dq.scale0 : 1.f, kExact ? dq.scale1 : 1.f};
    ptx::mbarrier_wait(smem.ds_full(slot), phase);
    ptx::pin(sum.acc);
    issue_half_dq<Traits>(sum.acc, smem.slot(slot), smem.own_k(), false);
  }

  // Over the keys of the other block, whose dS comes later.
  __device__ __forceinline__ void start_peer(Sum& sum) {
    const int slot = index % Traits::kDsStages;
    const uint32_t phase = phase_of<Traits::kDsStages>(index);
    wait_for_peer_ds(smem, slot, phase);
    issue_half_dq<Traits>(sum.acc, smem.peer_ds(slot), smem.peer_k(), true);
  }

  __device__ __forceinline__ void finish(Sum& sum) {
    ptx::wgmma_wait_group<0>();
    ptx::pin(sum.acc);
    release_ds(smem, index % Traits::kDsStages, rank);
    index++;
    step = block.steps.ahead(step, 1);
  }

  // Groups [kFirst, kEnd).
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void add(Sum& sum) const {
    using Part = float (&)[4 * (kEnd - kFirst)];
    Part part = reinterpret_cast<Part>(sum.acc[4 * kFirst]);
    if (sum.exists) sum.dq.template add_floats<kExact>(sum.dq.dst + kFirst * 128, part, groups - kFirst);
  }

  __device__ __forceinline__ void next(Sum& sum, Sum& before) {
    start(sum);
    add<0, kEarly>(before);
    start_peer(sum);
    finish(sum);
    add<kEarly, kGroups>(before);
  }

  __device__ __forceinline__ void run() {
    if (block.steps.total() == 0) return;
    const int end = index + block.steps.total();
    Sum a, b;
    start(a);
    start_peer(a);
    finish(a);
#pragma unroll 1
    while (index + 1 < end) {
      next(b, a);
      next(a, b);
    }
    if (index < end) {
      next(b, a);
      add<0, kGroups>(b);
    } else {
      add<0, kGroups>(a);
    }
  }
};

}  // namespace flash::sm90
