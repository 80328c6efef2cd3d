// The Hopper backward for head_dim up to 128. A thread block per multiprocessor works through tiles of kBlockN keys of
// one key-value head: for each it walks over the queries of all heads that share them, with dK and dV in registers,
// while dQ is added up in an fp32 workspace.
//
//   warpgroups 0, 1   64 keys each: S, P, dP, dS, dV, dK          bwd_consumer.cuh
//   warpgroup 2       dQ                                          bwd_dq.cuh
//   warpgroup 3       claims tiles, copies; dropout's bits, dbias  bwd_loader.cuh, bwd_helper.cuh
//
// Barriers stand in bwd_args.cuh.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "bwd_consumer.cuh"
#include "bwd_dq.cuh"
#include "bwd_loader.cuh"

namespace flash::sm90 {

template <class Traits>
__device__ __forceinline__ void init_barriers(BwdSmem<Traits> smem, const BwdParams& p) {
  const HelperTasks tasks = HelperTasks::of<Traits>(p);
  for (int i = 0; i < BwdSmem<Traits>::kTiles; i++) {
    ptx::mbarrier_init(smem.tile_full(i), 1);
    ptx::mbarrier_init(smem.tile_empty(i), Traits::kMainWarps + 4 + 1 + (tasks.any() ? 2 : 0));
  }
  for (int i = 0; i < Traits::kKvStages; i++) {
    ptx::mbarrier_init(smem.kv_full(i), 1);
    ptx::mbarrier_init(smem.kv_empty(i), Traits::kMainWarps + 4);
  }
  for (int i = 0; i < Traits::kStages; i++) {
    ptx::mbarrier_init(smem.full(i), 1 + (tasks.makes_bits ? 4 : 0));
    ptx::mbarrier_init(smem.empty(i), Traits::kMainWarps);
  }
  for (int i = 0; i < Traits::kDsStages; i++) {
    ptx::mbarrier_init(smem.ds_full(i), Traits::kMainWarps);
    ptx::mbarrier_init(smem.ds_empty(i), 4 + (tasks.adds_dbias ? 2 : 0));
  }
  ptx::fence_mbarrier_init();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_kernel(const __grid_constant__ BwdArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  const BwdSmem<Traits> smem{ptx::smem_address(shared)};
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) init_barriers<Traits>(smem, args.p);
  __syncthreads();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Traits::kMainWarpgroups + 1) {
    ptx::setmaxnreg_dec<Traits::kRegistersProducer>();
    run_producer<Traits>(args, smem, shared);
  } else if (warpgroup == Traits::kMainWarpgroups) {
    ptx::setmaxnreg_dec<Traits::kTile.registers_dq>();
    run_dq<Traits>(args, smem, shared);
  } else {
    ptx::setmaxnreg_inc<Traits::kRegistersMain>();
    MainWarpgroup<Traits> main(args, smem, shared, warpgroup);
    main.run();
  }
#endif
}

}  // namespace flash::sm90
