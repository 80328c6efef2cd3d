// The dQ warpgroup: for every step dQ (kBlockM x kHeadDim) = dS K, added to the workspace straight from registers.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/named_barrier.cuh"
#include "../ptx/red.cuh"
#include "../ptx/wgmma.cuh"
#include "bwd_exact_sum.cuh"
#include "bwd_loads.cuh"

namespace flash::sm90 {

// Where a warp's band of one step is added up.
struct DqBand {
  float* dst;            // this lane's first numbers, as floats
  float scale0, scale1;  // deterministic only: of its two rows, negative where the sums are integers

  __device__ __forceinline__ static DqBand of(const BwdArgs& args, int64_t band) {
    const int lane = threadIdx.x % 32;
    DqBand b{args.dq_accum + band * (args.p.head_dim * kBandRows) + lane * 4, 1.f, 1.f};
    if (args.p.deterministic) {
      b.scale0 = args.row_scale[band * kBandRows + lane / 4];
      b.scale1 = args.row_scale[band * kBandRows + lane / 4 + 8];
    }
    return b;
  }

  // Four numbers of eight columns. Rounding comes right before its addition: the next ones are rounded while this one
  // waits in the queue of additions.
  template <bool kExact>
  __device__ __forceinline__ void add_group(float* at, float* x) const {
    if constexpr (kExact) {
      x[0] = round_to_unit(x[0], scale0), x[1] = round_to_unit(x[1], scale0);
      x[2] = round_to_unit(x[2], scale1), x[3] = round_to_unit(x[3], scale1);
    }
    ptx::red_add_v4(at, x[0], x[1], x[2], x[3]);
  }

  // Of kCount / 4 groups only `groups` exist. The usual case has no branches: until the last addition is issued the
  // next product cannot start.
  template <bool kExact, int kCount>
  __device__ __forceinline__ void add_floats(float* at, float (&acc)[kCount], int groups) const {
    if (kCount / 4 <= groups) {
#pragma unroll
      for (int g = 0; g < kCount / 4; g++) add_group<kExact>(at + g * 128, acc + 4 * g);
      return;
    }
#pragma unroll
    for (int g = 0; g < kCount / 4; g++) {
      if (g >= groups) break;
      add_group<kExact>(at + g * 128, acc + 4 * g);
    }
  }

  // acc: 16 rows x 2 kCount columns, from group `first` of eight columns on, of `groups` that exist.
  template <int kCount>
  __device__ __forceinline__ void add(const BwdArgs& args, float (&acc)[kCount], int first, int groups) const {
    float* const at = dst + first * 128;
    if (!args.p.deterministic) {
      add_floats<false>(at, acc, groups - first);
    } else if (signbit(scale0)) {
      int32_t* sums = reinterpret_cast<int32_t*>(at) - threadIdx.x % 32 * 3;
#pragma unroll
      for (int g = 0; g < kCount / 4; g++) {
        if (first + g < groups) add_integers(sums, acc + 4 * g, -scale0, -scale1);
        sums += 128;
        asm volatile("" : "+l"(sums));  // one address at a time
      }
    } else {
      add_floats<true>(at, acc, groups - first);
    }
  }
};

// K of unused keys becomes zeros where it holds something else: dS is zero there, but 0 * NaN is NaN. The main
// warpgroups read either, and mask it.
template <class Traits>
__device__ __forceinline__ void clear_unused_keys(const BwdArgs& args, const BwdBlock& block, uint32_t k) {
  const int used = max_of(0, block.seq.seqlen_k - block.n_block * Traits::kBlockN);
  if (used >= Traits::kBlockN || !may_hold_unused_keys(args.p)) return;
  zero_rows<128>(k, Traits::kPanels, Traits::kBlockN, used, threadIdx.x % 128);
  ptx::bar_sync(3, 128);
}

// The steps of one tile of keys. `index` counts the steps of all tiles.
template <class Traits>
__device__ __forceinline__ void add_tile_to_dq(const BwdArgs& args, const BwdBlock& block, BwdSmem<Traits> smem,
                                               uint32_t keys, int& index) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kColumns = Traits::kTile.dq_columns;
  constexpr int kPieces = Traits::kHeadDim / kColumns;
  static_assert(kBlockM == 64 && kPieces * kColumns == Traits::kHeadDim);
  const int warp = threadIdx.x / 32 % 4;
  const int groups = args.p.head_dim / 8, bands = ceil_div(block.seq.seqlen_q, kBandRows);
  const ptx::Descriptor k = ptx::Descriptor::of(keys, kBlockN * 128);
  float acc[kColumns / 2];
#pragma unroll 1
  for (int head = 0; head < block.steps.group; head++) {
    const int64_t band0 = (block.head_kv * block.steps.group + head) * args.bands + block.band0;
#pragma unroll 1
    for (int m = block.steps.begin; m < block.steps.end(); m++, index++) {
      const int slot = index % Traits::kDsStages;
      const int my_band = m * (kBlockM / kBandRows) + warp;
      const DqBand dq = DqBand::of(args, band0 + min_of(my_band, bands - 1));
      ptx::mbarrier_wait(smem.ds_full(slot), phase_of<Traits::kDsStages>(index));
      // For dS, of which wgmma is the only reader through this proxy: here it waits for nothing, while each main warp
      // would wait until its own stores are done (3 %).
      ptx::fence_proxy_async();
      const ptx::Descriptor a = ptx::Descriptor::of(smem.ds(slot)).opaque(), b = k.opaque();
#pragma unroll
      for (int piece = 0; piece < kPieces; piece++) {
        ptx::pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockN / 16; i++)
          ptx::wgmma_ss<typename Traits::T, ptx::Major::kK, ptx::Major::kMN>(
              acc, a + ptx::k_major_step(i, kBlockM),
              b + (piece * (kColumns / 64) * kBlockN * 128 + ptx::mn_major_step(i)), i != 0);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        ptx::pin(acc);
        if (piece == kPieces - 1 && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.ds_empty(slot));
        if (my_band < bands) dq.add(args, acc, piece * (kColumns / 8), groups);
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void run_dq(const BwdArgs& args, BwdSmem<Traits> smem, uint8_t* shared) {
  ptx::griddepcontrol_wait();  // for row_scale, which is read ahead of every barrier
  int index = 0;
#pragma unroll 1
  for (int tile = 0;; tile++) {
    const BwdBlock& block = wait_for_tile(smem, shared, tile);
    if (block.empty) break;
    const int kv_stage = tile % Traits::kKvStages;
    ptx::mbarrier_wait(smem.kv_full(kv_stage), phase_of<Traits::kKvStages>(tile));
    clear_unused_keys<Traits>(args, block, smem.k(kv_stage));
    add_tile_to_dq<Traits>(args, block, smem, smem.k(kv_stage), index);
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(smem.kv_empty(kv_stage));
      ptx::mbarrier_arrive(smem.tile_empty(tile));
    }
  }
}

}  // namespace flash::sm90
