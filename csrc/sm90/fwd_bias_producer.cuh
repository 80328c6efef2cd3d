// A warp that loads bias: the 64 x 64 numbers of each block that a consumer warpgroup visits. Warpgroups pass over
// different blocks and run out of step, so each has buffers of its own, and as far as there are warps, a warp.
#pragma once

#include "../ptx/tma.cuh"
#include "fwd_traits.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdBiasProducer {
 public:
  // For warpgroups warp, warp + kBiasWarps, ...
  __device__ __forceinline__ FwdBiasProducer(const FwdArgs& a, const FwdSmem<Traits>& s, int warp)
      : args(a), smem(s), first_warpgroup(warp), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (lane == 0) ptx::prefetch_tensormap(&args.map_bias);
    while (true) {
      ptx::mbarrier_wait(smem.tile_full(slot.stage), slot.parity);
      const auto& work = smem.work(slot.stage);
      const Tile tile = work.tile;
      const BlockRange loaded = work.blocks;
      BlockRange blocks[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; i++) blocks[i] = exists(i) ? work.of_warpgroup[warpgroup(i)] : BlockRange{0, 0, 0, 0};
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(smem.tile_empty(slot.stage));
      slot.template advance<FwdSmem<Traits>::kTileSlots>();
      if (!tile.valid()) return;
      for (int n_block = loaded.end - 1; n_block >= loaded.begin; n_block--) {
#pragma unroll
        for (int i = 0; i < kOwn; i++)
          if (n_block >= blocks[i].begin && n_block < blocks[i].end)
            load(tile, n_block, kPrefetch && n_block - blocks[i].begin >= kAhead, warpgroup(i), bias[i]);
      }
    }
  }

 private:
  // With one buffer, blocks are brought to the L2 cache before they have it: bias of every head is read at the rate of
  // global memory. With more of them and shorter blocks, that costs more than it gives.
  static constexpr bool kPrefetch = FwdSmem<Traits>::kBiasStages == 1;
  static constexpr int kAhead = 4;
  static constexpr int kWarps = FwdSmem<Traits>::kBiasWarps, kOwn = ceil_div(Traits::kWarpgroups, kWarps);

  const FwdArgs& args;
  const FwdSmem<Traits> smem;
  const int first_warpgroup, lane;
  RingState bias[2] = {RingState(1), RingState(1)}, slot{0};
  static_assert(kOwn <= 2);

  __device__ __forceinline__ int warpgroup(int i) const { return first_warpgroup + i * kWarps; }
  __device__ __forceinline__ bool exists(int i) const { return warpgroup(i) < Traits::kWarpgroups; }

  __device__ __forceinline__ void load(const Tile& tile, int n_block, bool prefetch, int warpgroup, RingState& ring) {
    const uint32_t full = smem.bias_full(ring.stage, warpgroup);
    const int row = (tile.m_block * Traits::kBlockM + 64 * warpgroup) * args.bias_row_step,
              head = tile.head * args.step_bias.head, batch = tile.batch * args.step_bias.batch;
    if (lane == 0 && prefetch)
      ptx::tma_prefetch(&args.map_bias, (n_block - kAhead) * Traits::kBlockN, row, head, batch);
    ptx::mbarrier_wait(smem.bias_empty(ring.stage, warpgroup), ring.parity);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, args.bias_row_step ? FwdSmem<Traits>::kBiasBytes : 128);
      ptx::tma_load(smem.bias(ring.stage, warpgroup), &args.map_bias, full, n_block * Traits::kBlockN, row, head,
                    batch);
    }
    ring.template advance<FwdSmem<Traits>::kBiasStages>();
  }
};

}  // namespace flash::sm90
