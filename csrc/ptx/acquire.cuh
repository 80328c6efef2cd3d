// ld.acquire, red.release: a counter in global memory through which blocks hand over what they wrote.
#pragma once

#include <cstdint>

namespace flash::ptx {

__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* address) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

__device__ __forceinline__ void red_release(uint32_t* address, uint32_t x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void red_release_max(uint32_t* address, uint32_t x) {
  asm volatile("red.release.gpu.global.max.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

}  // namespace flash::ptx
