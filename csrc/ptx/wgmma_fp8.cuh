// wgmma on e4m3 operands: 64 x N x 32 products of a warpgroup, fp32 accumulators in registers (sm_90a).
//
// Both operands are K-major: there is no transposition. Accumulators lie as in wgmma.cuh. A in registers:
//   a[r]     four packed numbers: row 16w + l/4 + 8*(r%2), k 4*(l%4) + {0..3} + 16*(r/2)
// which are not the columns that a thread has of an accumulator: sm90/fp8_layout.h reorders the k of the other operand.
#pragma once

#include "wgmma.cuh"

namespace flash::ptx {

// Four numbers rounded to e4m3, the first in the lowest byte. Larger ones than 448 become 448.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t x;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

// Shared-memory descriptor of a K-major tile that is one k-step wide, in the 32-byte swizzle: rows of 32 bytes, one
// after the other; in every second group of four rows the two halves are exchanged. Tiles start at multiples of 256.
struct NarrowDescriptor {
  uint32_t low;

  __device__ __forceinline__ static NarrowDescriptor of(uint32_t address) {
    return {((address & 0x3FFFF) >> 4) | 1u << 16};
  }
  __device__ __forceinline__ NarrowDescriptor operator+(int bytes) const { return {low + uint32_t(bytes >> 4)}; }
  __device__ __forceinline__ NarrowDescriptor opaque() const {
    uint32_t x = low;
    asm("" : "+r"(x));
    return {x};
  }
  __device__ __forceinline__ uint64_t bits() const {
    constexpr uint32_t kHigh = 0xC0000000u | (256 >> 4);  // 256 bytes from one group of 8 rows to the next
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(kHigh));
    return d;
  }
};

// d (64 x 2 kRegs) = A B + (accumulate ? d : 0), A and B in shared memory. A is 64 x 32, B is 32 x 2 kRegs.
template <int kRegs>
__device__ __forceinline__ void wgmma_e4m3_ss(float (&d)[kRegs], Descriptor a, Descriptor b, bool accumulate) {
  static_assert(kRegs % 8 == 0 && kRegs <= 128, "columns: multiples of 16 up to 256");
#define FLASH_SS(e, n, A, B, P, _4, _5, _6, _7, _8)                                                   \
  if constexpr (kRegs == 8 * e)                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                 "k32.f32.e4m3.e4m3 {" FLASH_TEXT_##e "}, %" #A ", %" #B ", p, 1, 1;\n}"              \
                 : FLASH_REGS_##e                                                                     \
                 : "l"(a.bits()), "l"(b.bits()), "r"(int(accumulate)));
  FLASH_EACH_N(FLASH_SS)
#undef FLASH_SS
}

// The same with A in registers and B in a narrow tile.
template <int kRegs>
__device__ __forceinline__ void wgmma_e4m3_rs(float (&d)[kRegs], const uint32_t (&a)[4], NarrowDescriptor b,
                                              bool accumulate) {
  static_assert(kRegs % 8 == 0 && kRegs <= 128, "columns: multiples of 16 up to 256");
#define FLASH_RS(e, n, A0, A1, A2, A3, B, P, _7, _8)                                                                   \
  if constexpr (kRegs == 8 * e)                                                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                  \
                 "k32.f32.e4m3.e4m3 {" FLASH_TEXT_##e "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1;\n}" \
                 : FLASH_REGS_##e                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(int(accumulate)));
  FLASH_EACH_N(FLASH_RS)
#undef FLASH_RS
}

}  // namespace flash::ptx
