// The dQ warpgroup: for every step dQ (kBlockM x kHeadDim) = dS K, added to the fp32 workspace straight from registers.
#pragma once

#include "../ptx/mbarrier.cuh"
#include "../ptx/red.cuh"
#include "../ptx/wgmma.cuh"
#include "bwd_loads.cuh"

namespace flash::sm90 {

// One piece of 64 rows; a warp owns a band of 16. `dst`: this lane's four numbers of the piece's first eight columns.
template <int kCount>
__device__ __forceinline__ void add_to_accumulator(float* dst, const float (&acc)[kCount], int groups) {
#pragma unroll
  for (int g = 0; g < kCount / 4; g++)
    if (g < groups) ptx::red_add_v4(dst + g * 128, acc[4 * g], acc[4 * g + 1], acc[4 * g + 2], acc[4 * g + 3]);
}

template <class Traits>
__device__ __forceinline__ void run_dq(const BwdArgs& args, const BwdBlock& block, BwdSmem<Traits> smem) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kColumns = Traits::kTile.dq_columns;
  constexpr int kPieces = Traits::kHeadDim / kColumns;
  static_assert(kBlockM == 64 && kPieces * kColumns == Traits::kHeadDim);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int groups = args.p.head_dim / 8, bands = ceil_div(block.seq.seqlen_q, kBandRows);
  const ptx::Descriptor k = ptx::Descriptor::of(smem.k(), kBlockN * 128);
  int index = 0;
  float acc[kColumns / 2];
#pragma unroll 1
  for (int head = 0; head < block.steps.group; head++) {
    const int64_t band = (block.head_kv * block.steps.group + head) * args.bands + block.band0;
    float* const dst = args.dq_accum + band * groups * 128 + lane * 4;
#pragma unroll 1
    for (int m = block.steps.begin; m < block.steps.begin + block.steps.count; m++, index++) {
      const int slot = index % Traits::kDsStages;
      const int my_band = m * (kBlockM / kBandRows) + warp;
      ptx::mbarrier_wait(smem.ds_full(slot), phase_of<Traits::kDsStages>(index));
      if (threadIdx.x % 128 == 0) refill_queries<Traits>(args, block, smem, index);
      __syncwarp();
      const ptx::Descriptor a = ptx::Descriptor::of(smem.ds(slot)).opaque(), b = k.opaque();
#pragma unroll
      for (int piece = 0; piece < kPieces; piece++) {
        ptx::pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockN / 16; i++)
          ptx::wgmma_ss<typename Traits::T, ptx::Major::kK, ptx::Major::kMN>(
              acc, a + ptx::k_major_step(i, kBlockM), b + (piece * (kColumns / 64) * kBlockN * 128 + ptx::mn_major_step(i)),
              i != 0);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        ptx::pin(acc);
        if (piece == kPieces - 1 && lane == 0) ptx::mbarrier_arrive(smem.ds_empty(slot));
        if (my_band < bands)
          add_to_accumulator(dst + int64_t(my_band) * groups * 128 + piece * (kColumns / 8) * 128, acc,
                             groups - piece * (kColumns / 8));
      }
    }
  }
}

}  // namespace flash::sm90
