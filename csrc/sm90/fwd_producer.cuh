// The producer warp: claims tiles and loads Q, K and V with the copy engine. Lane 0 issues, all lanes keep together.
#pragma once

#include "../ptx/fence.cuh"
#include "../ptx/tma.cuh"
#include "fwd_scheduler.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdProducer {
 public:
  __device__ __forceinline__ FwdProducer(const FwdArgs& a, const FwdSmem<Traits>& s)
      : args(a), smem(s), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (lane == 0) {
      ptx::prefetch_tensormap(&args.map_q);
      ptx::prefetch_tensormap(&args.map_k);
      ptx::prefetch_tensormap(&args.map_v);
    }
    if constexpr (Traits::kValueLoaders > 0) return load_q_and_k();
    // One stream of blocks over all tiles, K one block ahead of V: the first K of a tile is loaded before the last V of
    // the tile before it, and the tile is claimed before that.
    FwdScheduler<Traits> scheduler(args);
    Tile tile = scheduler.first();
    BlockRange blocks = publish(tile);
    if (tile.valid()) {
      load_k(tile, blocks.end - 1);
      load_q(tile);
    }
    while (tile.valid()) {
      int n_block = blocks.end - 1;
      for (; n_block > blocks.begin; n_block--) {
        if (n_block == blocks.begin + 1) scheduler.claim();  // the wait for buffers hides its latency
        load_k(tile, n_block - 1);
        load_v(tile, n_block);
      }
      if (blocks.count() == 1) scheduler.claim();
      const Tile next = scheduler.next();
      const BlockRange next_blocks = publish(next);
      if (next.valid()) {
        load_k(next, next_blocks.end - 1);
        if (Traits::kQStages > 1) load_q(next);
      }
      load_v(tile, n_block);
      // With one buffer Q waits for the end of the tile, which needs the last V.
      if (Traits::kQStages == 1 && next.valid()) load_q(next);
      tile = next;
      blocks = next_blocks;
    }
    scheduler.finish();
  }

 private:
  static constexpr int kBlockN = Traits::kBlockN;

  const FwdArgs& args;
  const FwdSmem<Traits> smem;
  const int lane;
  RingState q{1}, k{1}, v{1}, slot{1}, landed{0};

  // Where another warp loads V.
  __device__ __forceinline__ void load_q_and_k() {
    FwdScheduler<Traits> scheduler(args);
    for (Tile tile = scheduler.first();; tile = scheduler.next()) {
      const BlockRange blocks = publish(tile);
      if (!tile.valid()) break;
      load_k(tile, blocks.end - 1);
      load_q(tile);
      if (blocks.count() == 1) scheduler.claim();
#pragma unroll 1
      for (int n_block = blocks.end - 2; n_block >= blocks.begin; n_block--) {
        if (n_block == blocks.begin) scheduler.claim();  // the wait for a buffer hides its latency
        load_k(tile, n_block);
      }
    }
    scheduler.finish();
  }

  // Tells the consumers; returns the blocks to load.
  __device__ __forceinline__ BlockRange publish(const Tile& tile) {
    const Band band{tile.seqlen_q, tile.seqlen_k, args.params.window_left, args.params.window_right};
    const int row0 = tile.m_block * Traits::kBlockM;
    const BlockRange blocks = tile_blocks(band, row0, Traits::kBlockM, kBlockN);
    const BlockRange of_lane =
        warpgroup_blocks(band, blocks, row0 + 64 * lane, kBlockN, {Traits::kMaxSkipLeft, Traits::kMaxSkipRight});
    auto& work = smem.work(slot.stage);
    ptx::mbarrier_wait(smem.tile_empty(slot.stage), slot.parity);
    if (lane == 0) {
      work.tile = tile;
      work.blocks = blocks;
    }
    if (lane < Traits::kWarpgroups) {
      work.of_warpgroup[lane] = of_lane;
      ptx::mbarrier_arrive(smem.tile_full(slot.stage));
    }
    slot.template advance<FwdSmem<Traits>::kTileSlots>();
    return blocks;
  }

  // Coordinates are worked out before the wait: from a free buffer to the copy nothing but its issue may take time.
  __device__ __forceinline__ void load_q(const Tile& tile) {
    const int head = tile.head * args.step_q.head, batch = tile.batch * args.step_q.batch;
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; w++) {
      const uint32_t full = smem.q_full(q.stage, w), buffer = smem.q(q.stage, w);
      const int row = tile.q0 + tile.m_block * Traits::kBlockM + w * 64;
      ptx::mbarrier_wait(smem.q_empty(q.stage, w), q.parity);
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(full, Traits::kQBytes);
#pragma unroll
        for (int panel = 0; panel < Traits::kPanels; panel++)
          ptx::tma_load(buffer + panel * 64 * 128, &args.map_q, full, panel * Traits::kPanelColumns, row, head, batch);
      }
    }
    q.template advance<Traits::kQStages>();
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int n_block) {
    const uint32_t full = smem.k_full(k.stage), buffer = smem.k(k.stage);
    const int row = tile.k0 + n_block * kBlockN, head = tile.head_kv * args.step_k.head,
              batch = tile.batch * args.step_k.batch;
    ptx::mbarrier_wait(smem.k_empty(k.stage), k.parity);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, Traits::kKBytes);
#pragma unroll
      for (int panel = 0; panel < Traits::kPanels; panel++)
        ptx::tma_load(buffer + panel * kBlockN * 128, &args.map_k, full, panel * Traits::kPanelColumns, row, head,
                      batch);
    }
    k.template advance<Traits::kStages>();
  }

  __device__ __forceinline__ void load_v(const Tile& tile, int n_block) {
    const int valid = tile.seqlen_k - n_block * kBlockN;  // rows of the block that belong to the sequence
    const bool zero_tail = args.zero_v_tail && valid < kBlockN;
    const uint32_t full = zero_tail ? smem.v_landed() : smem.v_full(v.stage), buffer = smem.v(v.stage);
    const int row = tile.k0 + n_block * kBlockN, head = tile.head_kv * args.step_v.head,
              batch = tile.batch * args.step_v.batch;
    ptx::mbarrier_wait(smem.v_empty(v.stage), v.parity);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, Traits::kVBytes);
#pragma unroll
      for (int panel = 0; panel < Traits::kPanelsV; panel++)
        ptx::tma_load(buffer + panel * kBlockN * 128, &args.map_v, full, panel * 64, row, head, batch);
    }
    if (zero_tail) zero_rows_from(valid < 0 ? 0 : valid);
    v.template advance<Traits::kStages>();
  }

  // Rows behind the sequence hold anything, and 0 * NaN would reach the result. The consumers' barrier opens
  // afterwards.
  __device__ __forceinline__ void zero_rows_from(int first) {
    ptx::mbarrier_wait(smem.v_landed(), landed.parity);
    landed.template advance<1>();
    for (int panel = 0; panel < Traits::kPanelsV; panel++) {
      uint4* rows = reinterpret_cast<uint4*>(smem.base + FwdSmem<Traits>::kV + v.stage * Traits::kVBytes) +
                    panel * kBlockN * 8;  // (block_n, 8) of 16 bytes
      for (int i = first * 8 + lane; i < kBlockN * 8; i += 32) rows[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem.v_full(v.stage));
    __syncwarp();
  }
};

}  // namespace flash::sm90
