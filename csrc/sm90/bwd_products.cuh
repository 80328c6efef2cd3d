// The four products of 64 keys, each issued as one group of wgmmas. The keys are the rows of all of them:
//   S^T  = K Q^T     64 x kBlockM     dP^T = V dO^T    64 x kBlockM
//   dV  += P^T dO    64 x head_dim    dK  += dS^T Q    64 x head_dim, with P^T and dS^T straight from registers, but
//                                                       for dK of pairs with ds_shared (bwd_tile.h)
#pragma once

#include "../ptx/matrix.cuh"
#include "../ptx/wgmma.cuh"
#include "bwd_args.cuh"

namespace flash::sm90 {

// 64 rows of K or V as register operands, kDepth columns.
template <int kDepth>
struct KeyFragments {
  uint32_t a[kDepth / 16][4];

  // From a tile of kKeyRows rows, row `row0` on.
  template <int kKeyRows>
  __device__ __forceinline__ void load(uint32_t tile, int row0) {
    const int lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) {
      const int chunk = (2 * (k % 4) + lane / 16) ^ (lane % 8);  // of 16 bytes, in the 128-byte swizzle
      ptx::ldmatrix_x4(a[k], tile + (k / 4) * kKeyRows * 128 + row * 128 + chunk * 16);
    }
  }
};

// acc (64 x kBlockM) = keys (64 x kDepth) queries (kBlockM x kDepth)^T, both K-major. Keys: 64 rows of a tile of
// kKeyRows. `accumulate`: += instead.
template <class T, int kDepth, int kKeyRows, int kCount>
__device__ __forceinline__ void issue_scores(float (&acc)[kCount], ptx::Descriptor keys, ptx::Descriptor queries,
                                             bool accumulate = false) {
  const ptx::Descriptor a = keys.opaque(), b = queries.opaque();
  ptx::pin(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 16; k++)
    ptx::wgmma_ss<T>(acc, a + ptx::k_major_step(k, kKeyRows), b + ptx::k_major_step(k, 2 * kCount),
                     accumulate || k != 0);
  ptx::wgmma_commit_group();
}

template <class T, int kDepth, int kCount>
__device__ __forceinline__ void issue_scores(float (&acc)[kCount], const KeyFragments<kDepth>& keys,
                                             ptx::Descriptor queries) {
  const ptx::Descriptor b = queries.opaque();
  ptx::pin(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 16; k++)
    ptx::wgmma_rs<T, ptx::Major::kK>(acc, keys.a[k], b + ptx::k_major_step(k, 2 * kCount), k != 0);
  ptx::wgmma_commit_group();
}

// acc (64 x columns) += a (64 x kBlockM) queries (kBlockM x columns, MN-major), by `issue(part of acc, k, queries)` for
// 16 queries from 16 k on. At most 128 columns at a time: ptxas refuses 256 in a thread block of 512 threads, which
// start with 128 registers each.
template <int kBlockM, int kCount, class Issue>
__device__ __forceinline__ void issue_in_pieces(float (&acc)[kCount], ptx::Descriptor queries, Issue issue) {
  constexpr int kPieces = kCount > 96 ? 2 : 1, kPiece = kCount / kPieces;
  ptx::wgmma_fence();
#pragma unroll
  for (int piece = 0; piece < kPieces; piece++)
#pragma unroll
    for (int k = 0; k < kBlockM / 16; k++)
      issue(reinterpret_cast<float (&)[kPiece]>(acc[piece * kPiece]), k,
            queries + (piece * (kPiece / 32) * kBlockM * 128 + ptx::mn_major_step(k)));
  ptx::wgmma_commit_group();
}

// `a` in registers.
template <class T, int kCount, int kSteps>
__device__ __forceinline__ void issue_gradients(float (&acc)[kCount], uint32_t (&fragments)[kSteps][4],
                                                ptx::Descriptor queries) {
  const ptx::Descriptor b = queries.opaque();
  ptx::pin(acc);
  ptx::pin(fragments);
  issue_in_pieces<kSteps * 16>(
      acc, b, [&](auto& part, int k, ptx::Descriptor rows) { ptx::wgmma_rs<T>(part, fragments[k], rows, true); });
}

// The transpose of `a` (kBlockM x 64) in a panel of shared memory, where store_transposed puts it.
template <class T, int kBlockM, int kCount>
__device__ __forceinline__ void issue_gradients_from_shared(float (&acc)[kCount], ptx::Descriptor panel,
                                                            ptx::Descriptor queries) {
  const ptx::Descriptor a = panel.opaque(), b = queries.opaque();
  ptx::pin(acc);
  issue_in_pieces<kBlockM>(acc, b, [&](auto& part, int k, ptx::Descriptor rows) {
    ptx::wgmma_ss<T, ptx::Major::kMN, ptx::Major::kMN>(part, a + ptx::mn_major_step(k), rows, true);
  });
}

// Fragments of a transposed tile -> [kBlockM][64] of this warpgroup's panel, swizzled: for dS the A operand of dQ. The
// address is that of this lane's row for the first 16 queries.
__device__ __forceinline__ uint32_t transposed_address(uint32_t panel) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  return panel + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16;
}

template <int kSteps>
__device__ __forceinline__ void store_transposed(uint32_t panel, const uint32_t (&fragments)[kSteps][4]) {
  const uint32_t address = transposed_address(panel);
#pragma unroll
  for (int k = 0; k < kSteps; k++) ptx::stmatrix_x4_trans(address + k * 16 * 128, fragments[k]);
}

}  // namespace flash::sm90
