// Attention forward for Hopper: one producer warp feeds consumer warpgroups through shared memory; blocks stay.
// Where there is bias to copy, the warps beside the producer do that.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "fwd_bias_producer.cuh"
#include "fwd_consumer.cuh"
#include "fwd_producer.cuh"

namespace flash::sm90 {

template <class Traits, Option kOption>
__device__ __forceinline__ void run_with(const FwdArgs& args, uint8_t* shared, int warpgroup) {
  using T = WithOption<Traits, kOption>;
  FwdConsumer<T>(args, FwdSmem<T>(shared), warpgroup).run();
}

template <class Traits>
__device__ __forceinline__ void run_consumer(const FwdArgs& args, uint8_t* shared, int warpgroup) {
  if constexpr (Traits::kOptionLoops) {
    if (args.option == Option::kSoftcap) return run_with<Traits, Option::kSoftcap>(args, shared, warpgroup);
    if (args.option == Option::kAlibi) return run_with<Traits, Option::kAlibi>(args, shared, warpgroup);
    if (args.option == Option::kBias) return run_with<Traits, Option::kBias>(args, shared, warpgroup);
    if (args.option == Option::kDropout) return run_with<Traits, Option::kDropout>(args, shared, warpgroup);
  }
  run_with<Traits, Option::kAny>(args, shared, warpgroup);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) fwd_kernel(const __grid_constant__ FwdArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  const FwdSmem<Traits> smem(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler learns that it is uniform
  if (threadIdx.x == 0) smem.init_barriers(args.copies_bias);
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // all that was before it may run beside the end of the kernel in front

  if (warp < 4) {
    ptx::setmaxnreg_dec<Traits::kTile.producer_registers>();
    if (warp == 0) {
      FwdProducer<Traits>(args, smem).run();
    } else if (Traits::kGeneral && args.copies_bias && warp <= FwdSmem<Traits>::kBiasWarps) {
      FwdBiasProducer<Traits>(args, smem, warp - 1).run();
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kTile.consumer_registers>();
    run_consumer<Traits>(args, shared, warp / 4 - 1);
  }
#endif
}

}  // namespace flash::sm90
