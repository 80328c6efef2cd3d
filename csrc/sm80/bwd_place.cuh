// What a block of the backward computes, as far as the loop over queries has no registers for it: it lies in shared
// memory. What a step needs is worked out once, as far as it does not depend on the step.
#pragma once

#include "bwd_traits.cuh"
#include "bwd_workspace.cuh"
#include "load.cuh"
#include "work.h"

namespace flash::sm80 {

template <class T>
struct BwdPlace {
  // Of the sequence's first row and the block's first query head.
  const T *q, *dout;         // (seqlen_q, head_dim), (seqlen_q, head_dim_v)
  const float *lse, *delta;  // (seqlen_q)
  int64_t dq_tile;           // in the workspace
  int64_t q0;
  int batch_index, head_kv;
  int whole_rows;  // of q and dout: they fill the columns of the tiles with aligned chunks

  template <class Traits>
  __device__ static BwdPlace of(const BwdParams& p, const SeqInfo& seq, int batch_index, int head_kv, int first_head) {
    const bool whole_rows = chunks_aligned(p.q) && chunks_aligned(p.dout) && p.head_dim == Traits::kHeadDim &&
                            p.head_dim_v == Traits::kHeadDimV;
    return {static_cast<const T*>(p.q.ptr) + offset_of(p.q, batch_index, seq.q0, 0, first_head),
            static_cast<const T*>(p.dout.ptr) + offset_of(p.dout, batch_index, seq.q0, 0, first_head),
            p.lse.ptr + offset_of(p.lse, batch_index, seq.q0, 0, first_head),
            p.delta.ptr + offset_of(p.delta, batch_index, seq.q0, 0, first_head),
            BwdWorkspace<Traits>{p}.dq_tile(batch_index, seq, first_head, 0),
            seq.q0,
            batch_index,
            head_kv,
            whole_rows};
  }
};

}  // namespace flash::sm80
