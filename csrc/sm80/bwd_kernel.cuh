// Backward for GPUs from sm_80 on: one block per (batch, kv head, kBlockN keys), warps along keys.
#pragma once

#include "bwd_mainloop.cuh"
#include "store.cuh"

namespace flash::sm80 {

template <class Traits>
__device__ __forceinline__ void write_key_gradients(const BwdMainloop<Traits>& main, const Work& work,
                                                    const SeqInfo& seq, int rows_of_k, char* smem) {
  using T = typename Traits::T;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  using Main = BwdMainloop<Traits>;
  const BwdParams& p = main.params;
  char* tile_v = smem + Traits::kSmem.v;
  stage_rows<T, TileK>(smem, main.warp_row0, main.col_warp * Main::kCols, main.acc_dk, p.softmax_scale);
  stage_rows<T, TileV>(tile_v, main.warp_row0, main.col_warp * Main::kColsV, main.acc_dv, 1.f);
  __syncthreads();
  T* dk = static_cast<T*>(p.dk.ptr) + offset_of(p.dk, work.batch_index, seq.k0, main.col0, work.head);
  T* dv = static_cast<T*>(p.dv.ptr) + offset_of(p.dv, work.batch_index, seq.k0, main.col0, work.head);
  const int rows = rows_of_k - main.col0;
  store_rows<T, TileK, Traits::kBlockN, Traits::kThreads>(smem, 0, dk, p.dk.row, rows, p.head_dim, chunks_aligned(p.dk),
                                                          threadIdx.x);
  store_rows<T, TileV, Traits::kBlockN, Traits::kThreads>(tile_v, 0, dv, p.dv.row, rows, p.head_dim_v,
                                                          chunks_aligned(p.dv), threadIdx.x);
}

// Early keys are seen by most queries of a causal mask: the longest tiles come first. deterministic: the last keys do,
// since blocks wait for those of later keys, which must have started; so blocks are numbered as they start.
template <class Traits>
__device__ __forceinline__ Work work_of_block(const BwdParams& p, char* smem) {
  const int tiles = ceil_div(p.seqlen_k, Traits::kBlockN);
  if (!p.deterministic) return Work::of(blockIdx.x, tiles, p.num_heads_kv);
  unsigned* shared = reinterpret_cast<unsigned*>(smem);
  if (threadIdx.x == 0) *shared = atomicAdd(Traits::started_blocks(p), 1u);
  __syncthreads();
  const unsigned block = *shared;
  __syncthreads();  // copies overwrite it
  return Work::last_tile_first(block, tiles, p.num_heads_kv);
}

template <class Traits>
__device__ __forceinline__ void bwd_tile_of_keys(const BwdParams& params, int stages) {
  extern __shared__ __align__(128) char smem[];
  const Work work = work_of_block<Traits>(params, smem);
  const SeqInfo seq = SeqInfo::of(params, work.batch_index);
  const int rows_of_k = SeqInfo::rows_of_k(params, work.batch_index);  // unused keys get zeros
  if (work.tile * Traits::kBlockN >= rows_of_k) return;

  BwdMainloop<Traits> main(params, work, seq, uint32_t(__cvta_generic_to_shared(smem)), stages);
  main.run();
  write_key_gradients(main, work, seq, rows_of_k, smem);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.kBlocksPerSm)
    bwd_kernel(const __grid_constant__ BwdParams params, int stages) {
#if __CUDA_ARCH__ >= 800
  bwd_tile_of_keys<Traits>(params, stages);
#endif
}

}  // namespace flash::sm80
