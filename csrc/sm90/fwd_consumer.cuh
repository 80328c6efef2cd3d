// A consumer warpgroup: 64 query rows of each tile, S and O in registers.
//
// The blocks of all tiles are one stream: the last P V of a tile is issued together with the first Q K^T of the next,
// and its O is stored under that product.
#pragma once

#include "../ptx/named_barrier.cuh"
#include "../ptx/wgmma.cuh"
#include "fwd_epilogue.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdConsumer {
 public:
  __device__ __forceinline__ FwdConsumer(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : args(a),
        smem(s),
        warpgroup(w),
        lane(threadIdx.x % 32),
        row_in_tile(64 * w + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        desc_q(ptx::Descriptor::of(s.q(0, w))),
        desc_k(ptx::Descriptor::of(s.k(0))),
        desc_v(ptx::Descriptor::of(s.v(0), kBlockN * 128)) {
    softmax.scale = Traits::kGeneral ? kLog2e : a.scale_log2;
  }

  __device__ __forceinline__ void run() {
    if (kTile.pingpong && warpgroup == Traits::kWarpgroups - 1)
      ptx::bar_arrive(1, 256);  // the first turn is warpgroup 0's
    wait_tile();
    if (!tile().valid()) return;
    open_tile();
    begin_turn();
    issue_qk();
    end_turn();
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_s);
#pragma unroll 1
    while (true) {  // here acc_s = Q K^T of the tile's first block
      release_k();
      pass_over_v(tile_blocks_end - blocks.end);
      int n_block = blocks.end - 1;
      prepare_scores(n_block);
      softmax.first(acc_s, p);
      finish_p(n_block);
      bool first_pv = true;
#pragma unroll 1
      while (n_block > blocks.begin) {
        n_block--;
        step(n_block, first_pv);
        first_pv = false;
      }
      release_q();

      const int done_slot = slot.stage, pass_left = blocks.begin - tile_blocks_begin;
      pass_over_k(pass_left);
      slot.template advance<kTileSlots>();
      wait_tile();
      ptx::mbarrier_wait(smem.v_full(v.stage), v.parity);
      if (!tile().valid()) {
        begin_turn();
        issue_pv(first_pv);
        end_turn();
        finish_pv<0>();
        store(done_slot);
        break;
      }
      open_tile();
      begin_turn();
      issue_pv(first_pv);
      issue_qk();
      end_turn();
      finish_pv<1>();
      pass_over_v(pass_left);
      store(done_slot);
      ptx::wgmma_wait_group<0>();
      ptx::pin(acc_s);
    }
  }

 private:
  static constexpr FwdTile kTile = Traits::kTile;
  static constexpr int kBlockN = Traits::kBlockN, kGroups = kBlockN / 16;
  static constexpr int kStages = Traits::kStages, kTileSlots = FwdSmem<Traits>::kTileSlots;

  const FwdArgs& args;
  const FwdSmem<Traits> smem;
  const int warpgroup, lane, row_in_tile;
  const ptx::Descriptor desc_q, desc_k, desc_v;
  RingState q{0}, k{0}, v{0}, slot{0};

  BlockRange blocks;  // of this warpgroup, inside those of the tile
  int tile_blocks_begin, tile_blocks_end;
  float acc_s[kBlockN / 2];            // (64, block_n)
  float acc_o[Traits::kHeadDimV / 2];  // (64, head_dim_v)
  uint32_t p[kGroups][4];              // (64, block_n) in 16 bit
  FwdSoftmax<Traits> softmax;

  // ---- tiles

  __device__ __forceinline__ const Tile& tile() const { return smem.tile(slot.stage); }
  __device__ __forceinline__ void wait_tile() const { ptx::mbarrier_wait(smem.tile_full(slot.stage), slot.parity); }
  __device__ __forceinline__ static Band band_of(const FwdParams& params, const Tile& t) {
    return {t.seqlen_q, t.seqlen_k, params.window_left, params.window_right};
  }
  __device__ __forceinline__ FragmentPlace place(const Tile& t) const {
    return {t.m_block * Traits::kBlockM + row_in_tile, 2 * (lane % 4)};
  }

  // The blocks to visit; passes over those that only other warpgroups see; waits for Q and the first K.
  __device__ __forceinline__ void open_tile() {
    const Tile& t = tile();
    const Band band = band_of(args.params, t);
    const int row0 = t.m_block * Traits::kBlockM;
    const BlockRange all = tile_blocks(band, row0, Traits::kBlockM, kBlockN);
    blocks = warpgroup_blocks(band, all, row0 + 64 * warpgroup, kBlockN, {Traits::kMaxSkipLeft, Traits::kMaxSkipRight});
    tile_blocks_begin = all.begin;
    tile_blocks_end = all.end;
    pass_over_k(all.end - blocks.end);
    ptx::mbarrier_wait(smem.q_full(q.stage, warpgroup), q.parity);
    ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
  }

  __device__ __forceinline__ void store(int done_slot) const {
    const Tile& t = smem.tile(done_slot);
    store_tile<Traits>(acc_o, softmax, args, t, place(t));
    __syncwarp();
    arrive(smem.tile_empty(done_slot));
  }

  // ---- buffers

  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void release_q() {
    arrive(smem.q_empty(q.stage, warpgroup));
    q.template advance<Traits::kQStages>();
  }
  __device__ __forceinline__ void release_k() {
    arrive(smem.k_empty(k.stage));
    k.template advance<kStages>();
  }
  __device__ __forceinline__ void release_v() {
    arrive(smem.v_empty(v.stage));
    v.template advance<kStages>();
  }
  // Every warpgroup takes as many turns as the others.
  __device__ __forceinline__ void pass_over_k(int count) {
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
      release_k();
      begin_turn();
      end_turn();
    }
  }
  __device__ __forceinline__ void pass_over_v(int count) {
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      ptx::mbarrier_wait(smem.v_full(v.stage), v.parity);
      release_v();
    }
  }

  // ---- products

  __device__ __forceinline__ void begin_turn() const {
    if constexpr (kTile.pingpong) ptx::bar_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (kTile.pingpong) ptx::bar_arrive(1 + (warpgroup + 1) % Traits::kWarpgroups, 256);
  }

  __device__ __forceinline__ void issue_qk() {
    const ptx::Descriptor a = (desc_q + q.stage * Traits::kWarpgroups * Traits::kQBytes).opaque();
    const ptx::Descriptor b = (desc_k + k.stage * Traits::kKBytes).opaque();
    ptx::pin(acc_s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 16; i++)
      ptx::wgmma_ss<typename Traits::Element>(acc_s, a + ptx::k_major_step(i, 64), b + ptx::k_major_step(i, kBlockN),
                                              i != 0);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_pv(bool first) {
    const ptx::Descriptor b = (desc_v + v.stage * Traits::kVBytes).opaque();
    ptx::pin(acc_o);
    ptx::pin(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGroups; i++)
      ptx::wgmma_rs<typename Traits::Element>(acc_o, p[i], b + ptx::mn_major_step(i), i != 0 || !first);
    ptx::wgmma_commit_group();
  }

  // P V is complete when at most kPending younger products are not.
  template <int kPending>
  __device__ __forceinline__ void finish_pv() {
    ptx::wgmma_wait_group<kPending>();
    ptx::pin(acc_o);
    ptx::pin(p);
    release_v();
  }

  // ---- one block

  __device__ __forceinline__ void prepare_scores(int n_block) {
    if constexpr (Traits::kGeneral) modify_scores<Traits>(acc_s, args.params, tile(), place(tile()), n_block);
    if (blocks.needs_mask(n_block))
      mask_block<Traits>(acc_s, band_of(args.params, tile()), place(tile()), n_block, blocks);
  }

  __device__ __forceinline__ void finish_p(int n_block) {
    if constexpr (Traits::kGeneral) {
      if (args.params.dropout_p != 0.f) drop<Traits>(p, args.params, tile(), place(tile()), n_block);
    }
  }

  // S and P of block n_block, while P of the block before it, still in p, is multiplied with its V.
  __device__ __forceinline__ void step(int n_block, bool first_pv) {
    if constexpr (kTile.order == Order::kOverlap) {
      ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
      ptx::mbarrier_wait(smem.v_full(v.stage), v.parity);
      begin_turn();
      issue_qk();
      issue_pv(first_pv);
      end_turn();
      ptx::wgmma_wait_group<1>();
      ptx::pin(acc_s);
      release_k();
      prepare_scores(n_block);
      softmax_overlapped();
    } else {
      ptx::mbarrier_wait(smem.v_full(v.stage), v.parity);
      ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
      begin_turn();
      issue_pv(first_pv);
      issue_qk();
      end_turn();
      finish_pv<1>();
      ptx::wgmma_wait_group<0>();
      ptx::pin(acc_s);
      release_k();
      prepare_scores(n_block);
      float block_sum[2] = {};
      softmax_rest<0>(softmax.optimistic(), block_sum, p);
    }
    finish_p(n_block);
  }

  // The first groups of P are computed before the wait for P V, into registers of their own. The vote on their sums is
  // also what keeps the compiler from moving the wait in front of them.
  __device__ __forceinline__ void softmax_overlapped() {
    constexpr int kEarly = kTile.early;
    uint32_t early[kEarly > 0 ? kEarly : 1][4];
    float block_sum[2] = {};
    bool optimistic = softmax.optimistic();
    if (kEarly > 0 && optimistic) {
      softmax.template exponentials<0, kEarly>(acc_s, early, block_sum);
      optimistic = !softmax.too_large(block_sum);
    }
    finish_pv<0>();
    softmax_rest<kEarly>(optimistic, block_sum, early);
  }

  // The groups from kEarly on; the whole block with its maximum if the reference does not hold.
  template <int kEarly, int kSize>
  __device__ __forceinline__ void softmax_rest(bool optimistic, float (&block_sum)[2],
                                               const uint32_t (&early)[kSize][4]) {
    if (optimistic) {
      softmax.template exponentials<kEarly, kGroups>(acc_s, p, block_sum);
      optimistic = !softmax.too_large(block_sum);
      if (optimistic) {
        softmax.add(block_sum);
#pragma unroll
        for (int i = 0; i < kEarly * 4; i++) p[i / 4][i % 4] = early[i / 4][i % 4];
      }
    }
    if (!optimistic) softmax.exact(acc_s, p, acc_o);
  }
};

}  // namespace flash::sm90
