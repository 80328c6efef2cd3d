// Backward for GPUs from sm_80 on: one block per (batch, kv head, kBlockN keys), warps along keys. Where that gives few
// blocks, several share the query heads of a kv head.
#pragma once

#include "bwd_key_gradients.cuh"

namespace flash::sm80 {

// Early keys are seen by most queries of a causal mask: the longest tiles come first, which are as far from the end in
// sequences of any length. work.head counts (kv head, split).
// deterministic: a block waits for those of earlier keys, which must have started; so blocks are numbered as they
// start.
template <class Traits>
__device__ __forceinline__ Work work_of_block(const BwdParams& p, int splits, char* smem) {
  unsigned block = blockIdx.x;
  if (p.deterministic) {
    unsigned* shared = reinterpret_cast<unsigned*>(smem);
    if (threadIdx.x == 0) *shared = atomicAdd(BwdWorkspace<Traits>{p}.started_blocks(), 1u);
    __syncthreads();
    block = *shared;
    __syncthreads();  // copies overwrite it
  }
  const int tiles = ceil_div(p.seqlen_k, Traits::kBlockN), heads = p.num_heads_kv * splits;
  if (p.window_left >= 0 || p.window_right < 0) return Work::of(block, tiles, heads);
  Work work = Work::tile_by_tile(block, tiles, heads, p.batch, 512);
  work.tile -= tiles - ceil_div(SeqInfo::rows_of_k(p, work.batch_index), Traits::kBlockN);
  return work;
}

template <class Traits>
__device__ __forceinline__ void bwd_tile_of_keys(const BwdParams& params, int stages, int splits) {
  extern __shared__ __align__(128) char smem[];
  const Work work = work_of_block<Traits>(params, splits, smem);
  if (work.tile < 0 || work.tile * Traits::kBlockN >= SeqInfo::rows_of_k(params, work.batch_index)) return;

  BwdMainloop<Traits> main(params, work, splits, uint32_t(__cvta_generic_to_shared(smem)), stages);
  main.run();
  if (splits == 1) {
    write_key_gradients(main, smem);
  } else {
    add_key_gradients(main, work.head % splits);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.kBlocksPerSm)
    bwd_kernel(const __grid_constant__ BwdParams params, int stages, int splits) {
#if __CUDA_ARCH__ >= 800
  bwd_tile_of_keys<Traits>(params, stages, splits);
#endif
}

}  // namespace flash::sm80
