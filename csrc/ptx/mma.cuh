// mma.sync: the warp's 16x8 += 16x16 * 16x8 product of 16-bit elements with fp32 accumulators (sm_80 and later).
// With g = lane / 4 and t = lane % 4 a lane holds
//   a[4]  A (16 x 16): a[i] = columns 2t + {0, 1} + 8 * (i / 2) of row g + 8 * (i % 2)
//   b[2]  B (16 x 8):  b[i] = rows 2t + {0, 1} + 8 * i of column g
//   d[4]  D (16 x 8):  d[i] = row g + 8 * (i / 2), column 2t + i % 2
// so that two neighbouring D fragments, packed, are one A fragment.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash::ptx {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (__is_same(T, __half)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace flash::ptx
