// prmt: bytes of registers put together anew.
#pragma once

#include <cstdint>

namespace flash::ptx {

// All ones in each half whose sign (bit 15, bit 31) is set, zeros in the other. __byte_perm has no such selector.
__device__ __forceinline__ uint32_t signs_of_halves(uint32_t x) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(mask) : "r"(x));  // 8 + i: the sign of byte i
  return mask;
}

}  // namespace flash::ptx
