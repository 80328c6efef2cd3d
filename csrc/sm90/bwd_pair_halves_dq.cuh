// The dQ warpgroup of a pair without registers for two steps: dQ in two halves of this block's columns, the additions
// of one beside the product of the other. In turn, the tensor cores would wait for the queue of additions, and the
// queue for them.
#pragma once

#include "bwd_pair_dq.cuh"

namespace flash::sm90 {

// All steps of a tile of keys. kExact: exact sums in floats.
template <class Traits, bool kExact>
struct HalvesDq {
  static_assert(Traits::kHalfIsPanels && Traits::kHalfPanels == 2, "a half is a panel");
  static constexpr int kBandsOfStep = Traits::kBlockM / kBandRows;
  static constexpr int kCount = Traits::kHalf / 4, kGroups = kCount / 4;  // a thread's numbers; of eight columns each
  static constexpr int kEarly = kGroups / 2;                              // added before the next wait

  const BwdArgs& args;
  const BwdBlock& block;
  const BwdPairSmem<Traits> smem;
  const int rank;
  int& index;  // of the step, counted over all tiles of keys
  BwdSteps::Step step;

  const int groups = args.p.head_dim / 8 - rank * (Traits::kHalf / 8);  // that exist of this block's columns
  const int bands = ceil_div(block.seq.seqlen_q, kBandRows);

  // Of a step.
  struct Band {
    DqBand dq;
    bool exists;
  };

  __device__ __forceinline__ Band band() const {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);  // so that ptxas knows it to be uniform
    const int my_band = step.m_block * kBandsOfStep + warp, head = block.head_kv * block.steps.group + step.head;
    const bool exists = my_band < bands;
    DqBand dq = DqBand::of(args, head * args.bands + block.band0 + (exists ? my_band : 0));
    dq.dst += rank * (Traits::kHalf / 8) * 128;
    return {dq, exists};
  }

  // Groups [kFirst, kEnd) of half `kHalf`.
  template <int kHalf, int kFirst, int kEnd>
  __device__ __forceinline__ void add(float (&acc)[kCount], const Band& band) const {
    using Part = float (&)[4 * (kEnd - kFirst)];
    constexpr int kGroup = kHalf * kGroups + kFirst;
    if (!band.exists) return;
    Part part = reinterpret_cast<Part>(acc[4 * kFirst]);
    band.dq.template add_floats<kExact>(band.dq.dst + kGroup * 128, part, groups - kGroup);
  }

  __device__ __forceinline__ void run() {
    constexpr int kPanel = Traits::kPanelBytes;
    const int end = index + block.steps.total();
    const uint32_t own_k = smem.k() + rank * Traits::kHalfPanels * kPanel, peer_k = smem.peer_k();
    float first[kCount] = {}, second[kCount] = {};  // undefined, they would count as live all through the kernel
    Band last{{nullptr, 1.f, 1.f}, false};
#pragma unroll 1
    for (; index < end; index++, step = block.steps.ahead(step, 1)) {
      const int slot = index % Traits::kDsStages;
      const uint32_t phase = phase_of<Traits::kDsStages>(index), ds = smem.slot(slot), peer_ds = smem.peer_ds(slot);
      const Band now = band();
      ptx::mbarrier_wait(smem.ds_full(slot), phase);
      ptx::pin(first);
      issue_half_dq<Traits>(first, ds, own_k, false);
      add<1, 0, kEarly>(second, last);
      wait_for_peer_ds(smem, slot, phase);
      issue_half_dq<Traits>(first, peer_ds, peer_k, true);
      add<1, kEarly, kGroups>(second, last);
      ptx::pin(second);
      issue_half_dq<Traits>(second, ds, own_k + kPanel, false);
      issue_half_dq<Traits>(second, peer_ds, peer_k + kPanel, true);
      ptx::wgmma_wait_group<2>();
      ptx::pin(first);
      add<0, 0, kEarly>(first, now);
      ptx::wgmma_wait_group<0>();
      ptx::pin(second);
      release_ds(smem, slot, rank);
      add<0, kEarly, kGroups>(first, now);
      last = now;
    }
    add<1, 0, kGroups>(second, last);
  }
};

}  // namespace flash::sm90
