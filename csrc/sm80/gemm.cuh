// The two products of a warp: scores from a Q and a K tile, and probabilities times V. The backward exchanges the
// sides.
#pragma once

#include "../attn/numeric.cuh"
#include "fragment.cuh"

namespace flash::sm80 {

// acc_s (16 * kRowTiles, 8 * kN) = rows row0 ... of Q times the transpose of the first rows of K. q_regs: Q's fragments
// if they were loaded before the loop. Both fragments are read one product ahead, K's one by one: registers are short.
template <class T, class TileQ, class TileK, int kRowTiles, int kN, int kKSteps>
__device__ __forceinline__ void gemm_qk(float (&acc_s)[kRowTiles][kN][4],
                                        const uint32_t (&q_regs)[kRowTiles][kKSteps][4], const Fragments<TileQ>& q,
                                        int row0, const Fragments<TileK>& k) {
#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc_s[m][n][i] = 0.f;
  constexpr int kSteps = TileK::kCols / 16, kCols = kN / 2;
  constexpr bool kQInRegs = kKSteps == kSteps;
  uint32_t a[2][kRowTiles][4], b[2][4];
  const auto load_q = [&](int d) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
      if constexpr (kQInRegs) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[d % 2][m][i] = q_regs[m][d][i];
      } else {
        q.load_a(a[d % 2][m], row0 + 16 * m, 16 * d);
      }
    }
  };
  load_q(0);
  k.load_b(b[0], 0, 0);
#pragma unroll
  for (int d = 0; d < kSteps; d++) {
#pragma unroll
    for (int n = 0; n < kCols; n++) {
      const int step = d * kCols + n;
      if (n == 0 && d + 1 < kSteps) load_q(d + 1);
      if (step + 1 < kSteps * kCols) k.load_b(b[(step + 1) % 2], 16 * ((step + 1) % kCols), 16 * ((step + 1) / kCols));
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
        ptx::mma_m16n8k16<T>(acc_s[m][2 * n], a[d % 2][m], b[step % 2][0], b[step % 2][1]);
        ptx::mma_m16n8k16<T>(acc_s[m][2 * n + 1], a[d % 2][m], b[step % 2][2], b[step % 2][3]);
      }
    }
  }
}

// acc_o (16 * kRowTiles, 8 * kN) += p (16 * kRowTiles, 16) times the 16 rows of V that start at row0, columns from
// col0 on.
template <class T, class TileV, int kRowTiles, int kN>
__device__ __forceinline__ void gemm_pv(float (&acc_o)[kRowTiles][kN][4], const uint32_t (&p)[kRowTiles][4],
                                        const Fragments<TileV>& v, int row0, int col0 = 0) {
  uint32_t b[2][4];
  v.load_b_trans(b[0], row0, col0);
#pragma unroll
  for (int d = 0; d < kN / 2; d++) {
    if (d + 1 < kN / 2) v.load_b_trans(b[(d + 1) % 2], row0, col0 + 16 * (d + 1));
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
      ptx::mma_m16n8k16<T>(acc_o[m][2 * d], p[m], b[d % 2][0], b[d % 2][1]);
      ptx::mma_m16n8k16<T>(acc_o[m][2 * d + 1], p[m], b[d % 2][2], b[d % 2][3]);
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

// An accumulator, packed, to a tile: its first column to column col0. From sm_90 on.
template <class T, class Tile, int kRowTiles, int kColTiles>
__device__ __forceinline__ void store_packed(const float (&acc)[kRowTiles][kColTiles][4], const Fragments<Tile>& tile,
                                             int col0) {
#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int g = 0; g < kColTiles / 2; g++) {
      uint32_t a[4];
      pack_a<T>(a, acc[m][2 * g], acc[m][2 * g + 1]);
      tile.store_a(a, 16 * m, col0 + 16 * g);
    }
}

}  // namespace flash::sm80
