// Forward for GPUs from sm_80 on: mma.sync, cp.async, one block per (batch, head, kBlockM queries), warps along
// queries.
#pragma once

#include "epilogue.cuh"

namespace flash::sm80 {

template <class Traits>
__device__ __forceinline__ void fwd_tile_of_queries(const FwdParams& params) {
  extern __shared__ __align__(128) char smem[];
  // The last queries see most keys of a causal mask: they start first, and short tiles fill the end.
  const Work work = Work::last_tile_first(blockIdx.x, ceil_div(params.seqlen_q, Traits::kBlockM), params.num_heads);
  const SeqInfo seq = SeqInfo::of(params, work.batch_index);
  if (work.tile * Traits::kBlockM >= seq.seqlen_q) return;

  FwdMainloop<Traits> main(params, work, seq, uint32_t(__cvta_generic_to_shared(smem)));
  const General<typename Traits::T> general(params, main.band, work.batch_index, work.head);
  main.run(general);
  write_results(main, general, work, seq, smem);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.kBlocksPerSm)
    fwd_kernel(const __grid_constant__ FwdParams params) {
#if __CUDA_ARCH__ >= 800
  fwd_tile_of_queries<Traits>(params);
#endif
}

}  // namespace flash::sm80
