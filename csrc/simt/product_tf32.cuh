// A warp's matrix products on tensor cores with the accuracy of fp32: x = high + low, both TF32, and
// x * y = low * high + high * low + high * high. Only mma.sync m16n8k8 (sm_80 and newer) is used.
// The order of the summed index is free as long as both operands agree; it is chosen so that every lane reads 16 bytes at a
// time and the probabilities go from one product to the next without leaving their registers.
#pragma once

#include "product_fma.cuh"

namespace flash::simt {

struct Tf32x3 : ThisLane<MmaLanes> {
  static constexpr Product kProduct = Product::kTf32x3;

  // What TF32 lacks of x: its 13 lowest bits, which the tensor core ignores in an operand.
  __device__ static float low(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xFFFFE000u); }

  // d (16 x 8) += a (16 x 8) * b (8 x 8).   a: (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4); b: (q, g), (q + 4, g)
  __device__ static void mma(float& d0, float& d1, float& d2, float& d3, const float (&a)[4], const float (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#endif
  }

  // The high part of b is x itself: its two numbers come as a pair from shared memory. The four of a do not lie together:
  // x - low says the same as x and is computed once, where a move would be repeated for every product.
  struct A {
    float low[4], high[4];
    __device__ A() {}
    __device__ A(float x0, float x1, float x2, float x3)
        : low{Tf32x3::low(x0), Tf32x3::low(x1), Tf32x3::low(x2), Tf32x3::low(x3)},
          high{x0 - low[0], x1 - low[1], x2 - low[2], x3 - low[3]} {}
  };
  struct B {
    float low[2], high[2];
    __device__ B(float x0, float x1) : low{Tf32x3::low(x0), Tf32x3::low(x1)}, high{x0, x1} {}
  };

  // The small terms first, so that they are not rounded away.
  __device__ static void mma_3x(float& d0, float& d1, float& d2, float& d3, const A& a, const B& b) {
    mma(d0, d1, d2, d3, a.low, b.high);
    mma(d0, d1, d2, d3, a.high, b.low);
    mma(d0, d1, d2, d3, a.high, b.high);
  }

  __device__ static float get(const float4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

  // The tensor core truncates its sums, which over many products would add up: a few are summed from 0, then added with
  // rounding.
  template <int kR, int kC>
  __device__ static void add(float (&acc)[kR][kC], const float (&sum)[kR][kC]) {
#pragma unroll
    for (int r = 0; r < kR; r++)
#pragma unroll
      for (int c = 0; c < kC; c++) acc[r][c] += sum[r][c];
  }

  // acc[m][n] += sum over k of a[m][k] * b[n][k]. Of 32 k, lane q reads 8q ... 8q + 7: 16-byte pieces 2q and 2q + 1 of a row.
  // Two rows (g, g + 1) are read together, and rows are 4 floats out of step, so 8 lanes hit 8 different bank groups.
  template <int kStride, int kR, int kC>
  __device__ static void scores(float (&acc)[kR][kC], const float* a, const float* b, int depth) {
    a += lane_row() * kStride + 8 * lane_col();
    b += lane_row() * kStride + 8 * lane_col();
#pragma unroll 1
    for (int k = 0; k < depth; k += 32) {
      float sum[kR][kC] = {};
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        float4 a4[kR];
#pragma unroll
        for (int r = 0; r < kR; r++) a4[r] = load_shared_4(a + r * kLaneRows * kStride + k + half);
#pragma unroll
        for (int c = 0; c < kC; c += 2) {
          const float4 b4 = load_shared_4(b + c / 2 * 8 * kStride + k + half);
#pragma unroll
          for (int step = 0; step < 4; step += 2) {
            const B b_step(get(b4, step), get(b4, step + 1));
#pragma unroll
            for (int r = 0; r < kR; r += 2)
              mma_3x(sum[r][c], sum[r][c + 1], sum[r + 1][c], sum[r + 1][c + 1],
                     A(get(a4[r], step), get(a4[r + 1], step), get(a4[r], step + 1), get(a4[r + 1], step + 1)), b_step);
          }
        }
      }
      add(acc, sum);
    }
  }

  // acc[m][d] += sum over n of p[m][n] * b[n][d]. Columns 2q, 2q + 1 of p are slots q and q + 4 of the summed index, which is
  // where mma wants its left operand. The lanes' reads of rows 2q, columns g fall into 32 different banks.
  template <int kStride, int kR, int kC, int kP>
  __device__ static void accumulate(float (&acc)[kR][kC], const float (&p)[kR][kP], const float* b, float*) {
    constexpr int kAtOnce = 8;  // columns per lane: 4 independent products, whose latency overlaps
    b += 2 * lane_col() * kStride + lane_row();
    A a[kR / 2][kP / 2];
#pragma unroll
    for (int r = 0; r < kR; r += 2)
#pragma unroll
      for (int n = 0; n < kP; n += 2) a[r / 2][n / 2] = A(p[r][n], p[r + 1][n], p[r][n + 1], p[r + 1][n + 1]);
#pragma unroll
    for (int c0 = 0; c0 < kC; c0 += kAtOnce) {
      float sum[kR][kAtOnce] = {};
#pragma unroll
      for (int n = 0; n < kP; n += 2) {
#pragma unroll
        for (int c = 0; c < kAtOnce; c += 2) {
          const float* at = b + 4 * n * kStride + 4 * (c0 + c);
          const B b_step(at[0], at[kStride]);
#pragma unroll
          for (int r = 0; r < kR; r += 2)
            mma_3x(sum[r][c], sum[r][c + 1], sum[r + 1][c], sum[r + 1][c + 1],
                   a[r / 2][n / 2], b_step);
        }
      }
#pragma unroll
      for (int r = 0; r < kR; r++)
#pragma unroll
        for (int c = 0; c < kAtOnce; c++) acc[r][c0 + c] += sum[r][c];
    }
  }
};

}  // namespace flash::simt
