// delta = rowsum(dout * out) - dlse, one number per query row.
#pragma once

#include "../attn/numeric.cuh"
#include "../attn/seqlen.h"
#include "load.cuh"
#include "work.h"

namespace flash::sm80 {

struct BwdPreprocess {
  static constexpr int kThreads = 256, kLanesPerRow = 8, kRows = kThreads / kLanesPerRow;
};

template <class T>
__device__ __forceinline__ float dot_chunk(const T* a, const T* b, int count, bool aligned) {
  float sum = 0.f;
  if (aligned && count >= 8) {
    const uint4 x = *reinterpret_cast<const uint4*>(a), y = *reinterpret_cast<const uint4*>(b);
    const T *xs = reinterpret_cast<const T*>(&x), *ys = reinterpret_cast<const T*>(&y);
#pragma unroll
    for (int i = 0; i < 8; i++) sum += to_float(xs[i]) * to_float(ys[i]);
  } else {
    for (int i = 0; i < min_of(8, count); i++) sum += to_float(a[i]) * to_float(b[i]);
  }
  return sum;
}

// One block per (batch, head, kRows queries).
template <class T>
__global__ void __launch_bounds__(BwdPreprocess::kThreads)
    bwd_preprocess(const __grid_constant__ BwdParams p, const __grid_constant__ TileOrder order) {
  const Work work = order.work_of(blockIdx.x);
  const SeqInfo seq = SeqInfo::of(p, work.batch_index);
  const int row = work.tile * BwdPreprocess::kRows + threadIdx.x / BwdPreprocess::kLanesPerRow;
  if (row >= seq.seqlen_q) return;  // the lanes of a row leave together
  const T* out = static_cast<const T*>(p.out.ptr) + offset_of(p.out, work.batch_index, seq.q0, row, work.head);
  const T* dout = static_cast<const T*>(p.dout.ptr) + offset_of(p.dout, work.batch_index, seq.q0, row, work.head);
  const bool aligned = chunks_aligned(p.out) && chunks_aligned(p.dout);
  const int lane = threadIdx.x % BwdPreprocess::kLanesPerRow;
  float sum = 0.f;
  for (int c = lane * 8; c < p.head_dim_v; c += 8 * BwdPreprocess::kLanesPerRow)
    sum += dot_chunk(out + c, dout + c, p.head_dim_v - c, aligned);
  const unsigned mask = 0xFFu << (threadIdx.x % 32 / BwdPreprocess::kLanesPerRow * BwdPreprocess::kLanesPerRow);
#pragma unroll
  for (int offset = BwdPreprocess::kLanesPerRow / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(mask, sum, offset);
  if (lane != 0) return;
  if (p.dlse.ptr) sum -= p.dlse.ptr[offset_of(p.dlse, work.batch_index, seq.q0, row, work.head)];
  p.delta.ptr[offset_of(p.delta, work.batch_index, seq.q0, row, work.head)] = sum;
}

}  // namespace flash::sm80
