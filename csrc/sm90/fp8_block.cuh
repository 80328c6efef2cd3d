// One block of keys of an FP8 consumer warpgroup: S = Q K^T, P = softmax(S), O += P V, with S, P and O in registers.
#pragma once

#include "fp8_epilogue.cuh"
#include "fp8_general.cuh"
#include "fwd_consumer_pipeline.cuh"

namespace flash::sm90 {

template <class Traits>
class Fp8Block : protected FwdConsumerPipeline<Traits> {
 protected:
  using Pipeline = FwdConsumerPipeline<Traits>;
  using Pipeline::args, Pipeline::smem, Pipeline::warpgroup, Pipeline::q, Pipeline::k, Pipeline::v;
  using Pipeline::arrive, Pipeline::release_k, Pipeline::release_v, Pipeline::begin_turn, Pipeline::end_turn;
  using Pipeline::tile, Pipeline::band, Pipeline::place;

  static constexpr int kBlockN = Traits::kBlockN, kSteps = kBlockN / 32;
  static constexpr bool kFullLoop = !Traits::kGeneral;  // blocks without a mask have a loop of their own

  const ptx::Descriptor desc_q, desc_k;
  const ptx::NarrowDescriptor desc_v;
  BlockRange blocks;         // of this warpgroup, inside those of the tile
  float acc_s[kBlockN / 2];  // (64, block_n)
  Fp8Totals<Traits> totals;  // O
  uint32_t p[kSteps][4];     // (64, block_n)
  Fp8Softmax<Traits> softmax;
  float scale;  // of Q K^T to scores, in the tile at hand

  __device__ __forceinline__ Fp8Block(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : Pipeline(a, s, w),
        desc_q(ptx::Descriptor::of(s.q(0, w))),
        desc_k(ptx::Descriptor::of(s.k(0))),
        desc_v(ptx::NarrowDescriptor::of(s.v(0))) {}

  __device__ __forceinline__ void begin_tile() {
    scale = args.params.softmax_scale * Descales::of(args.params, tile()).qk;
    softmax.scale = softmax_factor<Traits>(args.params, scale);
  }

  __device__ __forceinline__ void issue_qk() {
    const ptx::Descriptor a = (desc_q + q.stage * Traits::kWarpgroups * Traits::kQBytes).opaque();
    const ptx::Descriptor b = (desc_k + k.stage * Traits::kKBytes).opaque();
    ptx::pin(acc_s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 32; i++)
      ptx::wgmma_e4m3_ss(acc_s, a + ptx::k_major_step(i, 64), b + ptx::k_major_step(i, kBlockN), i != 0);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_pv(bool first) {
    const bool is_new = first || Traits::kTwoLevels;
    const ptx::NarrowDescriptor b = (desc_v + v.stage * Traits::kVBytes).opaque();
    ptx::pin(totals.acc_o);
    ptx::pin(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; i++)
      ptx::wgmma_e4m3_rs(totals.acc_o, p[i], b + i * kUnitKeys * Traits::kHeadDimV, i != 0 || !is_new);
    ptx::wgmma_commit_group();
  }

  // P V is complete when at most kPending younger products are not.
  template <int kPending>
  __device__ __forceinline__ void finish_pv(bool release = true) {
    ptx::wgmma_wait_group<kPending>();
    ptx::pin(totals.acc_o);
    ptx::pin(p);
    if (release) release_v();
    totals.add_block();
  }

  // Q K^T of block n_block is complete: of the tile's last block, Q is free as well.
  __device__ __forceinline__ void release_k_and_q(int n_block) {
    release_k();
    if (n_block == blocks.begin) arrive(smem.q_empty(q.stage, warpgroup));
  }

  __device__ __forceinline__ void prepare_scores(int n_block) {
    if constexpr (Traits::kGeneral) modify_scores<Traits>(acc_s, args.params, scale);
    if (blocks.needs_mask(n_block)) mask_block<Traits>(acc_s, band(), place(tile()), n_block, blocks);
  }

  // P of the tile's first block.
  __device__ __forceinline__ void first_softmax(int n_block) {
    prepare_scores(n_block);
    softmax.first(acc_s, p);
    totals.clear();
  }

  // S and P of block n_block, while P of the block before it, still in p, is multiplied with its V. The maximum is
  // found under that product; the vote on it is also what keeps the compiler from moving the wait in front of it. The
  // exponentials are worked out behind it, in two copies: in one the multiplications of O fill their gaps.
  template <bool kMasked>
  __device__ __forceinline__ void step(int n_block, bool first_pv) {
    ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
    begin_turn();
    issue_qk();
    ptx::mbarrier_wait(smem.v_full(v.stage), v.parity);  // under Q K^T: even where V is there it takes time to see it
    issue_pv(first_pv);
    end_turn();
    ptx::wgmma_wait_group<1>();
    ptx::pin(acc_s);
    release_k_and_q(n_block);
    if constexpr (kMasked || Traits::kGeneral) prepare_scores(n_block);
    const Rise rise = softmax.raise(acc_s);
    finish_pv<0>();
    if (rise.rises) {
      totals.scale(rise.correction);
      softmax.set_p(acc_s, p);
    } else {
      softmax.set_p(acc_s, p);
    }
  }

  __device__ __forceinline__ void store_tile(const Tile& t) {
    store_fp8_tile<Traits>(totals, softmax, args, t, place(t));
  }
};

}  // namespace flash::sm90
