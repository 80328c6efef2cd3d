// The producer warpgroup: one warp claims tiles of keys, says to the others what they are, and copies the queries of
// their steps; another one copies their keys. Both run ahead across tiles as far as there is room.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_helper.cuh"
#include "bwd_loads.cuh"
#include "counters.cuh"

namespace flash::sm90 {

// A quarter of dropout's bits: all four warps of the producer warpgroup make some, warps 0 and 1 behind the copies of a
// step that their first thread issues.
template <class Traits>
struct ShareOfBits {
  static constexpr bool kTakesWarp = true;
  const BwdArgs& args;
  const BwdSmem<Traits> smem;
  const int part;  // of the bits for the first 64 keys
  const Dropout dropout;

  __device__ __forceinline__ void operator()(const BwdBlock& block, int stage, BwdSteps::Step step) const {
    const uint32_t head = block.batch * args.p.num_heads + block.head_kv * block.steps.group + step.head;
    write_kept_bits<2>(smem.kept(stage, 0), dropout, head, block.n_block * Traits::kBlockN,
                       step.m_block * Traits::kBlockM, part);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.full(stage));
  }
};
struct NoShare {
  static constexpr bool kTakesWarp = false;
};

// By one thread, or by a warp with a share. Behind the last tile comes an empty one.
template <class Traits, class Share>
__device__ __forceinline__ void run_query_loader(const BwdArgs& args, BwdSmem<Traits> smem, uint8_t* shared,
                                                 Share share) {
  using Smem = BwdSmem<Traits>;
  const bool leads = !Share::kTakesWarp || threadIdx.x % 32 == 0;
  int index = 0;
#pragma unroll 1
  for (int tile = 0, claimed = blockIdx.x;; tile++) {
    BwdBlock& block = block_of(smem, shared, tile);
    ptx::mbarrier_wait(smem.tile_empty(tile), phase_of<Smem::kTiles>(tile) ^ 1);
    if (leads) {
      // As late as the copies allow: who claims early may keep a long tile waiting for the end of another.
      if (tile > 0) claimed = claim_tile(args, claimed, gridDim.x);
      block.empty = true;
#pragma unroll 1
      for (; claimed < args.order.count(); claimed = claim_tile(args, claimed, gridDim.x)) {
        static_cast<BwdKeys&>(block) = BwdKeys::of(args, claimed, Traits::kBlockN);
        if (!block.empty) break;
      }
      if (!block.empty) block.find_steps(args, Traits::kBlockM, Traits::kBlockN);
      ptx::mbarrier_arrive(smem.tile_full(tile));
    }
    if constexpr (Share::kTakesWarp) __syncwarp();
    if (block.empty) break;
    ptx::griddepcontrol_wait();  // for what the preprocess kernel wrote; passes at once later on
    const int total = block.steps.total();
    BwdSteps::Step step{block.steps.begin, 0};
#pragma unroll 1
    for (int i = 0; i < total; i++, index++) {
      const int stage = index % Traits::kStages;
      ptx::mbarrier_wait(smem.empty(stage), phase_of<Traits::kStages>(index) ^ 1);
      if (leads) load_queries<Traits>(args, block, smem, stage, step);
      if constexpr (Share::kTakesWarp) share(block, stage, step);
      step = block.steps.ahead(step, 1);
    }
    if constexpr (Share::kTakesWarp) __syncwarp();  // all are done with the tile's entry
  }
  if (leads) finish_claims(args, gridDim.x);
}

// By one thread, or by a warp with a share.
template <class Traits, class Share>
__device__ __forceinline__ void run_key_loader(const BwdArgs& args, BwdSmem<Traits> smem, uint8_t* shared,
                                               Share share) {
  const bool leads = !Share::kTakesWarp || threadIdx.x % 32 == 0;
  int index = 0;
#pragma unroll 1
  for (int tile = 0;; tile++) {
    const BwdBlock& block = wait_for_tile(smem, shared, tile);
    if (block.empty) break;
    const int stage = tile % Traits::kKvStages;
    ptx::mbarrier_wait(smem.kv_empty(stage), phase_of<Traits::kKvStages>(tile) ^ 1);
    if (leads) load_keys<Traits>(args, block, smem, stage);
    if constexpr (Share::kTakesWarp) {
      const int end = index + block.steps.total();
      BwdSteps::Step step{block.steps.begin, 0};
#pragma unroll 1
      for (; index < end; index++, step = block.steps.ahead(step, 1)) {
        const int q_stage = index % Traits::kStages;
        ptx::mbarrier_wait(smem.empty(q_stage), phase_of<Traits::kStages>(index) ^ 1);
        share(block, q_stage, step);
      }
      __syncwarp();
    }
    if (leads) ptx::mbarrier_arrive(smem.tile_empty(tile));
  }
}

// What a helper works with: dS of one main warpgroup, and the bits for the second one.
template <class Traits>
struct HelperPlace {
  static constexpr int kParts = 2;
  const BwdSmem<Traits> smem;
  const int half, part, bits_half = 1;

  __device__ int first_key(const BwdBlock& block, int of) const { return block.n_block * Traits::kBlockN + 64 * of; }
  __device__ uint32_t kept(int stage) const { return smem.kept(stage, bits_half); }
  __device__ uint32_t full(int stage) const { return smem.full(stage); }
  __device__ uint32_t empty(int stage) const { return smem.empty(stage); }
  __device__ uint32_t ds(int slot) const { return smem.ds(slot) + half * Traits::kBlockM * 128; }
  __device__ uint32_t ds_full(int slot) const { return smem.ds_full(slot); }
  __device__ uint32_t ds_empty(int slot) const { return smem.ds_empty(slot); }
};

template <class Traits>
__device__ __forceinline__ void run_producer(const BwdArgs& args, BwdSmem<Traits> smem, uint8_t* shared) {
  const int warp = threadIdx.x / 32 % 4;
  if constexpr (Traits::kMayBias || Traits::kMayDrop) {
    const HelperTasks tasks = HelperTasks::of<Traits>(args.p);
    if (warp >= 2 && tasks.any())
      return run_helper<Traits>(args, HelperPlace<Traits>{smem, warp - 2, warp - 2}, shared);
    if constexpr (Traits::kMayDrop) {
      if (tasks.makes_bits) {
        ptx::griddepcontrol_wait();  // for rng_state
        const ShareOfBits<Traits> share{args, smem, warp, Dropout::of(args.p.dropout_p, args.p.rng_state)};
        if (warp == 0) run_query_loader(args, smem, shared, share);
        if (warp == 1) run_key_loader(args, smem, shared, share);
        return;
      }
    }
  }
  if (threadIdx.x % 32 != 0) return;
  if (warp == 0) run_query_loader(args, smem, shared, NoShare{});
  if (warp == 1) run_key_loader(args, smem, shared, NoShare{});
}

}  // namespace flash::sm90
