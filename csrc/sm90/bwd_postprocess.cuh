// After the backward: dq = softmax_scale * dq_accum in the dtype of q. One warp per band and head.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_epilogue.cuh"

namespace flash::sm90 {

struct PostprocessGrid {
  int bands;  // of the longest segment
  FLASH_HD int64_t count(int64_t batch, int heads) const { return ceil_div_64(int64_t(bands) * batch * heads, kWarps); }
  static constexpr int kWarps = 4;
  FLASH_HD static int64_t ceil_div_64(int64_t a, int64_t b) { return (a + b - 1) / b; }
};

// This lane's four numbers of a group of eight columns.
__device__ __forceinline__ void load_accumulator(const BwdArgs& args, int64_t group, int64_t row, float* acc) {
  const int lane = threadIdx.x % 32;
  if (args.p.deterministic) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int32_t x = __ldcs(reinterpret_cast<const int32_t*>(args.dq_accum) + group + i * 32 + lane);
      acc[i] = float(x) / args.row_scale[row + lane / 4 + i / 2 * 8];
    }
  } else {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(args.dq_accum + group) + lane);
    acc[0] = x.x, acc[1] = x.y, acc[2] = x.z, acc[3] = x.w;
  }
}

template <class T>
__global__ void __launch_bounds__(32 * PostprocessGrid::kWarps) bwd_postprocess(const __grid_constant__ BwdArgs args,
                                                                                PostprocessGrid grid) {
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
#pragma unroll 2
  for (int g = 0; g < groups; g += 4) {
    float acc[16] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (g + i < groups) load_accumulator(args, first + (g + i) * 128, (head * args.bands + band0) * kBandRows, acc + 4 * i);
    store_rows<T, 32>(dst + 8 * g, p.dq.row, band * kBandRows, seq.seqlen_q, p.head_dim - 8 * g, acc, p.softmax_scale);
  }
}

}  // namespace flash::sm90
