// After the backward: dq = softmax_scale * dq_accum in the dtype of q. One warp per band and head.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_fixed_point.cuh"

namespace flash::sm90 {

struct PostprocessGrid {
  int bands;  // of the longest segment
  FLASH_HD int64_t count(int64_t batch, int heads) const { return ceil_div_64(int64_t(bands) * batch * heads, kWarps); }
  static constexpr int kWarps = 4;
  FLASH_HD static int64_t ceil_div_64(int64_t a, int64_t b) { return (a + b - 1) / b; }
};

// This lane's four numbers of a group of eight columns. `row`: of row_scale.
__device__ __forceinline__ float4 load_accumulator(const BwdArgs& args, int64_t group, int64_t row) {
  const int lane = threadIdx.x % 32;
  if (!args.p.deterministic) return __ldcs(reinterpret_cast<const float4*>(args.dq_accum + group) + lane);
  const int32_t* sums = reinterpret_cast<const int32_t*>(args.dq_accum) + group + lane;
  const float unit0 = 1.f / args.row_scale[row + lane / 4], unit1 = 1.f / args.row_scale[row + lane / 4 + 8];
  return {float(__ldcs(sums)) * unit0, float(__ldcs(sums + 32)) * unit0, float(__ldcs(sums + 64)) * unit1,
          float(__ldcs(sums + 96)) * unit1};
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(32 * PostprocessGrid::kWarps)
    bwd_postprocess(const __grid_constant__ BwdArgs args, PostprocessGrid grid) {
  const BwdParams& p = args.p;
  const int64_t item = int64_t(blockIdx.x) * PostprocessGrid::kWarps + threadIdx.x / 32;  // heads vary fastest
  const int head = int(item % p.num_heads), band = int(item / p.num_heads % grid.bands);
  const int64_t batch_index = item / p.num_heads / grid.bands;
  if (batch_index >= p.batch) return;
  const int batch = int(batch_index);
  const SeqInfo seq = SeqInfo::of(p, batch);
  if (band * kBandRows >= seq.seqlen_q) return;
  ptx::griddepcontrol_wait();

  const int groups = p.head_dim / 8;
  const int64_t band0 = first_band(p, seq, batch) + band;
  const int64_t first = (head * args.bands + band0) * groups * 128;
  T* dst = static_cast<T*>(p.dq.ptr) + offset_of(p.dq, batch, seq.q0, 0, head);
  constexpr int kChunk = kHeadDim % 64 == 0 ? 8 : 4;  // groups whose loads are in flight together
#pragma unroll
  for (int g0 = 0; g0 < kHeadDim / 8; g0 += kChunk) {
    float acc[4 * kChunk] = {};
#pragma unroll
    for (int i = 0; i < kChunk; i++)
      if (g0 + i < groups) {
        const float4 x = load_accumulator(args, first + (g0 + i) * 128, (head * args.bands + band0) * kBandRows);
        acc[4 * i] = x.x, acc[4 * i + 1] = x.y, acc[4 * i + 2] = x.z, acc[4 * i + 3] = x.w;
      }
    store_rows<T, 8 * kChunk>(dst + 8 * g0, p.dq.row, band * kBandRows, seq.seqlen_q, p.head_dim - 8 * g0, acc,
                              p.softmax_scale);
  }
}

}  // namespace flash::sm90
