// A warp that loads bias for one consumer warpgroup: the 64 x 64 numbers of each block that the warpgroup visits.
// Warpgroups pass over different blocks and run out of step, so one warp for all of them would make them wait for each
// other.
#pragma once

#include "../ptx/tma.cuh"
#include "fwd_traits.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdBiasProducer {
 public:
  __device__ __forceinline__ FwdBiasProducer(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : args(a), smem(s), warpgroup(w), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (lane == 0) ptx::prefetch_tensormap(&args.map_bias);
    while (true) {
      ptx::mbarrier_wait(smem.tile_full(slot.stage), slot.parity);
      const auto& work = smem.work(slot.stage);
      const Tile tile = work.tile;
      const BlockRange blocks = work.of_warpgroup[warpgroup];
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(smem.tile_empty(slot.stage));
      slot.template advance<FwdSmem<Traits>::kTileSlots>();
      if (!tile.valid()) return;
      for (int n_block = blocks.end - 1; n_block >= blocks.begin; n_block--) load(tile, n_block);
    }
  }

 private:
  const FwdArgs& args;
  const FwdSmem<Traits> smem;
  const int warpgroup, lane;
  RingState bias{1}, slot{0};

  __device__ __forceinline__ void load(const Tile& tile, int n_block) {
    const uint32_t full = smem.bias_full(bias.stage, warpgroup);
    const int row = tile.m_block * Traits::kBlockM + 64 * warpgroup;
    ptx::mbarrier_wait(smem.bias_empty(bias.stage, warpgroup), bias.parity);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, FwdSmem<Traits>::kBiasBytes);
      ptx::tma_load(smem.bias(bias.stage, warpgroup), &args.map_bias, full, n_block * Traits::kBlockN, row,
                    tile.head * args.bias_head_step, tile.batch * args.bias_batch_step);
    }
    bias.template advance<FwdSmem<Traits>::kBiasStages>();
  }
};

}  // namespace flash::sm90
