// Forward for GPUs from sm_80 on: mma.sync, cp.async, one block per (batch, head, kBlockM queries), warps along
// queries.
#pragma once

#include "fwd_epilogue.cuh"
#include "schedule.h"

namespace flash::sm80 {

template <class Traits>
__device__ __forceinline__ void fwd_tile_of_queries(const FwdParams& params, const FwdSchedule& schedule) {
  using T = typename Traits::T;
  extern __shared__ __align__(128) char smem[];
  const Work work = schedule.work_of(blockIdx.x);
  const SeqInfo seq = SeqInfo::of(params, work.batch_index);
  const int row0 = work.tile * Traits::kBlockM;
  if (row0 >= seq.seqlen_q) return;

  const uint32_t shared = forget(uint32_t(__cvta_generic_to_shared(smem)));  // to find it anew takes longer
  RowLoader<T, typename Traits::TileQ, Traits::kThreads>(params.q, work.batch_index, seq.q0, work.head, seq.seqlen_q,
                                                         params.head_dim)
      .load(shared, row0);
  const FwdPlace at = FwdPlace::of<Traits>(params, work, schedule.group.quotient(work.head), seq);
  FwdMainloop<Traits> main(params, at, smem, shared);
  auto& general = *reinterpret_cast<General<T>*>(smem + Traits::kSmem.general);
  static_assert(sizeof(FwdPlace) <= Traits::kSmem.warps - Traits::kSmem.place);
  static_assert(sizeof(General<T>) <= Traits::kSmem.references - Traits::kSmem.general);
  static_assert(sizeof(RowBlocks) <= 32);
  if (threadIdx.x % 32 == 0)
    main.warp_blocks() =
        RowBlocks::of(Band::of(params, seq), row0 + main.warp_row0, Traits::kWarpRows, Traits::kBlockN);
  if (threadIdx.x == 0) {
    main.place = at;
    if constexpr (Traits::kGeneral) general = General<T>(params, Band::of(params, seq), work.batch_index, work.head);
  }
  main.run(general);
  write_results(main, general, main.place.work, main.place.seq, smem);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.kBlocksPerSm)
    fwd_kernel(const __grid_constant__ FwdParams params, const __grid_constant__ FwdSchedule schedule) {
#if __CUDA_ARCH__ >= 800
  fwd_tile_of_queries<Traits>(params, schedule);
#endif
}

}  // namespace flash::sm80
