// The Hopper backward for head_dim 192 and 256. The gradients of 64 keys fill the registers of a multiprocessor, and
// with so few keys the additions to dQ would limit the speed: so a cluster of two thread blocks, 64 keys each, trades
// dS through shared memory, and each block adds one half of dQ's columns over all 128 keys.
//
//   warpgroup 0   S, P, dV      bwd_pair_values.cuh
//   warpgroup 1   dP, dS, dK    bwd_pair_keys.cuh
//   warpgroup 2   dQ            bwd_pair_dq.cuh, bwd_pair_deferred_dq.cuh, bwd_pair_halves_dq.cuh
//   warpgroup 3   claims tiles, copies; dropout's bits, dbias    bwd_pair_loader.cuh, bwd_helper.cuh
//
// As many pairs as fit onto the device work through tiles of 128 keys. Barriers stand in bwd_pair_args.cuh.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_pair_deferred_dq.cuh"
#include "bwd_pair_halves_dq.cuh"
#include "bwd_pair_keys.cuh"
#include "bwd_pair_loader.cuh"
#include "bwd_pair_values.cuh"

namespace flash::sm90 {

template <class Traits>
__device__ __forceinline__ void init_pair_barriers(BwdPairSmem<Traits> smem, const BwdParams& p) {
  const HelperTasks tasks = HelperTasks::of<Traits>(p);
  for (int i = 0; i < BwdPairSmem<Traits>::kTiles; i++) {
    ptx::mbarrier_init(smem.tile_full(i), 1);
    ptx::mbarrier_init(smem.tile_empty(i), 12 + 2 + tasks.any());
  }
  ptx::mbarrier_init(smem.claim_full(), 1);
  ptx::mbarrier_init(smem.claim_empty(), 1);
  ptx::mbarrier_init(smem.k_full(), 1);
  ptx::mbarrier_init(smem.k_empty(), Traits::kHalfIsPanels ? 8 : 4);
  ptx::mbarrier_init(smem.v_full(), 1);
  ptx::mbarrier_init(smem.v_empty(), 4);
  ptx::mbarrier_init(smem.half_full(), 1);
  ptx::mbarrier_init(smem.half_empty(), 4);
  for (int i = 0; i < Traits::kStages; i++) {
    ptx::mbarrier_init(smem.q_full(i), 1 + tasks.makes_bits);
    ptx::mbarrier_init(smem.q_empty(i), 8);
  }
  for (int i = 0; i < Traits::DoutRing::kPlaces; i++) {
    ptx::mbarrier_init(smem.dout_full(i), 1);
    ptx::mbarrier_init(smem.dout_empty(i), 8);
  }
  for (int i = 0; i < Traits::kDsStages; i++) {
    ptx::mbarrier_init(smem.p_full(i), 4);
    ptx::mbarrier_init(smem.ds_full(i), Traits::kDsShared ? 1 : 4);
    ptx::mbarrier_init(smem.peer_full(i), 1);
    ptx::mbarrier_init(smem.bias_full(i), 1);
    ptx::mbarrier_init(smem.slot_empty(i), 8 + 4 * Traits::kDsShared + tasks.adds_dbias);
  }
  ptx::fence_mbarrier_init();
  for (int i = 0; i < Traits::kDsStages; i++) ptx::mbarrier_arrive_expect_tx(smem.peer_full(i), Traits::kPanelBytes);
}

// Warpgroup 2.
template <class Traits>
__device__ __forceinline__ void add_steps_to_dq(const BwdArgs& args, const BwdBlock& block, BwdPairSmem<Traits> smem,
                                                int rank, int& index) {
  if constexpr (Traits::kDeferred || Traits::kHalfIsPanels) {
    using Ordinary = std::conditional_t<Traits::kDeferred, DeferredDq<Traits, false>, HalvesDq<Traits, false>>;
    using Exact = std::conditional_t<Traits::kDeferred, DeferredDq<Traits, true>, HalvesDq<Traits, true>>;
    const BwdSteps::Step first{block.steps.begin, 0};
    if (!args.p.deterministic) return Ordinary{args, block, smem, rank, index, first}.run();
    if (!sums_integers(args, block)) return Exact{args, block, smem, rank, index, first}.run();
  }
  add_pair_tile_to_dq<Traits>(args, block, smem, rank, index);
}

template <class Traits>
__device__ __forceinline__ void run_pair_dq(const BwdArgs& args, BwdPairSmem<Traits> smem, uint8_t* shared, int rank) {
  ptx::griddepcontrol_wait();  // for row_scale, which is read ahead of every barrier
  int index = 0;
#pragma unroll 1
  for (int tile = 0;; tile++) {
    const BwdBlock& block = wait_for_tile(smem, shared, tile);
    if (block.empty) break;
    if constexpr (Traits::kHalfIsPanels) ptx::mbarrier_wait(smem.k_full(), tile % 2);
    ptx::mbarrier_wait(smem.half_full(), tile % 2);
    clear_unused_pair_keys<Traits>(args, block, smem, rank);
    add_steps_to_dq<Traits>(args, block, smem, rank, index);
    if (threadIdx.x % 32 == 0) {
      if constexpr (Traits::kHalfIsPanels) ptx::mbarrier_arrive(smem.k_empty());
      ptx::mbarrier_arrive(smem.half_empty());
      ptx::mbarrier_arrive(smem.tile_empty(tile));
    }
  }
}

// Warpgroup 0 or 1 on all tiles of keys; `store` takes the warpgroup and the first row of a warp's keys.
template <class Warpgroup, class Traits, class Store>
__device__ __forceinline__ void run_pair(const BwdArgs& args, BwdPairSmem<Traits> smem, uint8_t* shared, int rank,
                                         Store store) {
  int index = 0;
#pragma unroll 1
  for (int tile = 0;; tile++) {
    const BwdBlock& block = wait_for_tile(smem, shared, tile);
    if (block.empty) break;
    Warpgroup warpgroup(args, block, smem, rank, index);
    ptx::mbarrier_wait(warpgroup.keys_full(), tile % 2);
    walk_all(warpgroup);
    index = warpgroup.index;
    const bool is_released = Warpgroup::kReleasesEarly && block.steps.total() > 0;
    if (!is_released && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(warpgroup.keys_empty());
    store(block, warpgroup, block.n_block * Traits::kTile.block_n + rank * Traits::kKeys + threadIdx.x / 32 % 4 * 16);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tile_empty(tile));
  }
}

template <class Traits>
__global__ void FLASH_CLUSTER(2, 1, 1) __launch_bounds__(Traits::kThreads, 1)
    bwd_pair_kernel(const __grid_constant__ BwdArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename Traits::T;
  extern __shared__ __align__(1024) uint8_t shared[];
  const BwdPairSmem<Traits> smem{ptx::smem_address(shared)};
  const int rank = int(ptx::cluster_ctarank());
  ptx::griddepcontrol_launch_dependents();

  if (threadIdx.x == 0) init_pair_barriers<Traits>(smem, args.p);
  __syncthreads();
  ptx::barrier_cluster_arrive();  // no block may arrive at the other's barriers before
  ptx::barrier_cluster_wait();

  const BwdParams& p = args.p;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_inc<Traits::kRegistersValues>();
    run_pair<ValueWarpgroup<Traits>>(args, smem, shared, rank, [&](const BwdBlock& block, auto& values, int row0) {
      T* dv = static_cast<T*>(p.dv.ptr) + offset_of(p.dv, block.batch, block.seq.k0, 0, block.head_kv);
      const float scale = p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f;
      store_rows<T, Traits::kHeadDimV>(dv, p.dv.row, row0, block.rows_k, p.head_dim_v, values.acc_dv, scale);
    });
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_inc<Traits::kRegistersKeys>();
    run_pair<KeyWarpgroup<Traits>>(args, smem, shared, rank, [&](const BwdBlock& block, auto& keys, int row0) {
      T* dk = static_cast<T*>(p.dk.ptr) + offset_of(p.dk, block.batch, block.seq.k0, 0, block.head_kv);
      store_rows<T, Traits::kHeadDim>(dk, p.dk.row, row0, block.rows_k, p.head_dim, keys.acc_dk, p.softmax_scale);
    });
  } else if (warpgroup == 2) {
    ptx::setmaxnreg_dec<Traits::kTile.registers_dq>();
    run_pair_dq<Traits>(args, smem, shared, rank);
  } else {
    ptx::setmaxnreg_dec<Traits::kTile.registers_producer>();
    PairLoader<Traits>{args, smem, shared, rank}.run();
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();  // the other block may still copy dS into this one's shared memory, or arrive here
  ptx::barrier_cluster_wait();
#endif
}

}  // namespace flash::sm90
