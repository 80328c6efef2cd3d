// The four products of a main warpgroup, each issued as one group of wgmmas. 64 keys are the rows of all of them:
//   S^T  = K Q^T     64 x kBlockM     dP^T = V dO^T    64 x kBlockM
//   dV  += P^T dO    64 x kHeadDim    dK  += dS^T Q    64 x kHeadDim, with P^T and dS^T straight from registers
#pragma once

#include "../ptx/matrix.cuh"
#include "../ptx/wgmma.cuh"
#include "bwd_args.cuh"

namespace flash::sm90 {

// This warpgroup's 64 rows of K or V as register operands.
template <class Traits>
struct KeyFragments {
  uint32_t a[Traits::kHeadDim / 16][4];

  __device__ __forceinline__ void load(uint32_t tile, int warpgroup) {
    const int lane = threadIdx.x % 32, row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < Traits::kHeadDim / 16; k++) {
      const int chunk = (2 * (k % 4) + lane / 16) ^ (lane % 8);  // of 16 bytes, in the 128-byte swizzle
      ptx::ldmatrix_x4(a[k], tile + (k / 4) * Traits::kBlockN * 128 + row * 128 + chunk * 16);
    }
  }
};

// acc (64 x kBlockM) = keys (64 x kHeadDim) queries^T, both K-major
template <class Traits>
__device__ __forceinline__ void issue_scores(float (&acc)[Traits::kBlockM / 2], ptx::Descriptor keys,
                                             ptx::Descriptor queries) {
  const ptx::Descriptor a = keys.opaque(), b = queries.opaque();
  ptx::pin(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Traits::kHeadDim / 16; k++)
    ptx::wgmma_ss<typename Traits::T>(acc, a + ptx::k_major_step(k, Traits::kBlockN),
                                      b + ptx::k_major_step(k, Traits::kBlockM), k != 0);
  ptx::wgmma_commit_group();
}

template <class Traits>
__device__ __forceinline__ void issue_scores(float (&acc)[Traits::kBlockM / 2], const KeyFragments<Traits>& keys,
                                             ptx::Descriptor queries) {
  const ptx::Descriptor b = queries.opaque();
  ptx::pin(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Traits::kHeadDim / 16; k++)
    ptx::wgmma_rs<typename Traits::T, ptx::Major::kK>(acc, keys.a[k], b + ptx::k_major_step(k, Traits::kBlockM), k != 0);
  ptx::wgmma_commit_group();
}

// acc (64 x kHeadDim) += fragments (64 x kBlockM) queries (kBlockM x kHeadDim, MN-major)
template <class Traits, int kColumns>
__device__ __forceinline__ void issue_gradients(float (&acc)[kColumns / 2],
                                                uint32_t (&fragments)[Traits::kBlockM / 16][4],
                                                ptx::Descriptor queries) {
  const ptx::Descriptor b = queries.opaque();
  ptx::pin(acc);
  ptx::pin(fragments);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Traits::kBlockM / 16; k++)
    ptx::wgmma_rs<typename Traits::T>(acc, fragments[k], b + ptx::mn_major_step(k), true);
  ptx::wgmma_commit_group();
}

// dS^T fragments -> dS as [kBlockM][64] of this warpgroup's panel, swizzled: the A operand of dQ.
template <int kBlockM>
__device__ __forceinline__ void store_transposed(uint32_t panel, const uint32_t (&fragments)[kBlockM / 16][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  const uint32_t address = panel + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16;
#pragma unroll
  for (int k = 0; k < kBlockM / 16; k++) ptx::stmatrix_x4_trans(address + k * 16 * 128, fragments[k]);
}

}  // namespace flash::sm90
