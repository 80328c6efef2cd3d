// End of an FP8 tile: O divided by the sums of the rounded P, times v_descale, in 16 bit; LSE from the sums in fp32.
#pragma once

#include "fp8_softmax.cuh"
#include "fp8_totals.cuh"
#include "fwd_epilogue.cuh"

namespace flash::sm90 {

// Denominator and LSE of one row from its shift, the sum of its P in fp32 and that of its rounded P.
__device__ __forceinline__ RowResult fp8_row_result(float shift, float sum, float rounded_sum, const float* sink) {
  const bool empty = !(sum != 0.f);  // a NaN is not empty
  if (sink == nullptr) return {empty ? 0.f : 1.f / rounded_sum, empty ? -CUDART_INF_F : (shift + log2f(sum)) * kLn2};
  // The sink joins the denominator; whichever is larger becomes the reference.
  const float extra = *sink * kLog2e;
  if (empty) return {0.f, *sink};
  const float joint = fmaxf(shift, extra);
  const float weight = exp2f(shift - joint), weight_of_sink = exp2f(extra - joint);
  return {weight / (rounded_sum * weight + weight_of_sink), (joint + log2f(sum * weight + weight_of_sink)) * kLn2};
}

template <class Traits>
__device__ __forceinline__ void store_fp8_tile(const Fp8Totals<Traits>& totals, const Fp8Softmax<Traits>& softmax,
                                               const FwdArgs& args, const Tile& tile, FragmentPlace at) {
  const FwdParams& p = args.params;
  const float v_descale = Descales::of(p, tile).v;
  const float* sink = p.sinks != nullptr ? p.sinks + tile.head : nullptr;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = at.row + 8 * r;
    float sum = softmax.row_sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const RowResult result = fp8_row_result(softmax.shift[r], sum, totals.sum[r], sink);
    const bool exists = row < tile.seqlen_q, empty = result.inverse_sum == 0.f;
    if (threadIdx.x % 4 == 0 && exists) p.lse.ptr[offset_of(p.lse, tile.batch, tile.q0, row, tile.head)] = result.lse;
    const int64_t offset = offset_of(p.out, tile.batch, tile.q0, row, tile.head);
    const float factor = result.inverse_sum * v_descale;
    if (p.out_dtype == DType::kF16) {
      store_row(totals.result(), r, factor, empty, exists ? static_cast<__half*>(p.out.ptr) + offset : nullptr,
                p.head_dim_v);
    } else {
      store_row(totals.result(), r, factor, empty, exists ? static_cast<__nv_bfloat16*>(p.out.ptr) + offset : nullptr,
                p.head_dim_v);
    }
  }
}

}  // namespace flash::sm90
