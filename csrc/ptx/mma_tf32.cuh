// mma.sync: the warp's 16x8 += 16x8 * 8x8 product of TF32 numbers with fp32 accumulators (sm_80 and later). Operands
// are fp32 bits, of which the 13 lowest are ignored. With g = lane / 4 and q = lane % 4 a lane holds
//   a[4]    A (16 x 8): (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4)
//   b[2]    B (8 x 8):  (q, g), (q + 4, g)
//   d0..d3  D (16 x 8): (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1)
#pragma once

#include <cstdint>

namespace flash::ptx {

__device__ __forceinline__ void mma_m16n8k8_tf32(float& d0, float& d1, float& d2, float& d3, const float (&a)[4],
                                                 const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

}  // namespace flash::ptx
