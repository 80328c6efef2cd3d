// V^T of the blocks of keys that tiles begin with. Transposers would have it ready several microseconds after K, so the
// consumers, who have nothing else to do until then, turn it around: at the kernel's start each warpgroup claims a job,
// and each of its warps takes a unit.
#pragma once

#include "../ptx/named_barrier.cuh"
#include "fp8_turn.cuh"
#include "fp8_unit_loader.cuh"

namespace flash::sm90 {

// By the transposers, so that consumers have the jobs that are needed first.
template <class Traits>
__device__ __forceinline__ void wait_for_first_claims() {
  ptx::bar_sync(9, 32 * (Traits::kWarpgroups + Traits::kTransposers));
}

// By the value loader: until then the units may lie where it loads V to.
template <class Traits>
__device__ __forceinline__ void wait_for_first_values() {
  ptx::bar_sync(8, 32 * (Traits::kConsumerWarps + 1));
}

template <class Traits>
__device__ __forceinline__ void turn_first_values(const Fp8Args& args, const Fp8Smem<Traits>& smem, int warpgroup) {
  using Smem = Fp8Smem<Traits>;
  const Fp8Counters counters(args);
  const int warp = threadIdx.x / 32 % 4;  // of the warpgroup
  if (warp == 0) {
    if (threadIdx.x % 32 == 0) smem.first_job(warpgroup) = atomicAdd(counters.claimed(), 1);
    __syncwarp();
    ptx::bar_arrive(9, 32 * (Traits::kWarpgroups + Traits::kTransposers));
  }
  ptx::bar_sync(4 + warpgroup, 128);
  const uint32_t job = smem.first_job(warpgroup);
  if (job < args.value_jobs.count) {
    const ValueJob found = find_job<Traits>(args, job);
    if (found.keys.batch >= 0 && warp < Traits::kJobUnits) {
      const ValueUnit unit = find_unit<Traits>(args, found, job, warp);
      const int buffer = Smem::kFirst + (4 * warpgroup + warp) * Smem::kRawBytes;
      const uint32_t address = smem.address + buffer;
      copy_unit<Traits>(args.params, unit, address);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      __syncwarp();
      const int columns = columns_of<Traits>(unit);
      turn_values<4>(address, address, columns);
      __syncwarp();
      store_unit(place_of<Traits>(args, unit), smem.base + buffer, columns * kUnitKeys);
      ptx::fence_proxy_async();  // the copy engine overwrites the buffer
    }
    ptx::bar_sync(4 + warpgroup, 128);
    if (threadIdx.x % 128 == 0) report_job(counters, found.tile);
  }
  ptx::bar_arrive(8, 32 * (Traits::kConsumerWarps + 1));
}

}  // namespace flash::sm90
