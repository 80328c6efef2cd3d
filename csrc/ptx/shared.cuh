// ld.shared, st.shared: by address, where a pointer would have to be made of the window's base first.
#pragma once

#include <cstdint>

namespace flash::ptx {

__device__ __forceinline__ void ld_shared(float& x, float& y, uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
template <class T>
__device__ __forceinline__ void ld_shared(const T*& x, const T*& y, uint32_t address) {
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(x), "=l"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Sixteen bytes.
__device__ __forceinline__ void ld_shared(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace flash::ptx
