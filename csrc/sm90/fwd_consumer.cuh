// A consumer warpgroup: 64 query rows of each tile.
//
// The blocks of all tiles are one stream: the last P V of a tile is issued together with the first Q K^T of the next,
// and its O is stored under that product.
#pragma once

#include "fwd_block.cuh"

namespace flash::sm90 {

template <class Traits, class Block = FwdBlock<Traits>>
class FwdConsumer : Block {
 public:
  __device__ __forceinline__ FwdConsumer(const FwdArgs& a, const FwdSmem<Traits>& s, int w) : Block(a, s, w) {}

  __device__ __forceinline__ void run() {
    this->first_turn();
    wait_tile();
    if (!tile().valid()) return;
    run_tiles();
  }

 private:
  using Block::arrive, Block::begin_turn, Block::end_turn, Block::pass_over_k, Block::pass_over_v;
  using Block::blocks, Block::acc_s, Block::issue_qk, Block::issue_pv, Block::release_k_and_q;
  using Block::smem, Block::warpgroup, Block::q, Block::k, Block::v, Block::slot;
  using Block::tile, Block::wait_tile, Block::kTileSlots, Block::kFullLoop;

  __device__ __forceinline__ const BlockRange& blocks_of_tile() const { return smem.work(slot.stage).blocks; }

  // From the tile at hand to the last.
  __device__ __forceinline__ void run_tiles() {
    open_tile();
    begin_turn();
    issue_qk();
    end_turn();
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc_s);
#pragma unroll 1
    while (true) {  // here acc_s = Q K^T of the tile's first block
      int n_block = blocks.end - 1;
      release_k_and_q(n_block);
      pass_over_v(blocks_of_tile().end - blocks.end);
      this->first_softmax(n_block);
      bool first_pv = true;
#pragma unroll 1
      while (n_block > blocks.begin) {
        if (!kFullLoop || blocks.needs_mask(n_block - 1)) {
          this->template step<true>(--n_block, first_pv);
          first_pv = false;
        } else if constexpr (kFullLoop) {
#pragma unroll 1
          do {
            this->template step<false>(--n_block, first_pv);
            first_pv = false;
          } while (n_block > blocks.full_begin);
        }
      }
      q.template advance<Traits::kQStages>();

      const bool idle = this->is_idle();
      const int done_slot = slot.stage, pass_left = idle ? 0 : blocks.begin - blocks_of_tile().begin;
      if (idle) drain_tile();
      pass_over_k(pass_left);
      slot.template advance<kTileSlots>();
      wait_tile();
      if (!idle) ptx::mbarrier_wait(smem.v_full(v.stage), v.parity);
      if (!tile().valid()) {
        issue_pv(first_pv);
        this->template finish_pv<0>(!idle);
        pass_over_v(pass_left);
        store(done_slot);
        break;
      }
      open_tile();
      begin_turn();
      issue_pv(first_pv);
      issue_qk();
      end_turn();
      this->template finish_pv<1>(!idle);
      pass_over_v(pass_left);
      store(done_slot);
      ptx::wgmma_wait_group<0>();
      ptx::pin(acc_s);
    }
  }

  // A warpgroup without rows works on the tile's first block only, for nothing, and hands back the buffers of the
  // others. Its last P V may read a V that is being replaced: nothing of it is stored.
  __device__ __forceinline__ void drain_tile() {
    pass_over_v(1);
#pragma unroll 1
    for (int i = blocks.begin - blocks_of_tile().begin; i > 0; i--) {
      pass_over_k(1);
      pass_over_v(1);
    }
  }

  // Passes over blocks that only other warpgroups see; waits for Q and the first K.
  __device__ __forceinline__ void open_tile() {
    const auto& work = smem.work(slot.stage);
    blocks = work.of_warpgroup[warpgroup];
    this->begin_tile();
    pass_over_k(blocks_of_tile().end - blocks.end);
    ptx::mbarrier_wait(smem.q_full(q.stage, warpgroup), q.parity);
    ptx::mbarrier_wait(smem.k_full(k.stage), k.parity);
  }

  __device__ __forceinline__ void store(int done_slot) {
    const Tile& t = smem.work(done_slot).tile;
    this->store_tile(t);
    __syncwarp();
    arrive(smem.tile_empty(done_slot));
  }
};

}  // namespace flash::sm90
