// Between the preprocess kernel and the main one, for bitwise equal results: the scales of rows (bwd_exact_sum.h), from
// the bounds of all keys of a head and the norms of dO, in whose place they come. Of its own, because these two are
// found side by side.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_args.cuh"

namespace flash::sm90 {

struct ScalesGrid {
  static constexpr int kThreads = 256, kRows = 4 * kThreads;  // rows of one head in a thread block
  int blocks_of_head;                                         // of the longest segment
  FLASH_HD int64_t count(int64_t batch, int heads) const { return batch * heads * blocks_of_head; }
};

// Of all `groups` groups; every thread of the block learns of it.
__device__ __forceinline__ KeyBounds largest_bounds(const KeyBounds* bounds, int groups) {
  constexpr int kWarps = ScalesGrid::kThreads / 32;
  __shared__ KeyBounds of_warp[kWarps];
  KeyBounds b{};
  for (int i = threadIdx.x; i < groups; i += ScalesGrid::kThreads) b = b.larger(bounds[i]);
  b = {__reduce_max_sync(~0u, b.largest_v), __reduce_max_sync(~0u, b.largest_k), __reduce_max_sync(~0u, b.smallness)};
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = b;
  __syncthreads();
  for (int w = 0; w < kWarps; w++) b = b.larger(of_warp[w]);
  return b;
}

template <int kHeadDim>
__global__ void __launch_bounds__(ScalesGrid::kThreads)
    bwd_row_scales(const __grid_constant__ BwdArgs args, ScalesGrid grid) {
  ptx::griddepcontrol_launch_dependents();
  const BwdParams& p = args.p;
  const int head = int(blockIdx.x / grid.blocks_of_head % p.num_heads),
            batch = int(blockIdx.x / grid.blocks_of_head / p.num_heads);
  const int row0 = int(blockIdx.x % grid.blocks_of_head) * ScalesGrid::kRows + int(threadIdx.x);
  const SeqInfo seq = SeqInfo::of(p, batch);
  const int64_t band0 = head * args.bands + first_band(p, seq, batch);
  const int head_kv = head / (p.num_heads / p.num_heads_kv), rows = round_up(seq.seqlen_q, kBandRows);
  ptx::griddepcontrol_wait();  // also without work: the main kernel starts behind the end of this one alone
  if (row0 - int(threadIdx.x) >= rows) return;

  constexpr int kPasses = ScalesGrid::kRows / ScalesGrid::kThreads;
  float* scales = args.row_scale + band0 * kBandRows + row0;
  float norm[kPasses], delta[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; i++) {
    const int row = row0 + i * ScalesGrid::kThreads;
    if (row >= rows) continue;
    norm[i] = scales[i * ScalesGrid::kThreads];
    delta[i] = args.stats[(band0 + row / kBandRows) * kBandStats + kBandRows + row % kBandRows];
  }
  const KeyBounds b = largest_bounds(args.key_bounds + head_kv * args.key_groups + first_key_group(p, seq, batch),
                                     ceil_div(seq.seqlen_k, bounds_keys(kHeadDim)));
  const ExactSum sum = ExactSum::of(__int_as_float(b.largest_v), __int_as_float(b.largest_k),
                                    __int_as_float(b.smallness), visible_keys(p, seq));
#pragma unroll
  for (int i = 0; i < kPasses; i++)
    if (row0 + i * ScalesGrid::kThreads < rows) scales[i * ScalesGrid::kThreads] = sum.scale(norm[i], delta[i]);
}

}  // namespace flash::sm90
