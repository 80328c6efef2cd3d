// Warps that turn each block of V around: 8-bit wgmma takes both operands with the reduction dimension contiguous, so
// P V needs V^T (head_dim_v, block_n) in shared memory. They follow the producer from block to block.
#pragma once

#include "../ptx/fence.cuh"
#include "../ptx/matrix.cuh"
#include "fp8_traits.cuh"

namespace flash::sm90 {

template <class Traits>
class Fp8Transposer {
 public:
  __device__ __forceinline__ Fp8Transposer(const Fp8Smem<Traits>& s, int w)
      : smem(s), warp(w), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(smem.tile_full(slot.stage), slot.parity);
      const auto& work = smem.work(slot.stage);
      const bool valid = work.tile.valid();
      const int seqlen_k = work.tile.seqlen_k, begin = work.blocks.begin, end = work.blocks.end;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(smem.tile_empty(slot.stage));
      slot.template advance<Fp8Smem<Traits>::kTileSlots>();
      if (!valid) return;
      for (int n_block = end - 1; n_block >= begin; n_block--) turn(seqlen_k - n_block * kBlockN);
    }
  }

 private:
  static constexpr int kBlockN = Traits::kBlockN;

  const Fp8Smem<Traits> smem;
  const int warp, lane;
  RingState raw{0}, v{1}, slot{0};

  // One block; `keys` of it belong to the sequence.
  __device__ __forceinline__ void turn(int keys) {
    ptx::mbarrier_wait(smem.raw_full(raw.stage), raw.parity);
    ptx::mbarrier_wait(smem.v_empty(v.stage), v.parity);
    for (int group = warp; group < Traits::kHeadDimV / 16; group += Traits::kTransposers)
      turn_columns(smem.raw(raw.stage), smem.v(v.stage), group, keys);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(smem.v_full(v.stage));
      ptx::mbarrier_arrive(smem.raw_empty(raw.stage));
    }
    raw.template advance<Traits::kRawStages>();
    v.template advance<Traits::kStages>();
  }

  // 16 columns, 32 keys at a time. ldmatrix transposes pairs of columns; of two registers, one byte permutation makes
  // four keys of the even column, in the order of value_place, and another those of the odd one.
  __device__ __forceinline__ void turn_columns(uint32_t from, uint32_t to, int group, int keys) const {
    from += group / 8 * kBlockN * 128 + lane * 128 + ((group % 8 ^ lane % 8) << 4);
    to += value_chunk_offset(16 * group + lane % 8 * 2 + lane / 8 % 2, lane / 16);
#pragma unroll 2
    for (int key = 0; key < kBlockN; key += 32) {
      uint32_t pairs[4];  // keys key + 8i + 2 (lane % 4) + {0, 1}, columns 2 (lane / 4) + {0, 1} of the group
      ptx::ldmatrix_x4_trans(pairs, from + key * 128);
      uint32_t turned[4] = {__byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[0], pairs[1], 0x7531),
                            __byte_perm(pairs[2], pairs[3], 0x6420), __byte_perm(pairs[2], pairs[3], 0x7531)};
      if (keys < kBlockN) {  // what lies behind the sequence may be NaN, and 0 * NaN would reach the result
#pragma unroll
        for (int i = 0; i < 4; i++) turned[i] &= keys_below(keys - key - i / 2 * 16);
      }
      ptx::stmatrix_x4(to ^ key, turned);  // 32 keys are two chunks of 16 bytes
    }
  }

  // Of 16 keys, the bytes of this lane's four that are below `keys`.
  __device__ __forceinline__ uint32_t keys_below(int keys) const {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (value_key(lane % 4 * 4 + i) < keys) mask |= 0xFFu << 8 * i;
    return mask;
  }
};

}  // namespace flash::sm90
