// red: additions to global memory that return nothing.
#pragma once

namespace flash::ptx {

__device__ __forceinline__ void red_add(float* address, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}
// Sixteen aligned bytes at once (sm_90).
__device__ __forceinline__ void red_add_v4(float* address, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

}  // namespace flash::ptx
