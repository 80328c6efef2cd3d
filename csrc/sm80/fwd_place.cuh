// What a block of the forward computes. It lies in shared memory, because the loop over keys has no registers for it.
#pragma once

#include "../attn/mask.h"
#include "fwd_traits.cuh"
#include "load.cuh"
#include "work.h"

namespace flash::sm80 {

// Blocks of keys as some rows, a tile's or a warp's, see them.
struct RowBlocks {
  int begin, end;            // of all
  int full_begin, full_end;  // of those that need no mask
  int plain_end;             // from full_begin to here: neither a mask nor a maximum

  // row0: the first.
  __device__ static RowBlocks of(const Band& band, int row0, int rows, int block_n) {
    const BlockRange r = key_blocks(band, row0, rows, block_n);
    // Every row must have seen a key before the first block without a maximum.
    const int plain_end = min_of(r.full_end, floor_div(band.key_end(row0) - 1, block_n));
    return {r.begin, r.end, r.full_begin, r.full_end, plain_end};
  }
  __device__ __forceinline__ bool sees(int block) const { return block >= begin && block < end; }
  __device__ __forceinline__ bool needs_mask(int block) const { return block < full_begin || block >= full_end; }
  __device__ __forceinline__ bool needs_maximum(int block) const { return block < full_begin || block >= plain_end; }
};

struct FwdPlace {
  const void *k, *v;  // of the sequence's first key and the kv head
  Work work;
  int head_kv;
  SeqInfo seq;
  int begin, end;  // blocks of keys that the tile sees
  // Of these, the ones that need neither a mask nor a maximum and whose copies have no edges.
  int plain_begin, plain_end;
  int whole_rows;    // of K and V: they fill the columns of the tiles with aligned chunks
  int raise_always;  // the sums left their range without a maximum

  template <class Traits>
  __device__ static FwdPlace of(const FwdParams& p, const Work& work, int head_kv, const SeqInfo& seq) {
    const Band band = Band::of(p, seq);
    const RowBlocks blocks = RowBlocks::of(band, work.tile * Traits::kBlockM, Traits::kBlockM, Traits::kBlockN);
    const bool whole_rows = chunks_aligned(p.k) && chunks_aligned(p.v) && p.head_dim == Traits::kHeadDim &&
                            p.head_dim_v == Traits::kHeadDimV;
    const int plain_begin = whole_rows ? blocks.full_begin : blocks.end;
    return {element<Traits>(p.k, offset_of(p.k, work.batch_index, seq.k0, 0, head_kv)),
            element<Traits>(p.v, offset_of(p.v, work.batch_index, seq.k0, 0, head_kv)),
            work,
            head_kv,
            seq,
            blocks.begin,
            blocks.end,
            plain_begin,
            blocks.plain_end,
            whole_rows,
            Traits::kGeneral};
  }

 private:
  template <class Traits>
  __device__ static const void* element(const Strided& t, int64_t offset) {
    return static_cast<const typename Traits::T*>(t.ptr) + offset;
  }
};

}  // namespace flash::sm80
