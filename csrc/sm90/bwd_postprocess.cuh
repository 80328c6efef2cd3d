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

// A lane's four numbers of a group of eight columns are those of rows lane / 4 and lane / 4 + 8.
struct DqUnits {
  bool integers;
  float rows[2];

  __device__ __forceinline__ static DqUnits of(const BwdArgs& args, int64_t band) {
    const float dq_scale = args.p.softmax_scale;
    if (!args.p.deterministic) return {false, {dq_scale, dq_scale}};
    const float* scale = args.row_scale + band * kBandRows + threadIdx.x % 32 / 4;
    return {bool(signbit(scale[0])), {dq_scale / fabsf(scale[0]), dq_scale / fabsf(scale[8])}};
  }

  // dq of the lane's four numbers of the group at `group`
  __device__ __forceinline__ float4 load(const float* group) const {
    const int lane = threadIdx.x % 32;
    float4 x;
    if (integers) {
      const int32_t* sums = reinterpret_cast<const int32_t*>(group) + lane;
      x = {float(__ldcs(sums)), float(__ldcs(sums + 32)), float(__ldcs(sums + 64)), float(__ldcs(sums + 96))};
    } else {
      x = __ldcs(reinterpret_cast<const float4*>(group) + lane);
    }
    return {x.x * rows[0], x.y * rows[0], x.z * rows[1], x.w * rows[1]};
  }
};

template <class T, int kHeadDim>
__device__ __forceinline__ void write_dq(const BwdArgs& args, const SeqInfo& seq, int batch, int head, int band) {
  const BwdParams& p = args.p;
  const int groups = p.head_dim / 8;
  const int64_t band_index = head * args.bands + first_band(p, seq, batch) + band;
  const DqUnits units = DqUnits::of(args, band_index);
  T* dst = static_cast<T*>(p.dq.ptr) + offset_of(p.dq, batch, seq.q0, 0, head);
  constexpr int kChunk = kHeadDim % 64 == 0 ? 8 : 4;  // groups whose loads are in flight together
#pragma unroll 1
  for (int g0 = 0; g0 < kHeadDim / 8; g0 += kChunk) {
    float acc[4 * kChunk] = {};
#pragma unroll
    for (int i = 0; i < kChunk; i++)
      if (g0 + i < groups) {
        const float4 x = units.load(args.dq_accum + (band_index * groups + g0 + i) * 128);
        acc[4 * i] = x.x, acc[4 * i + 1] = x.y, acc[4 * i + 2] = x.z, acc[4 * i + 3] = x.w;
      }
    store_rows<T, 8 * kChunk>(dst + 8 * g0, p.dq.row, band * kBandRows, seq.seqlen_q, p.head_dim - 8 * g0, acc, 1.f);
  }
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(32 * PostprocessGrid::kWarps)
    bwd_postprocess(const __grid_constant__ BwdArgs args, PostprocessGrid grid) {
  const BwdParams& p = args.p;
  // Heads vary fastest. The last ones come first, whose sums are still in the L2 cache.
  const int64_t item = int64_t(gridDim.x - 1 - blockIdx.x) * PostprocessGrid::kWarps + threadIdx.x / 32;
  const int head = int(item % p.num_heads), band = int(item / p.num_heads % grid.bands);
  const int64_t batch = item / p.num_heads / grid.bands;
  ptx::griddepcontrol_wait();  // also without work: what follows this kernel may need what main writes
  if (batch >= p.batch) return;
  const SeqInfo seq = SeqInfo::of(p, int(batch));
  if (band * kBandRows >= seq.seqlen_q) return;
  write_dq<T, kHeadDim>(args, seq, int(batch), head, band);
}

}  // namespace flash::sm90
