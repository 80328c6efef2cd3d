// The warp that loads V^T: follows the producer from tile to tile, and waits for what other warps, here or in other
// blocks, are still turning around (fp8_transpose.cuh).
#pragma once

#include "../ptx/acquire.cuh"
#include "../ptx/fence.cuh"
#include "../ptx/named_barrier.cuh"
#include "../ptx/tma.cuh"
#include "fp8_counters.cuh"

namespace flash::sm90 {

template <class Traits>
class Fp8ValueLoader {
 public:
  __device__ __forceinline__ Fp8ValueLoader(const Fp8Args& a, const Fp8Smem<Traits>& s)
      : args(a), counters(a), smem(s), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(smem.tile_full(slot.stage), slot.parity);
      const auto& work = smem.work(slot.stage);
      const bool valid = work.tile.valid();
      const int first = work.tile.head_kv * int(args.value_tiles.per_head) +
                        args.tiles<Traits>().first(work.tile.batch, work.tile.k0);
      const int begin = first + work.blocks.begin;
      const int end = first + work.blocks.end;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(smem.tile_empty(slot.stage));
      slot.template advance<Fp8Smem<Traits>::kTileSlots>();
      if (!valid) break;
#pragma unroll 1
      for (int index = end - 1; index >= begin; index--) load(index);
    }
    counters.finish<Traits>();
  }

 private:
  const Fp8Args& args;
  const Fp8Counters counters;
  const Fp8Smem<Traits> smem;
  const int lane;
  RingState v{1}, slot{0};
  int looked_at = -1;
  uint32_t ready = 0;  // bit i: tile looked_at - i is

  __device__ __forceinline__ void load(int index) {
    wait_until_ready(index);
    const uint32_t full = smem.v_full(v.stage), buffer = smem.v(v.stage);
    ptx::mbarrier_wait(smem.v_empty(v.stage), v.parity);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, Traits::kVBytes);
      ptx::bulk_load(buffer, args.values + int64_t(index) * Traits::kVBytes, full, Traits::kVBytes);
    }
    v.template advance<Traits::kStages>();
  }

  // Looks at the 31 tiles in front of it, which are needed next, as well.
  __device__ __forceinline__ void wait_until_ready(int index) {
    const uint32_t ahead = looked_at - index;
    if (ahead < 32 && (ready >> ahead & 1) != 0) return;
    looked_at = index;
    do {
      ready = __ballot_sync(~0u, index >= lane && ptx::ld_acquire(counters.ready() + index - lane) == Traits::kJobs);
    } while ((ready & 1) == 0);
    __syncwarp();  // what a lane has acquired, lane 0 may copy
    ptx::fence_proxy_async_global();
  }
};

}  // namespace flash::sm90
