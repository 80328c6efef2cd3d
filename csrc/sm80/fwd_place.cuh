// What a block of the forward computes. It lies in shared memory, because the loop over keys has no registers for it.
#pragma once

#include "../attn/mask.h"
#include "fwd_traits.cuh"
#include "load.cuh"
#include "work.h"

namespace flash::sm80 {

struct FwdPlace {
  Work work;
  SeqInfo seq;
  int begin, end;  // blocks of keys that the tile sees
  // Of these, the ones that need neither a mask nor a maximum.
  int plain_begin, plain_end;
  int whole_rows;    // of K and V: they fill the columns of the tiles with aligned chunks
  int raise_always;  // the sums left their range without a maximum

  template <class Traits>
  __device__ static FwdPlace of(const FwdParams& p, const Work& work, const SeqInfo& seq) {
    const Band band = Band::of(p, seq);
    const int row0 = work.tile * Traits::kBlockM;
    const BlockRange blocks = key_blocks(band, row0, Traits::kBlockM, Traits::kBlockN);
    // Every row must have seen a key before the first block without a maximum.
    const int plain_end = min_of(blocks.full_end, floor_div(band.key_end(row0) - 1, Traits::kBlockN));
    const bool whole_rows = chunks_aligned(p.k) && chunks_aligned(p.v) && p.head_dim == Traits::kHeadDim &&
                            p.head_dim_v == Traits::kHeadDimV;
    return {work, seq, blocks.begin, blocks.end, blocks.full_begin, plain_end, whole_rows, Traits::kGeneral};
  }
};

}  // namespace flash::sm80
