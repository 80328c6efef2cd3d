// FP8 attention forward for Hopper: the 16-bit forward's producer, tiles and loop (fwd_kernel.cuh) around 8-bit blocks;
// spare warps turn V around and load it.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "fp8_block.cuh"
#include "fp8_first_values.cuh"
#include "fp8_transpose.cuh"
#include "fp8_value_loader.cuh"
#include "fwd_consumer.cuh"
#include "fwd_producer.cuh"

namespace flash::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) fp8_kernel(const __grid_constant__ Fp8Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  const Fp8Smem<Traits> smem(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler learns that it is uniform
  if (threadIdx.x == 0) smem.init_barriers();
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  if (warp < 4) {
    ptx::setmaxnreg_dec<Traits::kTile.producer_registers>();
    if (warp == 0) {
      FwdProducer<Traits>(args, smem).run();
    } else if (warp == 1) {
      wait_for_first_values<Traits>();
      Fp8ValueLoader<Traits>(args, smem).run();
    } else {
      wait_for_first_claims<Traits>();
      Fp8Transposer<Traits>(args, smem, warp - 2).run();
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kTile.consumer_registers>();
    turn_first_values<Traits>(args, smem, warp / 4 - 1);
    FwdConsumer<Traits, Fp8Block<Traits>>(args, smem, warp / 4 - 1).run();
  }
#endif
}

}  // namespace flash::sm90
