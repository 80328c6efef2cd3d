// The Hopper backward for head_dim 192 and 256. The gradients of 64 keys fill the registers of a multiprocessor, and
// with so few keys the additions to dQ would limit the speed: so a cluster of two thread blocks, 64 keys each, trades
// dS through shared memory, and each block adds one half of dQ's columns over all 128 keys.
//
//   warpgroup 0   S, P, dV      bwd_pair_values.cuh
//   warpgroup 1   dP, dS, dK    bwd_pair_keys.cuh
//   warpgroup 2   dQ            bwd_pair_dq.cuh
//
// Barriers stand in bwd_pair_args.cuh.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_pair_dq.cuh"
#include "bwd_pair_keys.cuh"
#include "bwd_pair_values.cuh"

namespace flash::sm90 {

template <class Traits>
__device__ __forceinline__ void init_pair_barriers(BwdPairSmem<Traits> smem) {
  ptx::mbarrier_init(smem.kv_full(), 1);
  for (int i = 0; i < Traits::kStages; i++) {
    ptx::mbarrier_init(smem.q_full(i), 1);
    ptx::mbarrier_init(smem.dout_full(i), 1);
    ptx::mbarrier_init(smem.q_empty(i), 8);
    ptx::mbarrier_init(smem.dout_empty(i), 8);
  }
  for (int i = 0; i < Traits::kDsStages; i++) {
    ptx::mbarrier_init(smem.p_full(i), 4);
    ptx::mbarrier_init(smem.ds_full(i), 4);
    ptx::mbarrier_init(smem.peer_full(i), 1);
    ptx::mbarrier_init(smem.slot_empty(i), 8);
  }
  ptx::fence_mbarrier_init();
  for (int i = 0; i < Traits::kDsStages; i++) ptx::mbarrier_arrive_expect_tx(smem.peer_full(i), Traits::kPanelBytes);
}

// As in bwd_kernel.cuh. No block may arrive at the other's barriers before those are initialised.
template <class Traits>
__device__ __forceinline__ bool start_pair(const BwdArgs& args, BwdBlock& block, BwdPairSmem<Traits> smem, int rank) {
  constexpr int kKeysOfPair = Traits::kTile.block_n;
  if (threadIdx.x == 32) block = BwdBlock::of(args, blockIdx.x / 2, Traits::kBlockM, kKeysOfPair);
  if (threadIdx.x == 0) {
    const BwdKeys keys = BwdKeys::of(args, blockIdx.x / 2, kKeysOfPair);
    if (!keys.empty) {
      init_pair_barriers<Traits>(smem);
      load_pair_keys<Traits>(args, keys, smem, rank);
    }
  }
  __syncthreads();
  if (block.empty) return false;  // in both
  ptx::griddepcontrol_wait();
  if (threadIdx.x == 0)
    for (int i = 0; i < Traits::kStages && i < block.steps.total(); i++) {
      const BwdSteps::Step step = block.steps.ahead({block.steps.begin, 0}, i);
      load_q<Traits>(args, block, smem, i, step);
      load_dout<Traits>(args, block, smem, i, step);
    }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  return true;
}

// K and V of unused keys become zeros, in all copies, so that what they hold cannot reach dQ.
template <class Traits>
__device__ __forceinline__ void clear_unused_pair_keys(const BwdBlock& block, BwdPairSmem<Traits> smem, int rank) {
  constexpr int kKeys = Traits::kKeys, kThreads = Traits::kThreads;
  const int used = block.seq.seqlen_k - block.n_block * Traits::kTile.block_n;
  if (used >= Traits::kTile.block_n) return;
  const int own = min_of(kKeys, max_of(0, used - rank * kKeys)),
            peer = min_of(kKeys, max_of(0, used - (rank ^ 1) * kKeys));
  zero_rows<kThreads>(smem.k(), Traits::kPanels, kKeys, own, threadIdx.x);
  zero_rows<kThreads>(smem.v(), Traits::kPanelsV, kKeys, own, threadIdx.x);
  zero_rows<kThreads>(smem.peer_k(), Traits::kHalfPanels, kKeys, peer, threadIdx.x);
  if constexpr (!Traits::kHalfIsPanels) zero_rows<kThreads>(smem.own_k(), Traits::kHalfPanels, kKeys, own, threadIdx.x);
  __syncthreads();
}

template <class Traits>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Traits::kThreads, 1)
    bwd_pair_kernel(const __grid_constant__ BwdArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename Traits::T;
  extern __shared__ __align__(1024) uint8_t shared[];
  const BwdPairSmem<Traits> smem{ptx::smem_address(shared)};
  const int rank = int(ptx::cluster_ctarank());
  ptx::griddepcontrol_launch_dependents();

  BwdBlock& block = *reinterpret_cast<BwdBlock*>(shared + smem.kBlock);
  if (!start_pair<Traits>(args, block, smem, rank)) return;
  ptx::mbarrier_wait(smem.kv_full(), 0);
  clear_unused_pair_keys<Traits>(block, smem, rank);

  const BwdParams& p = args.p;
  const int row0 = block.n_block * Traits::kTile.block_n + rank * Traits::kKeys + threadIdx.x / 32 % 4 * 16;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_inc<Traits::kTile.registers_main>();
    ValueWarpgroup<Traits> values(args, block, smem, rank);
    walk_all(values);
    T* dv = static_cast<T*>(p.dv.ptr) + offset_of(p.dv, block.batch, block.seq.k0, 0, block.head_kv);
    const float scale = p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f;
    store_rows<T, Traits::kHeadDimV>(dv, p.dv.row, row0, block.rows_k, p.head_dim_v, values.acc_dv, scale);
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_inc<Traits::kTile.registers_main>();
    KeyWarpgroup<Traits> keys(args, block, smem, rank);
    walk_all(keys);
    T* dk = static_cast<T*>(p.dk.ptr) + offset_of(p.dk, block.batch, block.seq.k0, 0, block.head_kv);
    store_rows<T, Traits::kHeadDim>(dk, p.dk.row, row0, block.rows_k, p.head_dim, keys.acc_dk, p.softmax_scale);
  } else {
    ptx::setmaxnreg_dec<Traits::kTile.registers_dq>();
    run_pair_dq<Traits>(args, block, smem, rank);
  }
  ptx::barrier_cluster_arrive();  // the other block may still copy dS into this one's shared memory, or arrive here
  ptx::barrier_cluster_wait();
#endif
}

}  // namespace flash::sm90
