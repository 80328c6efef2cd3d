// What a consumer warpgroup shares with the producer and the other warpgroups: buffers, tiles, turns to issue products.
#pragma once

#include "../ptx/named_barrier.cuh"
#include "fwd_scores.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdConsumerPipeline {
 protected:
  static constexpr int kStages = Traits::kStages, kTileSlots = FwdSmem<Traits>::kTileSlots;
  static constexpr bool kPingpong = Traits::kTile.pingpong;

  const FwdArgs& args;
  const FwdSmem<Traits> smem;
  const int warpgroup, lane, row_in_tile;
  RingState q{0}, k{0}, v{0}, slot{0};

  __device__ __forceinline__ FwdConsumerPipeline(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : args(a),
        smem(s),
        warpgroup(w),
        lane(threadIdx.x % 32),
        row_in_tile(64 * w + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {}

  // ---- the tile at hand

  __device__ __forceinline__ const Tile& tile() const { return smem.work(slot.stage).tile; }
  __device__ __forceinline__ bool is_idle() const {  // none of this warpgroup's rows exist
    return tile().m_block * Traits::kBlockM + 64 * warpgroup >= tile().seqlen_q;
  }
  __device__ __forceinline__ void wait_tile() const { ptx::mbarrier_wait(smem.tile_full(slot.stage), slot.parity); }
  __device__ __forceinline__ Band band() const {
    return {tile().seqlen_q, tile().seqlen_k, args.params.window_left, args.params.window_right};
  }
  __device__ __forceinline__ FragmentPlace place(const Tile& t) const {
    return {t.m_block * Traits::kBlockM + row_in_tile, 2 * (lane % 4)};
  }

  // ---- buffers

  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
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

  // ---- turns

  __device__ __forceinline__ void first_turn() const {  // is warpgroup 0's
    if (kPingpong && warpgroup == Traits::kWarpgroups - 1) ptx::bar_arrive(1, 256);
  }
  __device__ __forceinline__ void begin_turn() const {
    if constexpr (kPingpong) ptx::bar_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (kPingpong) ptx::bar_arrive(1 + (warpgroup + 1) % Traits::kWarpgroups, 256);
  }
};

}  // namespace flash::sm90
