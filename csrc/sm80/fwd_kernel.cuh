// Forward for GPUs from sm_80 on: mma.sync, cp.async, one block per (batch, head, kBlockM queries), warps along
// queries.
#pragma once

#include "epilogue.cuh"

namespace flash::sm80 {

// The last queries see most keys of a causal mask.
template <class Traits>
__device__ __forceinline__ Work work_of_block(const FwdParams& p) {
  const int tiles = ceil_div(p.seqlen_q, Traits::kBlockM);
  if (p.window_left >= 0 || p.window_right < 0) return Work::of(blockIdx.x, tiles, p.num_heads);
  Work work = Work::tile_by_tile(blockIdx.x, tiles, p.num_heads, p.batch, 2048);
  work.tile = tiles - 1 - work.tile;
  return work;
}

template <class Traits>
__device__ __forceinline__ void fwd_tile_of_queries(const FwdParams& params) {
  extern __shared__ __align__(128) char smem[];
  const Work work = work_of_block<Traits>(params);
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
