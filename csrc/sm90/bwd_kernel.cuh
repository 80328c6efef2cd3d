// The Hopper backward for head_dim up to 128. A thread block owns kBlockN keys of one key-value head and walks over the
// queries of all heads that share them: dK and dV stay in registers, dQ is added up in an fp32 workspace.
//
//   warpgroups 0, 1   64 keys each: S, P, dP, dS, dV, dK          bwd_consumer.cuh
//   warpgroup 2       dQ                                          bwd_dq.cuh
//
// Barriers stand in bwd_args.cuh.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "bwd_consumer.cuh"
#include "bwd_dq.cuh"
#include "bwd_epilogue.cuh"

namespace flash::sm90 {

template <class Traits>
__device__ __forceinline__ void init_barriers(BwdSmem<Traits> smem) {
  ptx::mbarrier_init(smem.kv_full(), 1);
  for (int i = 0; i < Traits::kStages; i++) {
    ptx::mbarrier_init(smem.full(i), 1);
    ptx::mbarrier_init(smem.empty(i), Traits::kMainWarps);
  }
  for (int i = 0; i < Traits::kDsStages; i++) {
    ptx::mbarrier_init(smem.ds_full(i), Traits::kMainWarps);
    ptx::mbarrier_init(smem.ds_empty(i), 4);
  }
  ptx::fence_mbarrier_init();
}

// Barriers, the first copies, and `block`: by two threads at a time, for this is what a short sequence waits for. Only
// what the preprocess kernel writes has to wait for it. False: there is nothing to do.
template <class Traits>
__device__ __forceinline__ bool start(const BwdArgs& args, BwdBlock& block, BwdSmem<Traits> smem) {
  if (threadIdx.x == 32) block = BwdBlock::of(args, blockIdx.x, Traits::kBlockM, Traits::kBlockN);
  if (threadIdx.x == 0) {
    const BwdKeys keys = BwdKeys::of(args, blockIdx.x, Traits::kBlockN);
    if (!keys.empty) {
      init_barriers<Traits>(smem);
      load_keys<Traits>(args, keys, smem);
    }
  }
  __syncthreads();
  if (block.empty) return false;
  ptx::griddepcontrol_wait();
  if (threadIdx.x == 0)
    for (int i = 0; i < Traits::kStages && i < block.steps.total(); i++)
      load_queries<Traits>(args, block, smem, i, block.steps.ahead({block.steps.begin, 0}, i));
  return true;
}

// K and V of unused keys become zeros, so that what they hold cannot reach dQ.
template <class Traits>
__device__ __forceinline__ void clear_unused_keys(const BwdBlock& block, BwdSmem<Traits> smem) {
  const int used = max_of(0, block.seq.seqlen_k - block.n_block * Traits::kBlockN);
  if (used >= Traits::kBlockN) return;
  zero_rows<Traits::kThreads>(smem.k(), Traits::kPanels, Traits::kBlockN, used, threadIdx.x);
  zero_rows<Traits::kThreads>(smem.v(), Traits::kPanels, Traits::kBlockN, used, threadIdx.x);
  __syncthreads();
}

template <class Traits>
__device__ __forceinline__ void store_dk_dv(const BwdArgs& args, const BwdBlock& block, int warpgroup,
                                            const float (&acc_dk)[Traits::kHeadDim / 2],
                                            const float (&acc_dv)[Traits::kHeadDim / 2]) {
  using T = typename Traits::T;
  constexpr int kHeadDim = Traits::kHeadDim;
  const BwdParams& p = args.p;
  const int row0 = block.n_block * Traits::kBlockN + warpgroup * 64 + threadIdx.x / 32 % 4 * 16;
  const float dv_scale = p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f;
  T* dk = static_cast<T*>(p.dk.ptr) + offset_of(p.dk, block.batch, block.seq.k0, 0, block.head_kv);
  T* dv = static_cast<T*>(p.dv.ptr) + offset_of(p.dv, block.batch, block.seq.k0, 0, block.head_kv);
  store_rows<T, kHeadDim>(dv, p.dv.row, row0, block.rows_k, p.head_dim_v, acc_dv, dv_scale);
  store_rows<T, kHeadDim>(dk, p.dk.row, row0, block.rows_k, p.head_dim, acc_dk, p.softmax_scale);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_kernel(const __grid_constant__ BwdArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  const BwdSmem<Traits> smem{ptx::smem_address(shared)};
  ptx::griddepcontrol_launch_dependents();

  BwdBlock& block = *reinterpret_cast<BwdBlock*>(shared + smem.kBlock);
  if (!start<Traits>(args, block, smem)) return;
  ptx::mbarrier_wait(smem.kv_full(), 0);
  clear_unused_keys<Traits>(block, smem);

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Traits::kMainWarpgroups) {
    ptx::setmaxnreg_dec<Traits::kTile.registers_dq>();
    run_dq<Traits>(args, block, smem);
  } else {
    ptx::setmaxnreg_inc<Traits::kTile.registers_main>();
    MainWarpgroup<Traits> main(args, block, smem, warpgroup);
    main.run();
    store_dk_dv<Traits>(args, block, warpgroup, main.acc_dk, main.acc_dv);
  }
#endif
}

}  // namespace flash::sm90
