// Attention forward for Hopper: one producer warp feeds consumer warpgroups through shared memory; blocks stay.
// Where there is bias to copy, each warpgroup has a warp of its own for that.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "fwd_bias_producer.cuh"
#include "fwd_consumer.cuh"
#include "fwd_producer.cuh"

namespace flash::sm90 {

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
    } else if (Traits::kGeneral && args.copies_bias && warp <= Traits::kWarpgroups) {
      FwdBiasProducer<Traits>(args, smem, warp - 1).run();
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kTile.consumer_registers>();
    FwdConsumer<Traits>(args, smem, warp / 4 - 1).run();
  }
#endif
}

}  // namespace flash::sm90
