// bar: the block's sixteen hardware barriers. 0 belongs to __syncthreads; `threads` counts those that sync and arrive.
#pragma once

namespace flash::ptx {

__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash::ptx
