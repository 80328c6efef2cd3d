// The stream of key blocks where pairs of warps share rows: a warp waits for others at the barriers of
// fwd_barriers.cuh alone.
#pragma once

#include "fwd_mainloop.cuh"

namespace flash::sm80 {

template <class Traits>
__device__ __forceinline__ bool FwdMainloop<Traits>::run_pair_blocks(const General<T>& general, const FwdPlace& at) {
  const FwdBarriers<Traits> barriers = copies.barriers();
#pragma unroll 1
  for (;; n_block--, count++) {
    if constexpr (!Traits::kGeneral) {
      if (n_block < at.plain_end) {
        const int plain_begin = at.plain_begin;
#pragma unroll 1
        for (; n_block >= plain_begin; n_block--, count++) {
          if (!wait_pair_block(n_block % kBlocksPerCheck == 0)) return false;
          add_block(general, true, [&] {
            const T *k, *v;
            copies.load_pointers(k, v);
            barriers.wait_free(count + 1);
            if (n_block > at.begin) {
              copies.whole_block(n_block - 1, k, v, count + 1);
              barriers.arrive_full(count + 1);
            }
          });
          barriers.arrive_read(count);
        }
      }
    }
    if (n_block < at.begin) break;
    if (!wait_pair_block(n_block % kBlocksPerCheck == 0 && !at.raise_always)) return false;
    add_block(general, false, [&] {
      barriers.wait_free(count + 1);
      copies.block(n_block - 1, place, count + 1);
    });
    barriers.arrive_read(count);
  }
  ptx::cp_async_wait_all();  // of Q, where the tile sees no key
  return !__syncthreads_or(!at.raise_always && softmax.out_of_range());
}

// Waits for block n_block. Where sums are checked, returns false if they have left their range.
template <class Traits>
__device__ __forceinline__ bool FwdMainloop<Traits>::wait_pair_block(bool check) {
  copies.barriers().wait_full(count);
  if (!(check && __syncthreads_or(softmax.out_of_range()))) return true;
  copies.barriers().arrive_read(count++);
  return false;
}

}  // namespace flash::sm80
