// The launches of one backward pass.
#pragma once

#include "bwd_delta.cuh"
#include "bwd_dkv_kernel.cuh"
#include "bwd_dq_kernel.cuh"

namespace flash::simt {

template <class T>
void launch_bwd(const BwdParams& p, Stream stream) {
  const bool add_dq = T::kCanAddDq && !p.deterministic;
  launch_clear_packed(p, stream);
  if (add_dq && p.cu_seqlens_q == nullptr) launch_clear(p, p.dq, p.seqlen_q, p.num_heads, p.batch, p.head_dim, stream);
  launch_delta(p, stream);
  if (!add_dq)
    launch<T>(bwd_dq_simt_kernel<T>, "bwd_dq_simt", p, grid_of(p.seqlen_q, T::kBlockM, p.num_heads, p.batch), stream);
  launch<T>(bwd_dkv_simt_kernel<T>, "bwd_dkv_simt", p, grid_of(p.seqlen_k, T::kBlockM, p.num_heads_kv, p.batch),
            stream);
}

}  // namespace flash::simt
