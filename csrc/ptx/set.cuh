// set: comparison of both halves of a register, as masks.
#pragma once

#include <cstdint>

namespace flash::ptx {

// All ones in each half where |a| >= b as 16-bit floats or either is NaN; else zeros. One instruction.
__device__ __forceinline__ uint32_t set_abs_geu_f16x2(uint32_t a, uint32_t b) {
  uint32_t mask;
  asm("{\n.reg .b32 t;\nabs.f16x2 t, %1;\nset.geu.u32.f16x2 %0, t, %2;\n}" : "=r"(mask) : "r"(a), "r"(b));
  return mask;
}

}  // namespace flash::ptx
