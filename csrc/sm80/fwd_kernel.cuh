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
  using T = typename Traits::T;
  extern __shared__ __align__(128) char smem[];
  const Work work = work_of_block<Traits>(params);
  const SeqInfo seq = SeqInfo::of(params, work.batch_index);
  const int row0 = work.tile * Traits::kBlockM;
  if (row0 >= seq.seqlen_q) return;

  const uint32_t shared = uint32_t(__cvta_generic_to_shared(smem));
  StreamLoader<T, typename Traits::TileQ, Traits::kThreads>(params.q, work.batch_index, seq.q0, row0, work.head,
                                                            params.head_dim)
      .load(shared, seq.seqlen_q - row0);
  const FwdPlace at = FwdPlace::of<Traits>(params, work, seq);
  FwdMainloop<Traits> main(params, at, smem, shared);
  auto& general = *reinterpret_cast<General<T>*>(smem + Traits::kSmem.general);
  static_assert(sizeof(FwdPlace) <= Traits::kSmem.general - Traits::kSmem.place);
  static_assert(sizeof(General<T>) <= Traits::kSmem.references - Traits::kSmem.general);
  if (threadIdx.x == 0) {
    main.place = at;
    if constexpr (Traits::kGeneral) general = General<T>(params, Band::of(params, seq), work.batch_index, work.head);
  }
  main.run(general);
  write_results(main, general, main.place.work, main.place.seq, smem);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.kBlocksPerSm)
    fwd_kernel(const __grid_constant__ FwdParams params) {
#if __CUDA_ARCH__ >= 800
  fwd_tile_of_queries<Traits>(params);
#endif
}

}  // namespace flash::sm80
