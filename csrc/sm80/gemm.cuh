// The two products of a warp: scores from a Q and a K tile, and probabilities times V.
#pragma once

#include "../attn/numeric.cuh"
#include "fragment.cuh"

namespace flash::sm80 {

// acc_s (16 * kRowTiles, kBlockN) = rows row0 ... of Q times K^T. q_regs: Q's fragments if they were loaded before the loop.
template <class T, class TileQ, class TileK, bool kQInRegs, int kRowTiles, int kKSteps>
__device__ __forceinline__ void gemm_qk(float (&acc_s)[kRowTiles][TileK::kRows / 8][4],
                                        const uint32_t (&q_regs)[kRowTiles][kKSteps][4], const Fragments<TileQ>& q,
                                        int row0, const Fragments<TileK>& k) {
#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int n = 0; n < TileK::kRows / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc_s[m][n][i] = 0.f;
#pragma unroll
  for (int d = 0; d < TileK::kCols / 16; d++) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
      if constexpr (kQInRegs) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[m][i] = q_regs[m][d][i];
      } else {
        q.load_a(a[m], row0 + 16 * m, 16 * d);
      }
    }
#pragma unroll
    for (int n = 0; n < TileK::kRows / 16; n++) {
      uint32_t b[4];
      k.load_b(b, 16 * n, 16 * d);
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
        ptx::mma_m16n8k16<T>(acc_s[m][2 * n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc_s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc_o (16 * kRowTiles, head_dim_v) += p (16 * kRowTiles, 16) times the 16 rows of V that start at row0.
template <class T, class TileV, int kRowTiles>
__device__ __forceinline__ void gemm_pv(float (&acc_o)[kRowTiles][TileV::kCols / 8][4], const uint32_t (&p)[kRowTiles][4],
                                        const Fragments<TileV>& v, int row0) {
#pragma unroll
  for (int d = 0; d < TileV::kCols / 16; d++) {
    uint32_t b[4];
    v.load_b_trans(b, row0, 16 * d);
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
      ptx::mma_m16n8k16<T>(acc_o[m][2 * d], p[m], b[0], b[1]);
      ptx::mma_m16n8k16<T>(acc_o[m][2 * d + 1], p[m], b[2], b[3]);
    }
  }
}

// 16 columns of an accumulator, packed into the A fragment of the next product.
template <class T>
__device__ __forceinline__ void pack_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack2<T>(left[0], left[1]);
  a[1] = pack2<T>(left[2], left[3]);
  a[2] = pack2<T>(right[0], right[1]);
  a[3] = pack2<T>(right[2], right[3]);
}

}  // namespace flash::sm80
