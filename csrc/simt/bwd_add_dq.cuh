// dq from the kernel for dk and dv, where repeatable bits are not asked for: each CTA adds its keys' share of dq = dS k
// to global memory with atomic additions. That saves a kernel which would compute P and dS once more.
#pragma once

#include "../ptx/red.cuh"
#include "kernel.cuh"

namespace flash::simt {

// sdS: (kBlockN queries, kBlockM keys), from the transposed tiles of all warps.
template <class T>
__device__ __forceinline__ void share_ds(float* sdS, const float (&ds)[T::kR][T::kS], int warp_row) {
  constexpr int kStride = ds_stride(T::kBlockM);
#pragma unroll
  for (int r = 0; r < T::kR; r++)
#pragma unroll
    for (int c = 0; c < T::kS; c++) sdS[T::Math::score_col(c) * kStride + warp_row + T::Math::row(r)] = ds[r][c];
}

// Adds dS k * softmax_scale to rows m0 ... m0 + kBlockN - 1 of dq of one head. A warp owns 16 of the rows, and a share
// of the columns.
template <class T>
__device__ __forceinline__ void add_dq(const BwdParams& p, const SeqInfo& seq, int batch_index, int head, int m0,
                                       const float* sdS, const float* sK) {
  using Math = typename T::Math;
  constexpr int kRowGroups = T::kBlockN / 16, kColGroups = T::kTile.warps / kRowGroups,
                kCols = T::kHeadDim / kColGroups;
  constexpr int kStride = ds_stride(T::kBlockM), kAtOnce = min_of(Math::template kAtOnce<2>, kCols / 4);
  static_assert(kRowGroups * kColGroups == T::kTile.warps && kCols % (4 * kAtOnce) == 0);
  const Rows dq = Rows::of(p.dq, p, batch_index, seq.q0, seq.seqlen_q, head, p.head_dim);
  const int row0 = T::warp() % kRowGroups * 16, first_col = T::warp() / kRowGroups * kCols;
#pragma unroll
  for (int col0 = first_col, i = 0; i < kCols; col0 += 4 * kAtOnce, i += 4 * kAtOnce) {
    float sum[2][kAtOnce] = {};
    Math::template product<T::kBlockM, kStride, T::kStride>(sum, sdS + row0 * kStride, sK + col0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = m0 + row0 + Math::row(r);
      float* to = reinterpret_cast<float*>(dq.ptr) + row * dq.stride + col0;
#pragma unroll
      for (int c = 0; c < kAtOnce; c++)
        if (row < dq.rows && col0 + Math::out_col(c) < dq.cols)
          ptx::red_add(to + Math::out_col(c), sum[r][c] * p.softmax_scale);
    }
  }
}

}  // namespace flash::simt
