// prmt: bytes of registers put together anew.
#pragma once

#include <cstdint>

namespace flash::ptx {

// Bytes of ones or zeros: byte i of the result repeats the sign of byte signs >> 4 i & 7. __byte_perm has no such
// selector.
__device__ __forceinline__ uint32_t signs_of_bytes(uint32_t x, uint32_t signs) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(x), "r"(signs | 0x8888u));
  return mask;
}
// All ones in each half whose sign (bit 15, bit 31) is set, zeros in the other.
__device__ __forceinline__ uint32_t signs_of_halves(uint32_t x) { return signs_of_bytes(x, 0x3311); }

}  // namespace flash::ptx
