// The producer warpgroup of each thread block of a pair: one warp claims tiles of keys, says to the others what they
// are, and copies Q of their steps; one copies dO, one K, V and bias. All run ahead across tiles as far as there is
// room.
#pragma once

#include "../ptx/cluster.cuh"
#include "../ptx/griddep.cuh"
#include "bwd_helper.cuh"
#include "bwd_loader.cuh"
#include "bwd_pair_loads.cuh"

namespace flash::sm90 {

// What the helper of a thread block works with.
template <class Traits>
struct PairHelperPlace {
  static constexpr int kParts = 1, part = 0;
  const BwdPairSmem<Traits> smem;
  const int half, bits_half;  // of the pair's keys

  __device__ int first_key(const BwdBlock& block, int of) const {
    return block.n_block * Traits::kTile.block_n + of * Traits::kKeys;
  }
  __device__ uint32_t kept(int stage) const { return smem.kept(stage); }
  __device__ uint32_t full(int stage) const { return smem.q_full(stage); }
  __device__ uint32_t empty(int stage) const { return smem.q_empty(stage); }
  __device__ uint32_t ds(int slot) const { return smem.slot(slot); }
  __device__ uint32_t ds_full(int slot) const { return smem.ds_full(slot); }
  __device__ uint32_t ds_empty(int slot) const { return smem.slot_empty(slot); }
};

template <class Traits>
struct PairLoader {
  using Smem = BwdPairSmem<Traits>;
  using DoutRing = typename Traits::DoutRing;

  const BwdArgs& args;
  const Smem smem;
  uint8_t* const shared;
  const int rank;

  // Block 0 of the pair claims, and tells block 1. `count`: claims so far.
  __device__ __forceinline__ int claim(int last, int& count) const {
    const int pairs = gridDim.x / 2;
    if (args.counter_slot < 0) return last + pairs;
    const uint32_t parity = count++ % 2;
    int index;
    if (rank == 0) {
      index = claim_tile(args, last, pairs);
      ptx::mbarrier_wait_cluster(smem.claim_empty(), parity ^ 1);
      ptx::store_to_cluster(ptx::mapa(smem.claim(), 1), index);
      ptx::mbarrier_arrive_remote(smem.claim_full(), 1);
    } else {
      ptx::mbarrier_wait_cluster(smem.claim_full(), parity);
      index = *reinterpret_cast<const volatile int*>(shared + Smem::kClaim);
      ptx::mbarrier_arrive_remote(smem.claim_empty(), 0);
    }
    return index;
  }

  __device__ __forceinline__ void run_q() const {
    int index = 0, claims = 0;
#pragma unroll 1
    for (int tile = 0, claimed = blockIdx.x / 2;; tile++) {
      BwdBlock& block = block_of(smem, shared, tile);
      ptx::mbarrier_wait(smem.tile_empty(tile), phase_of<Smem::kTiles>(tile) ^ 1);
      if (tile > 0) claimed = claim(claimed, claims);
      block.empty = true;
#pragma unroll 1
      for (; claimed < args.order.count(); claimed = claim(claimed, claims)) {
        static_cast<BwdKeys&>(block) = BwdKeys::of(args, claimed, Traits::kTile.block_n);
        if (!block.empty) break;
      }
      if (!block.empty) block.find_steps(args, Traits::kBlockM, Traits::kTile.block_n);
      ptx::mbarrier_arrive(smem.tile_full(tile));
      if (block.empty) break;
      ptx::griddepcontrol_wait();  // for what the preprocess kernel wrote; passes at once later on
      each_step(block, index, [&](int i, BwdSteps::Step step) {
        const int stage = i % Traits::kStages;
        ptx::mbarrier_wait(smem.q_empty(stage), phase_of<Traits::kStages>(i) ^ 1);
        load_q<Traits>(args, block, smem, stage, step);
      });
    }
    if (rank == 0) finish_claims(args, gridDim.x / 2);
  }

  __device__ __forceinline__ void run_dout() const {
    int index = 0;
#pragma unroll 1
    for (int tile = 0;; tile++) {
      const BwdBlock& block = wait_for_tile(smem, shared, tile);
      if (block.empty) break;
      each_step(block, index, [&](int i, BwdSteps::Step step) {
#pragma unroll
        for (int part = 0; part < DoutRing::kParts; part++) {
          const int place = DoutRing::place(i, part);
          ptx::mbarrier_wait(smem.dout_empty(place), DoutRing::parity(i, part) ^ 1);
          load_dout<Traits>(args, block, smem, place, step, part);
        }
      });
      ptx::mbarrier_arrive(smem.tile_empty(tile));
    }
  }

  __device__ __forceinline__ void run_keys() const {
    int index = 0;
#pragma unroll 1
    for (int tile = 0;; tile++) {
      const BwdBlock& block = wait_for_tile(smem, shared, tile);
      if (block.empty) break;
      load_pair_keys<Traits>(args, block, smem, rank, tile % 2 ^ 1);
      if constexpr (Traits::kMayBias)
        if (args.copies_bias) run_bias(block, index);
      ptx::mbarrier_arrive(smem.tile_empty(tile));
    }
  }

  // Bias of a tile's steps, each into the slot that P will take.
  __device__ __forceinline__ void run_bias(const BwdBlock& block, int& index) const {
    const int first_key = block.n_block * Traits::kTile.block_n + rank * Traits::kKeys;
    const int end = index + block.steps.total();
    BwdSteps::Step step{block.steps.begin, 0};
#pragma unroll 1
    for (; index < end; index++, step = block.steps.ahead(step, 1)) {
      const int slot = index % Traits::kDsStages, head = block.head_kv * block.steps.group + step.head;
      ptx::mbarrier_wait(smem.slot_empty(slot), phase_of<Traits::kDsStages>(index) ^ 1);
      ptx::mbarrier_arrive_expect_tx(smem.bias_full(slot), Traits::kPanelBytes);
      ptx::tma_load(smem.slot(slot), &args.map_bias, smem.bias_full(slot), first_key, step.m_block * Traits::kBlockM,
                    head * args.step_bias.head, block.batch * args.step_bias.batch);
    }
  }

  // By one thread of each warp; the fourth one may be a helper.
  __device__ __forceinline__ void run() const {
    const int warp = threadIdx.x / 32 % 4;
    if constexpr (Traits::kMayBias || Traits::kMayDrop)
      if (warp == 3 && HelperTasks::of<Traits>(args.p).any())
        return run_helper<Traits>(args, PairHelperPlace<Traits>{smem, rank, rank}, shared);
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) run_q();
    if (warp == 1) run_dout();
    if (warp == 2) run_keys();
  }

 private:
  template <class Load>
  __device__ __forceinline__ void each_step(const BwdBlock& block, int& index, Load load) const {
    const int end = index + block.steps.total();
    BwdSteps::Step step{block.steps.begin, 0};
#pragma unroll 1
    for (; index < end; index++, step = block.steps.ahead(step, 1)) load(index, step);
  }
};

}  // namespace flash::sm90
