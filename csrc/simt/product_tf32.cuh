// A warp's matrix products on tensor cores with the accuracy of fp32: x = high + low, both TF32, and
// x * y = low * high + high * low + high * high. Only mma.sync m16n8k8 (sm_80 and newer) is used.
// The order of the summed index is free as long as both operands agree; it is chosen so that every lane reads 16 bytes
// at a time and the probabilities go from one product to the next without leaving their registers.
#pragma once

#include "../ptx/mma_tf32.cuh"
#include "product_fma.cuh"

namespace flash::simt {

struct Tf32x3 : ThisLane<MmaLanes> {
  static constexpr Product kProduct = Product::kTf32x3;
  // Numbers per lane and row that are summed side by side: 8 independent products, whose latency overlaps.
  template <int kR>
  static constexpr int kAtOnce = 32 / kR;

  // kCount numbers of an operand as high + low. High is rounded to nearest, so that low has either sign and low * low,
  // which is left out, is 0 on average. The tensor core ignores the 13 lowest bits, so high need not be masked.
  template <int kCount>
  struct Operand {
    float high[kCount], low[kCount];
    __device__ Operand() {}  // not yet known
    template <class... Floats>
    __device__ explicit Operand(Floats... floats) {
      const float x[kCount] = {floats...};
#pragma unroll
      for (int i = 0; i < kCount; i++) {
        const uint32_t rounded = __float_as_uint(x[i]) + 0x1000u;
        high[i] = __uint_as_float(rounded);
        low[i] = x[i] - __uint_as_float(rounded & 0xFFFFE000u);
      }
    }
  };
  using A = Operand<4>;
  using B = Operand<2>;

  // The small terms first, so that they are not rounded away.
  __device__ static void mma_3x(float& d0, float& d1, float& d2, float& d3, const A& a, const B& b) {
#if __CUDA_ARCH__ >= 800
    ptx::mma_m16n8k8_tf32(d0, d1, d2, d3, a.low, b.high);
    ptx::mma_m16n8k8_tf32(d0, d1, d2, d3, a.high, b.low);
    ptx::mma_m16n8k8_tf32(d0, d1, d2, d3, a.high, b.high);
#endif
  }

  __device__ static float get(const float4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

  // Adds sum to columns c0 ... of acc. The tensor core truncates its sums, which over thousands of products would add
  // up: a few are summed from 0, then added with rounding.
  template <int kR, int kC, int kCols>
  __device__ static void add(float (&acc)[kR][kC], const float (&sum)[kR][kCols], int c0) {
#pragma unroll
    for (int r = 0; r < kR; r++)
#pragma unroll
      for (int c = 0; c < kCols; c++) acc[r][c0 + c] += sum[r][c];
  }

  // acc[m][n] += sum over k of a[m][k] * b[n][k]. Of 32 k, lane q reads 8q ... 8q + 7: 16-byte pieces 2q and 2q + 1 of
  // a row. Two rows (g, g + 1) are read together, and rows are 4 floats out of step, so 8 lanes hit 8 different bank
  // groups.
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
      add(acc, sum, 0);
    }
  }

  // acc[m][d] += sum over n of p[m][n] * b[n][d]. Columns 2q, 2q + 1 of p are slots q and q + 4 of the summed index,
  // which is where mma wants its left operand.
  template <int kStride, int kR, int kC, int kP>
  __device__ static void accumulate(float (&acc)[kR][kC], const float (&p)[kR][kP], const float* b, float*) {
    A a[kR / 2][kP / 2];
#pragma unroll
    for (int r = 0; r < kR; r += 2)
#pragma unroll
      for (int n = 0; n < kP; n += 2) a[r / 2][n / 2] = A(p[r][n], p[r + 1][n], p[r][n + 1], p[r + 1][n + 1]);
    constexpr int kCols = kAtOnce<kR>;
#pragma unroll
    for (int c0 = 0; c0 < kC; c0 += kCols) {
      float sum[kR][kCols] = {};
#pragma unroll
      for (int n = 0; n < kP; n += 2)
#pragma unroll
        for (int r = 0; r < kR; r += 2) row_of_products<kStride>(&sum[r], a[r / 2][n / 2], b + 4 * (n * kStride + c0));
      add(acc, sum, c0);
    }
  }

  // sum (16, 4 * kCols) = a (16, kDepth) * b (kDepth, 4 * kCols), both shared tiles.
  template <int kDepth, int kAStride, int kStride, int kCols>
  __device__ static void product(float (&sum)[2][kCols], const float* a, const float* b) {
    a += lane_row() * kAStride + 2 * lane_col();
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      const float2 top = *reinterpret_cast<const float2*>(a + k),
                   bottom = *reinterpret_cast<const float2*>(a + 8 * kAStride + k);
      row_of_products<kStride>(sum, A(top.x, bottom.x, top.y, bottom.y), b + k * kStride);
    }
  }

 private:
  // sum (16, 4 * kCols) += a (16, 8) * b (8, 4 * kCols). The lanes' reads of rows 2q, columns g of b fall into 32
  // different banks.
  template <int kStride, int kCols>
  __device__ static void row_of_products(float (*sum)[kCols], const A& a, const float* b) {
    b += 2 * lane_col() * kStride + lane_row();
#pragma unroll
    for (int c = 0; c < kCols; c += 2)
      mma_3x(sum[0][c], sum[0][c + 1], sum[1][c], sum[1][c + 1], a, B(b[4 * c], b[4 * c + kStride]));
  }
};

}  // namespace flash::simt
