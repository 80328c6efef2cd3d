// A warp's matrix products with fp32 FMA: every lane adds up outer products of what it reads from shared memory, 16
// bytes at a time.
#pragma once

#include "lanes.h"
#include "tile.h"

namespace flash::simt {

__device__ __forceinline__ float4 load_shared_4(const float* p) { return *reinterpret_cast<const float4*>(p); }

struct Fma : ThisLane<FmaLanes> {
  static constexpr Product kProduct = Product::kFma;

  // acc[m][n] += sum over k of a[m][k] * b[n][k]. a, b: rows of shared tiles, `stride` floats apart, depth floats long.
  template <int kStride, int kR, int kC>
  __device__ static void scores(float (&acc)[kR][kC], const float* a, const float* b, int depth) {
    a += lane_row() * kStride;
    b += lane_col() * kStride;
#pragma unroll 1
    for (int k = 0; k < depth; k += 4) {
      float4 a4[kR];
#pragma unroll
      for (int r = 0; r < kR; r++) a4[r] = load_shared_4(a + r * kLaneRows * kStride + k);
#pragma unroll
      for (int c = 0; c < kC; c++) {
        const float4 b4 = load_shared_4(b + c * kLaneCols * kStride + k);
#pragma unroll
        for (int r = 0; r < kR; r++) {
          acc[r][c] = fmaf(a4[r].x, b4.x, acc[r][c]);
          acc[r][c] = fmaf(a4[r].y, b4.y, acc[r][c]);
          acc[r][c] = fmaf(a4[r].z, b4.z, acc[r][c]);
          acc[r][c] = fmaf(a4[r].w, b4.w, acc[r][c]);
        }
      }
    }
  }

  // acc[m][d] += sum over n of p[m][n] * b[n][d]; p lies in the score layout in registers, b is a shared tile.
  // scratch: the warp's own (4 * kR, 8 * kP + 8), through which the lanes of a row exchange p.
  template <int kStride, int kR, int kC, int kP>
  __device__ static void accumulate(float (&acc)[kR][kC], const float (&p)[kR][kP], const float* b, float* scratch) {
    constexpr int kScratch = scratch_stride(kLaneCols * kP);
    float* mine = scratch + lane_row() * kScratch;
    __syncwarp();  // the lanes have read what the last product left here
#pragma unroll
    for (int r = 0; r < kR; r++)
#pragma unroll
      for (int c = 0; c < kP; c++) mine[r * kLaneRows * kScratch + score_col(c)] = p[r][c];
    __syncwarp();
    b += 4 * lane_col();
#pragma unroll 1
    for (int n = 0; n < kLaneCols * kP; n += 4) {
      float4 p4[kR];
#pragma unroll
      for (int r = 0; r < kR; r++) p4[r] = load_shared_4(mine + r * kLaneRows * kScratch + n);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int c = 0; c < kC; c += 4) {
          const float4 b4 = load_shared_4(b + (n + i) * kStride + 8 * c);
#pragma unroll
          for (int r = 0; r < kR; r++) {
            const float x = i == 0 ? p4[r].x : i == 1 ? p4[r].y : i == 2 ? p4[r].z : p4[r].w;
            acc[r][c + 0] = fmaf(x, b4.x, acc[r][c + 0]);
            acc[r][c + 1] = fmaf(x, b4.y, acc[r][c + 1]);
            acc[r][c + 2] = fmaf(x, b4.z, acc[r][c + 2]);
            acc[r][c + 3] = fmaf(x, b4.w, acc[r][c + 3]);
          }
        }
    }
  }
};

}  // namespace flash::simt
