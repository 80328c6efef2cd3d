// Backward for GPUs from sm_80 on: one block per (batch, kv head, kBlockN keys), warps along keys. Where that gives few
// blocks, several share the query heads of a kv head.
#pragma once

#include "bwd_key_gradients.cuh"

namespace flash::sm80 {

// deterministic: a block waits for those of earlier keys, which must have started; so blocks are numbered as they
// start.
template <class Traits>
__device__ __forceinline__ Work work_of_block(const BwdParams& p, const BwdSchedule& schedule, char* smem) {
  unsigned block = blockIdx.x;
  if (p.deterministic) {
    unsigned* shared = reinterpret_cast<unsigned*>(smem);
    if (threadIdx.x == 0) *shared = atomicAdd(BwdWorkspace<Traits>{p}.started_blocks(), 1u);
    __syncthreads();
    block = *shared;
    __syncthreads();  // copies overwrite it
  }
  Work work = schedule.order.work_of(block);
  if (schedule.tiles_from_end > 0)
    work.tile -= schedule.tiles_from_end - ceil_div(SeqInfo::rows_of_k(p, work.batch_index), Traits::kBlockN);
  return work;
}

template <class Traits>
__device__ __forceinline__ void bwd_tile_of_keys(const BwdParams& params, const BwdSchedule& schedule) {
  extern __shared__ __align__(128) char smem[];
  const Work work = work_of_block<Traits>(params, schedule, smem);
  if (work.tile < 0 || work.tile * Traits::kBlockN >= SeqInfo::rows_of_k(params, work.batch_index)) return;

  BwdMainloop<Traits> main(params, work, SeqInfo::of(params, work.batch_index), schedule, smem);
  main.run();
  if (schedule.splits.divisor == 1) {
    write_key_gradients(main, smem);
  } else {
    add_key_gradients(main, work.head - main.place.head_kv * int(schedule.splits.divisor));
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.kBlocksPerSm)
    bwd_kernel(const __grid_constant__ BwdParams params, const __grid_constant__ BwdSchedule schedule) {
#if __CUDA_ARCH__ >= 800
  bwd_tile_of_keys<Traits>(params, schedule);
#endif
}

}  // namespace flash::sm80
